"""Where the time of a training thread goes: in saves, restores, compilation and the sections that its script names; the rest are steps.

The trainer's word carries the sums. Counting takes no lock: it must cost a training loop nothing.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from collections.abc import Callable
from threading import get_ident
from types import TracebackType

from raystate.core.formats.reports import COMPILATION, SAVES, SECTION, TrainerWord

STEPS = ""
OTHER = f"{SECTION}other"  # of a script that gives names without end
MOST_SECTIONS, LONGEST_NAME = 16, 60  # so a word stays small
# A word has the newest call whose step is a multiple of each: however seldom its host reports, there are steps of which it hears from all.
_MULTIPLES = (1, 8, 64, 512)
_REMEMBERED_COMPILATIONS = 256


class Span:
    """The cause of a `with` block's time. It costs about a microsecond: no lock, no word, no message. It may be used again.

    Args:
        cause: `STEPS`: it belongs to the steps, although the span around it does not.
    """

    __slots__ = ("_spent", "cause")

    def __init__(self, spent: Spent, cause: str):
        self._spent = spent
        self.cause = cause

    def __enter__(self) -> None:
        spent, cause = self._spent, self.cause
        if get_ident() != spent.thread:
            return
        now_s, before = spent.clock(), spent.running
        if cause is SAVES:
            spent.saving_s = now_s
        spent.around.append(cause)
        # In this order: what another thread reads in between is too little for a moment, and never too much.
        spent.running = cause, now_s
        if before is not None:
            spent.seconds[before[0]] += now_s - before[1]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        spent, cause, around = self._spent, self.cause, self._spent.around
        if get_ident() != spent.thread or cause not in around:
            return
        now_s, before = spent.clock(), spent.running
        if around[-1] is cause:
            around.pop()
        else:  # those of generators end in any order
            del around[len(around) - 1 - around[::-1].index(cause)]
        spent.running = (around[-1], now_s) if around else None
        if before is not None:
            spent.seconds[before[0]] += now_s - before[1]


class Spent:
    """One process's, since it joined. It counts on the thread that makes it; on others nothing happens. A word may be made on any.

    Times are exclusive: a span stops the one around it.

    Args:
        clock: CLOCK_MONOTONIC, which the processes of a node share.

    Attributes:
        seconds: by cause, of spans that have ended or stopped.
        around: causes of the spans that are open, the innermost last.
        running: of the innermost: its cause, and since when it counts.
        saving_s: when the newest call of save() began.
        sections: those with a name of their own.
    """

    def __init__(self, clock: Callable[[], float]):
        self.clock = clock
        self.thread = get_ident()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.around: list[str] = []
        self.running: tuple[str, float] | None = None
        self.saving_s = self._joined_s = clock()
        self._limits: list[tuple[str, float]] = []  # of the open sections with a time-out: name and seconds
        self.sections: dict[str, Span] = {}
        self._compiled: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED_COMPILATIONS)  # (middle, seconds)
        self._reached: dict[int, tuple[int, float]] = {}  # by its multiple

    @property
    def is_mine(self) -> bool:
        """Whether this is the training thread."""
        return get_ident() == self.thread

    def span(self, cause: str) -> Span:
        """For a `with` block."""
        return Span(self, cause)

    def compiled(self, seconds: float) -> None:
        """JAX has traced, lowered or compiled for so long until now. Its durations may lie in each other."""
        if not self.is_mine:
            return
        now_s, inner_s = self.clock(), 0.0
        while self._compiled and self._compiled[-1][0] >= now_s - seconds:
            inner_s += self._compiled.pop()[1]
        self._compiled.append((now_s - seconds / 2, seconds))
        own_s = max(0.0, seconds - inner_s)
        if self.running is not None:
            cause, since_s = self.running
            self.running = cause, min(now_s, since_s + own_s)
        self.seconds[COMPILATION] += own_s

    # ------------------------------------------------------------ sections

    def section(self, name: str) -> Span:
        """For a `with` block that counts under this name."""
        if (known := self.sections.get(name)) is not None:
            return known
        if len(self.sections) >= MOST_SECTIONS:
            return self.span(OTHER)
        return self.sections.setdefault(name, self.span(SECTION + name[:LONGEST_NAME]))

    def limit(self, name: str, timeout_s: float) -> None:
        """A section with a time-out of its own begins."""
        self._limits.append((name[:LONGEST_NAME], timeout_s))

    def unlimit(self, name: str, timeout_s: float) -> None:
        """It ends."""
        if (one := (name[:LONGEST_NAME], timeout_s)) in self._limits:
            self._limits.remove(one)

    # ------------------------------------------------------------ the word

    def reached(self, step: int) -> None:
        """The call of save() that is under way snapshots this step, as it does on the other ranks."""
        if self.is_mine:
            for multiple in _MULTIPLES:
                if step % multiple == 0:
                    self._reached[multiple] = step, round(self.saving_s, 6)

    def begin_anew(self) -> None:
        """In another lineage the steps have other times."""
        self._reached = {}

    def told(self, word: TrainerWord) -> TrainerWord:
        """The word, with the sums as of now."""
        # The sums first, then what runs: see `Span`.
        seconds, running, now_s = self.seconds.copy(), self.running, self.clock()
        if running is not None:
            seconds[running[0]] += now_s - running[1]
        section, section_s = next(reversed(self._limits), ("", 0.0))
        return dataclasses.replace(
            word,
            lived_s=round(now_s - self._joined_s, 6),
            spent=tuple((cause, round(sum_s, 6)) for cause, sum_s in seconds.items() if cause != STEPS),
            reached=tuple(dict.fromkeys(self._reached.copy().values())),
            section=section,
            section_s=section_s,
        )
