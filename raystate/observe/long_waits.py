"""What takes long says so in the run's log: calmly, after ten seconds, after twenty, after forty, later every five minutes."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from raystate.core.formats.messages import Progress, Tick, Written
from raystate.observe.progress import Going, Shares
from raystate.observe.status import UnderWay
from raystate.waits import SELDOM_S, TOLD_AFTER_S

logger = logging.getLogger("raystate.coordinator")


@dataclass(slots=True, kw_only=True)
class LongWait:
    """Something that goes on."""

    what: UnderWay
    since_s: float
    next_s: float  # when it is told next
    shares: Shares = field(default_factory=Shares)

    def going(self, now_s: float) -> Going:
        done, total = self.shares.sums()
        what = "restoring" if self.what.tier else "saving"
        return Going(
            what=what, step=self.what.step, of=self.what.of, since_s=now_s - self.since_s, done_bytes=done, total_bytes=total
        )

    def text(self, now_s: float) -> str:
        going = self.going(now_s)
        so_far = f": {text}" if (text := going.text()) else ""
        if self.what.tier:
            return f"the ranks are still restoring step {going.step} from {self.what.tier} after {going.since_s:.0f} s{so_far}"
        if going.total_bytes and going.done_bytes == going.total_bytes:
            so_far += ", all of it; it is not durable yet"
        return f"step {going.step} is still being written (save {going.of}) after {going.since_s:.0f} s{so_far}"


class LongWaits:
    """How long all that the Coordinator has under way takes, and how far it is."""

    def __init__(self) -> None:
        self._waits: dict[str, LongWait] = {}

    def look(self, under_way: Iterable[UnderWay], event: Any, now_s: float) -> None:
        """Follow what goes on after an event; with a tick, tell what takes long."""
        self._waits = {
            one.of: self._waits.get(one.of)
            or LongWait(what=one, since_s=now_s if one.since_s is None else one.since_s, next_s=now_s + TOLD_AFTER_S)
            for one in under_way
        }
        match event:
            case Progress(of=of) if of in self._waits:
                self._waits[of].shares.hear(event)
            case Written(save=save, host=host, error="") if save in self._waits:
                self._waits[save].shares.finished(host)
            case Tick():
                for wait in self._waits.values():
                    if now_s >= wait.next_s:
                        wait.next_s = now_s + min(SELDOM_S, now_s - wait.since_s)
                        logger.info("%s", wait.text(now_s), extra={"is_routine": True})
            case _:
                pass

    def since_s(self, of: str | None) -> float | None:
        """When that has begun; None: it isn't under way."""
        return None if of not in self._waits else self._waits[of].since_s

    def going(self, now_s: float) -> tuple[Going, ...]:
        """What goes on at the moment, oldest first."""
        return tuple(wait.going(now_s) for wait in sorted(self._waits.values(), key=lambda one: one.since_s))
