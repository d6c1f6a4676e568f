"""How far long saves and restores are: said by the processes that move the bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from raystate.arena import format_bytes
from raystate.core.formats.messages import HostId, Progress
from raystate.waits import LOOK_EVERY_S, SHOWN_AFTER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Going:
    """Something that goes on, all shares together.

    Attributes:
        what: "saving" or "restoring".
        step: which.
        of: as in `core.formats.events.Progress`.
        since_s: seconds since it began.
        done_bytes: of those processes that have said how far they are.
        total_bytes: of the same; 0: none has.
    """

    what: str
    step: int
    of: str
    since_s: float
    done_bytes: int = 0
    total_bytes: int = 0

    @property
    def bytes_per_s(self) -> float:
        """On average since it began."""
        return self.done_bytes / self.since_s if self.since_s > 0 else 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds that it will still take at that rate; None: the rate isn't known yet."""
        return (self.total_bytes - self.done_bytes) / self.bytes_per_s if self.done_bytes else None

    def text(self) -> str:
        """For a line: "3.2 of 10.0 GiB (32%), 410.0 MiB/s, about 17 s left"; "": no process has
        said how far it is."""
        if not self.total_bytes:
            return ""
        share = self.done_bytes / self.total_bytes
        parts = [f"{format_bytes(self.done_bytes, of=self.total_bytes)} ({share:.0%})"]
        if self.left_s is not None and self.done_bytes < self.total_bytes:
            parts += [f"{format_bytes(self.bytes_per_s)}/s", f"about {_span(self.left_s)} left"]
        return ", ".join(parts)


class Share:
    """What one process moves at the moment, and when it says so: after a second, then every second.

    Args:
        who: see `core.formats.events.Progress`.
        tell: hands on; it must not block, and may lose it.
        done: bytes moved by this process so far, by anything.
        clock: monotonic seconds.
    """

    def __init__(self, who: str, tell: Callable[[Progress], None], done: Callable[[], int], clock: Callable[[], float]):
        self._who = who
        self._tell = tell
        self._done = done
        self._clock = clock
        self._began: dict[str, tuple[int, int]] = {}  # of -> (bytes moved before it, its bytes)
        self._next_s = 0.0

    def began(self, of: str, total_bytes: int) -> None:
        """It moves so many bytes from now on; said again, so many more."""
        if not self._began:
            self._next_s = self._clock() + SHOWN_AFTER_S
        before, total = self._began.get(of, (self._done(), 0))
        self._began[of] = (before, total + total_bytes)

    def ended(self, of: str) -> None:
        """It has moved all, or has failed."""
        self._began.pop(of, None)

    def turn(self) -> None:
        """Tell, if it is time."""
        if not self._began or self._clock() < self._next_s:
            return
        self._next_s = self._clock() + LOOK_EVERY_S
        for of, (before, total) in list(self._began.items()):
            done = min(total, max(0, self._done() - before))
            self._tell(Progress(of=of, who=self._who, done_bytes=done, total_bytes=total))


class Shares:
    """The shares of something that goes on, as they were told last."""

    def __init__(self) -> None:
        self._told: dict[str, Progress] = {}

    def hear(self, progress: Progress) -> None:
        """A process says how far it is."""
        self._told[progress.who] = progress

    def finished(self, who: HostId) -> None:
        """It has moved all of its share."""
        if who in self._told:
            self._told[who] = dataclasses.replace(self._told[who], done_bytes=self._told[who].total_bytes)

    def sums(self) -> tuple[int, int]:
        """(bytes done, bytes in all) of those that have been heard."""
        return sum(one.done_bytes for one in self._told.values()), sum(one.total_bytes for one in self._told.values())


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h" if seconds < 172800 else "days"
