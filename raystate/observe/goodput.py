"""Where a run's time went: each second has one cause, as far as the run's ledger tells."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from raystate.observe.timeline import Stretch, Timeline


class Cause(NamedTuple):
    """A cause of time spent: its name for people, and its meaning."""

    name: str
    means: str


# In the order in which people are shown them.
CAUSES: Mapping[str, Cause] = {
    "steps": Cause("productive steps", "steps that were needed, each as long as an undisturbed one"),
    "repeated": Cause("repeated steps", "steps that had been done before"),
    "slower": Cause("slower steps", "what the steps took longer than undisturbed ones, as where they waited for a slow rank"),
    "saves": Cause("blocked by saves", "training stood still for a save"),
    "restore": Cause("restore", "reading a step back"),
    "start": Cause("start", "until an end was noticed; processes, libraries and the training function until the first step"),
    "compilation": Cause("compilation", "tracing and compiling"),
    "hosts": Cause("waiting for hosts", "hosts that the run needs were not there"),
    "waiting": Cause("sections and hangs", "in sections that the training names, such as data; or ranks hung"),
    "stopped": Cause("stopped", "no training was asked for"),
    "unknown": Cause("unknown", "the ledger does not tell"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """A time, shared out among its causes.

    Attributes:
        begin_s, end_s: seconds since 1970.
        seconds_by_cause: of all `CAUSES`, none negative; they sum up to `wall_s`.
        waiting: section -> seconds, of those in `seconds_by_cause["waiting"]`.
        steps: done in this time; `repeated`: how many of them had been done before. Fractions belong to steps at its edges.
        step_s: seconds that count for each of these steps that was needed: of an undisturbed one, on average over the run's worker groups;
            None: there was none.
    """

    begin_s: float
    end_s: float
    seconds_by_cause: Mapping[str, float]
    waiting: Mapping[str, float] = field(default_factory=dict[str, float])
    steps: float = 0.0
    repeated: float = 0.0
    step_s: float | None = None

    @property
    def wall_s(self) -> float:
        return self.end_s - self.begin_s

    @property
    def needed(self) -> float:
        """Steps that had not been done before."""
        return self.steps - self.repeated

    @property
    def ratio(self) -> float:
        """The share of productive steps, between 0 and 1."""
        return min(1.0, self.seconds_by_cause["steps"] / self.wall_s) if self.wall_s > 0 else 0.0


def goodput(timeline: Timeline, begin_s: float | None = None, end_s: float | None = None) -> Goodput:
    """Of a part of the run's time, of all of it unless a bound is given; what lies outside of the run counts for nothing."""
    begin_s = timeline.begin_s if begin_s is None else min(max(begin_s, timeline.begin_s), timeline.end_s)
    end_s = timeline.end_s if end_s is None else min(max(end_s, begin_s), timeline.end_s)
    seconds = dict.fromkeys(CAUSES, 0.0)
    waiting: dict[str, float] = {}
    steps = repeated = 0.0
    for stretch, share in _parts(timeline, begin_s, end_s):
        for cause, one in stretch.seconds.items():
            seconds[cause] += share * one
        for section, one in stretch.waiting.items():
            waiting[section] = waiting.get(section, 0.0) + share * one
        steps += share * stretch.steps
        repeated += share * stretch.repeated
    needed_s = seconds["steps"]
    return Goodput(
        begin_s=begin_s,
        end_s=end_s,
        seconds_by_cause=seconds,
        waiting=waiting,
        steps=steps,
        repeated=repeated,
        step_s=needed_s / (steps - repeated) if steps > repeated and needed_s > 0 else None,
    )


def over_time(timeline: Timeline, windows: int) -> list[Goodput]:
    """Of so many parts of equal length, one after the other; of a run without a length: none."""
    length_s = (timeline.end_s - timeline.begin_s) / windows
    edges = [*(timeline.begin_s + number * length_s for number in range(windows)), timeline.end_s]
    return [goodput(timeline, begin_s, end_s) for begin_s, end_s in itertools.pairwise(edges)] if length_s > 0 else []


def _parts(timeline: Timeline, begin_s: float, end_s: float) -> Iterator[tuple[Stretch, float]]:
    """The stretches of that time, and how much of each lies in it."""
    first = bisect.bisect_right(timeline.stretches, begin_s, key=lambda one: one.end_s)
    for stretch in itertools.islice(timeline.stretches, first, None):
        if stretch.begin_s >= end_s:
            return
        inside_s = min(end_s, stretch.end_s) - max(begin_s, stretch.begin_s)
        yield stretch, inside_s / (stretch.end_s - stretch.begin_s)
