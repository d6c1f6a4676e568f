"""What takes long says so in the run's log: calmly, one line every ten seconds."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from raystate.core.messages import (
    Answer,
    Discard,
    EndTrainers,
    PublishDone,
    RestoreChoice,
    RestoreSettled,
    Tick,
    TrainerExited,
    Write,
)

logger = logging.getLogger("raystate.coordinator")

EVERY_S = 10.0
FORGOTTEN_S = 3600.0  # nobody has told how it ended


@dataclass(slots=True, kw_only=True)
class LongWait:
    """Something that goes on."""

    what: str
    since_s: float
    told_s: float


class LongWaits:
    """Watches the events and commands that pass through the Coordinator, of which the ticks give the time."""

    def __init__(self) -> None:
        self._saves: dict[str, LongWait] = {}
        self._restore: LongWait | None = None

    def observe(self, message: Any, now_s: float) -> None:
        """Follow what begins and ends; with a tick, tell what takes long."""
        match message:
            case Write(save=save, step=step):
                what = f"step {step} is still being written (save {save})"
                self._saves.setdefault(save, LongWait(what=what, since_s=now_s, told_s=now_s))
            case PublishDone(save=str(save), error="") | Discard(save=save):
                self._saves.pop(save, None)
            case Answer(reply=RestoreChoice(step=step, tier=tier)) if step >= 0:
                what = f"the ranks are still restoring step {step} from {tier}"
                if self._restore is None or self._restore.what != what:
                    self._restore = LongWait(what=what, since_s=now_s, told_s=now_s)
            case Answer(reply=RestoreSettled()) | EndTrainers() | TrainerExited():
                self._restore = None
            case Tick():
                self._tell(now_s)
            case _:
                pass

    def _tell(self, now_s: float) -> None:
        for save in [save for save, wait in self._saves.items() if now_s - wait.since_s > FORGOTTEN_S]:
            del self._saves[save]
        for wait in (*self._saves.values(), *([self._restore] if self._restore is not None else [])):
            if now_s - wait.told_s >= EVERY_S:
                wait.told_s = now_s
                logger.info("%s after %.0f s", wait.what, now_s - wait.since_s)
