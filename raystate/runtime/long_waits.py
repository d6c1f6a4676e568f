"""What takes long says so in the run's log: calmly, after ten seconds, after twenty, after forty, later every five minutes."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from raystate.core.formats.messages import (
    Answer,
    CarriedOut,
    Discard,
    EndTrainers,
    Intent,
    Progress,
    RestoreChoice,
    RestoreSettled,
    Tick,
    TrainerExited,
    Write,
    Written,
)
from raystate.runtime.progress import Going, Shares
from raystate.waits import ABANDONED_S, SELDOM_S, TOLD_AFTER_S

logger = logging.getLogger("raystate.coordinator")


@dataclass(slots=True, kw_only=True)
class LongWait:
    """Something that goes on. `of`: see `core.formats.events.Progress`."""

    of: str
    step: int
    tier: str = ""  # of a restore
    since_s: float
    next_s: float
    heard_s: float
    shares: Shares = field(default_factory=Shares)

    def going(self, now_s: float) -> Going:
        done, total = self.shares.sums()
        what = "restoring" if self.tier else "saving"
        return Going(what=what, step=self.step, of=self.of, since_s=now_s - self.since_s, done_bytes=done, total_bytes=total)

    def text(self, now_s: float) -> str:
        going = self.going(now_s)
        so_far = f": {text}" if (text := going.text()) else ""
        if self.tier:
            return f"the ranks are still restoring step {self.step} from {self.tier} after {going.since_s:.0f} s{so_far}"
        if going.total_bytes and going.done_bytes == going.total_bytes:
            so_far += ", all of it; it is not durable yet"
        return f"step {self.step} is still being written (save {self.of}) after {going.since_s:.0f} s{so_far}"


class LongWaits:
    """Watches the events and commands that pass through the Coordinator, of which the ticks give the time."""

    def __init__(self) -> None:
        self._saves: dict[str, LongWait] = {}
        self._restore: LongWait | None = None

    def observe(self, message: Any, now_s: float) -> None:
        """Follow what begins and ends; with a tick, tell what takes long."""
        match message:
            case Write(save=save, step=step):
                if save not in self._saves:
                    self._saves[save] = LongWait(of=save, step=step, since_s=now_s, next_s=now_s + TOLD_AFTER_S, heard_s=now_s)
            case Written(save=save, host=host, error=""):
                if save in self._saves:
                    self._saves[save].shares.finished(host)
            case CarriedOut(intent=Intent(kind="commit", save=str(save)), error="") | Discard(save=save):
                self._saves.pop(save, None)
            case Answer(reply=RestoreChoice(step=step, tier=tier, begins=begins)) if step >= 0:
                if self._restore is None or self._restore.of != begins:
                    self._restore = LongWait(
                        of=begins, step=step, tier=tier, since_s=now_s, next_s=now_s + TOLD_AFTER_S, heard_s=now_s
                    )
            case Answer(reply=RestoreSettled()) | EndTrainers() | TrainerExited():
                self._restore = None
            case Progress():
                for wait in self._all():
                    if wait.of == message.of:
                        wait.heard_s = now_s
                        wait.shares.hear(message)
            case Tick():
                self._tell(now_s)
            case _:
                pass

    def going(self, now_s: float) -> tuple[Going, ...]:
        """What goes on at the moment, oldest first."""
        return tuple(wait.going(now_s) for wait in sorted(self._all(), key=lambda one: one.since_s))

    def _all(self) -> list[LongWait]:
        return [*self._saves.values(), *([self._restore] if self._restore is not None else [])]

    def _tell(self, now_s: float) -> None:
        self._saves = {save: wait for save, wait in self._saves.items() if now_s - wait.heard_s <= ABANDONED_S}
        if self._restore is not None and now_s - self._restore.heard_s > ABANDONED_S:
            self._restore = None
        for wait in self._all():
            if now_s >= wait.next_s:
                wait.next_s = now_s + min(SELDOM_S, now_s - wait.since_s)
                logger.info("%s", wait.text(now_s))
