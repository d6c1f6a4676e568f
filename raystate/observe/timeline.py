"""A run's time, cut into stretches of which each second has a cause: made from the lines of its ledger, in any order.

From line to line a stretch is added, so that stretches neither overlap nor leave a gap: whatever the lines say, their lengths
sum up to the whole. A clock that went back counts as one that stood still.

How much of its training went into steps, and how much slowed them, is told of each worker group as a whole. Then each stretch has its
part of that, so that the parts of any time sum up to what is told of the whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from raystate.core.formats.reports import COMPILATION, RESTORE, SAVES, SECTION
from raystate.observe.ledger.lines import (
    AttemptBegan,
    GroupEnded,
    GroupJoined,
    GroupRestored,
    LoggedRecovery,
    Noted,
    RunLeft,
    Sampled,
)
from raystate.observe.undisturbed import step_seconds
from raystate.waits import LOOK_EVERY_S, SAMPLED_EVERY_S

# All else in a ledger says nothing of where the time went.
OF_INTEREST = (AttemptBegan, GroupJoined, GroupRestored, Sampled, GroupEnded, LoggedRecovery, RunLeft)
_OWN = (SAVES, RESTORE, COMPILATION)  # what else a trainer tells of is sections


@dataclass(slots=True, kw_only=True)
class Stretch:
    """A piece of the run's time.

    Attributes:
        begin_s, end_s: seconds since 1970, as the run's clocks went.
        group: the worker group of that time; "": none.
        seconds: cause -> seconds.
        waiting: section -> seconds, of those that `seconds` has as "waiting".
        training_s: of the `seconds`, those of its steps, and of what slows them.
        steps: done in this time; `repeated`: how many of them had been done before.
    """

    begin_s: float
    end_s: float
    group: str = ""
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    waiting: dict[str, float] = field(default_factory=dict[str, float])
    training_s: float = 0.0
    steps: float = 0.0
    repeated: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All of it."""

    stretches: Sequence[Stretch] = ()

    @property
    def begin_s(self) -> float:
        return self.stretches[0].begin_s if self.stretches else 0.0

    @property
    def end_s(self) -> float:
        return self.stretches[-1].end_s if self.stretches else 0.0


def timeline_of(lines: Iterable[Noted], *, until_s: float | None = None) -> Timeline:
    """The stretches of a run.

    Args:
        lines: of its ledger, in any order.
        until_s: for a run that goes on: the time now, seconds since 1970; None: all ends with the last line.
    """
    ordered = sorted({(one.attempt, one.n, one.t, type(one.what).__name__): one for one in lines}.values(), key=lambda one: one[:3])
    step_s = step_seconds(ordered)
    building = _Building(step_s, _gone_s(ordered))
    over_s = _superseded(ordered)
    for line in ordered:
        building.take(line, min(line.t, over_s.get(line.attempt, line.t)))
    building.finish(until_s)
    _share_out(building.stretches, step_s)
    return Timeline(stretches=building.stretches)


def sampled_every_s(lived_s: float) -> float:
    """Seconds between two samples of a worker group of this age: what is not known of one that vanishes is a small part of its life."""
    return min(SAMPLED_EVERY_S, max(LOOK_EVERY_S, lived_s / 20))


def _superseded(lines: Iterable[Noted]) -> dict[int, float]:
    """When each attempt had a successor: what it has noted later, by a process that slept, was no news any more."""
    begun_s = {line.attempt: line.t for line in lines if isinstance(line.what, AttemptBegan)}
    return {before: begun_s[after] for before, after in itertools.pairwise(sorted(begun_s)) if begun_s[after] >= begun_s[before]}


def _gone_s(lines: Iterable[Noted]) -> dict[str, float]:
    """By group: when the end came that led to it. The ledger may hear of that end only when the group joins."""
    return {line.what.group: line.t - line.what.seconds for line in lines if isinstance(line.what, LoggedRecovery)}


def _share_out(stretches: Iterable[Stretch], step_s: Mapping[str, float]) -> None:
    """Give the time of training its causes: as many undisturbed steps as were done, and what slowed them.

    A sample lies somewhere within a step, and steps differ by a little. So what the slower stretches of a group have too much, and what
    its faster ones have too little, is brought together first.
    """
    groups: dict[str, list[Stretch]] = {}
    for one in stretches:
        if one.training_s > 0 or one.steps:
            groups.setdefault(one.group, []).append(one)
    for group, those in groups.items():
        steps, ideal_s = sum(one.steps for one in those), step_s.get(group, step_s.get(""))
        needed_s = [one.steps * ideal_s if ideal_s is not None else one.training_s if steps else 0.0 for one in those]
        excess_s = [max(0.0, one.training_s - least_s) for one, least_s in zip(those, needed_s, strict=True)]
        slower_s = max(0.0, sum(one.training_s for one in those) - sum(needed_s))
        share = min(1.0, slower_s / sum(excess_s)) if slower_s > 0 else 0.0
        for one, more_s in zip(those, excess_s, strict=True):
            productive_s = one.training_s - share * more_s
            repeated_s = productive_s * one.repeated / one.steps if one.steps else 0.0
            for cause, seconds in (("steps", productive_s - repeated_s), ("repeated", repeated_s), ("slower", share * more_s)):
                if seconds > 0:
                    one.seconds[cause] = seconds


# ---------------------------------------------------------------- from line to line


@dataclass(slots=True)
class _Open:
    """A worker group that goes on, as its last sample tells."""

    name: str
    spent: dict[str, float] = field(default_factory=dict[str, float])  # of it so much is in stretches
    steps: int = 0
    step: int = -1
    lived_s: float = 0.0
    quiet: int = 0  # its first stretch since its last step
    begins: tuple[float, Sampled] | None = None  # when it told last that it has made no step yet


class _Building:
    def __init__(self, step_s: Mapping[str, float], gone_s: Mapping[str, float]):
        self.stretches: list[Stretch] = []
        self._step_s = step_s
        self._gone_s = gone_s
        self._clock_s: float | None = None
        self._done_s = 0.0  # up to here there are stretches
        self._open: _Open | None = None
        self._ended: set[str] = set()
        self._high = -1  # newest step that was ever done, before the last restore
        self._claimed_s: float | None = None  # when the first attempt has begun since a group was heard of
        self._gap: Stretch | None = None  # how the last group ended is not told

    def take(self, line: Noted, now_s: float) -> None:
        if self._clock_s is None:
            self._done_s = now_s
        self._clock_s = now_s
        match line.what:
            case AttemptBegan() if self._open is not None or self._claimed_s is None:
                self._claimed_s = now_s
            case GroupJoined() as joined if not self._is_open(joined.group):
                self._join(joined.group, now_s, joined.ages)
            case GroupRestored() as restored if self._is_open(restored.group):
                self._restored(restored.step)
            case Sampled() as sample if sample.group not in self._ended:
                if not self._is_open(sample.group):  # the line of its join is lost
                    earliest_s = self._done_s if self.stretches else -math.inf
                    self._join(sample.group, max(earliest_s, now_s - max(0.0, sample.lived)), {})
                self._sampled(sample, now_s)
            case GroupEnded() as ended if self._is_open(ended.group):
                self._end(now_s, is_hung=ended.how == "hung")
            case RunLeft() as left:
                self._train(now_s - max(0.0, left.closing_s))
                if self._open is not None:
                    self._add(now_s, SAVES, self._open.name)
                self._end(now_s)
            case _:
                pass

    def finish(self, until_s: float | None) -> None:
        """Nothing more is known."""
        if self._clock_s is None:
            return
        end_s = self._clock_s if until_s is None else max(self._clock_s, until_s)
        if self._open is not None:
            self._train(end_s)
        else:
            self._add(end_s, "stopped")

    # ------------------------------------------------------------ stretches

    def _add(self, end_s: float, cause: str, group: str = "") -> None:
        if end_s > self._done_s:
            self.stretches.append(Stretch(begin_s=self._done_s, end_s=end_s, group=group, seconds={cause: end_s - self._done_s}))
            self._done_s = end_s

    def _train(self, end_s: float) -> Stretch | None:
        """The open group was there until then."""
        if self._open is None or end_s <= self._done_s:
            return None
        found = Stretch(begin_s=self._done_s, end_s=end_s, group=self._open.name, training_s=end_s - self._done_s)
        if not self._open.steps:  # its first step, and what comes before, is its start
            _explain([found], self._open, self._open.begins[1].spent if self._open.begins is not None else {})
            found.seconds["start"], found.training_s = found.training_s, 0.0
        self.stretches.append(found)
        self._done_s = end_s
        return found

    def _cut_back(self, end_s: float) -> None:
        """The group before had ended by then, and its end was noted later: that time is of the next start. Its steps stay what they are."""
        while self.stretches and (last := self.stretches[-1]).group and last.end_s > end_s:
            if last.begin_s < end_s:
                left_s = end_s - last.begin_s
                explained_s = sum(last.seconds.values())
                share = min(1.0, left_s / explained_s) if explained_s > 0 else 1.0
                last.seconds = {cause: share * one for cause, one in last.seconds.items()}
                last.waiting = {section: share * one for section, one in last.waiting.items()}
                last.training_s = max(0.0, left_s - explained_s)
                last.end_s = end_s
            elif last.steps:
                break
            else:
                self.stretches.pop()
                self._gap = None
        self._done_s = self.stretches[-1].end_s if self.stretches else self._done_s

    # ------------------------------------------------------------ groups

    def _is_open(self, group: str) -> bool:
        return self._open is not None and self._open.name == group

    def _join(self, group: str, now_s: float, ages: Mapping[str, float]) -> None:
        """The time before is cut by what the ranks know of it: nothing was to train, hosts were waited for, processes started."""
        known = {name: now_s - max(0.0, age) for name, age in ages.items()}
        called_s = known.pop("called", None)  # the groups before may have trained since
        first_s = min(known.values(), default=now_s)
        if self._open is not None:
            self._vanished(first_s)
        self._cut_back(min(self._gone_s.get(group, math.inf), known.get("asked", math.inf)))
        if not self.stretches:
            # A launcher knows when it was called; a process of its Ray may have waited for work before that.
            self._done_s = min(self._done_s, first_s if called_s is None else called_s)
        # Its launcher was called, had the Coordinator begin, then asked for it.
        called_s = None if called_s is None else max(called_s, self._done_s)
        began_s = [at_s for at_s in (called_s, self._claimed_s) if at_s is not None and at_s >= self._done_s]
        if began_s:
            self._add(min(first_s, *began_s), "stopped")
            self._add(min(now_s, first_s), "start")
        elif known:
            self._add(min(now_s, first_s), "stopped")
        if "asked" in known and "placed" in known:
            self._add(min(now_s, known["asked"]), "start")
            self._add(min(now_s, known["placed"]), "hosts", group)
        self._add(now_s, "start", group)
        self._open = _Open(group, quiet=len(self.stretches))
        self._claimed_s = None

    def _restored(self, step: int) -> None:
        assert self._open is not None
        if (gap := self._gap) is not None and (more := step - max(self._high, self._open.step)) > 0:
            gap.steps = more  # it had done more steps than anybody has told of
            gap.training_s = min(gap.seconds.pop("unknown"), more * self._step_s.get(gap.group, self._step_s.get("", math.inf)))
            gap.seconds["unknown"] = gap.end_s - gap.begin_s - gap.training_s
        self._gap = None
        self._high = max(self._high, self._open.step)
        self._open.step = step

    def _end(self, now_s: float, *, is_hung: bool = False) -> None:
        group = self._open
        if group is None:
            return
        self._train(now_s)
        self._claimed_s = None
        if is_hung:
            for stretch in self.stretches[group.quiet :]:
                if stretch.group == group.name and stretch.training_s:
                    stretch.seconds["waiting"] = stretch.seconds.get("waiting", 0.0) + stretch.training_s
                    stretch.waiting["hang"] = stretch.waiting.get("hang", 0.0) + stretch.training_s
                    stretch.training_s = 0.0
        self._close(group)

    def _vanished(self, next_s: float) -> None:
        """Another group is there, and how this one ended is not told: it may have gone on up to its next sample."""
        group = self._open
        assert group is not None
        if group.begins is not None:
            self._train(group.begins[0])
        before = len(self.stretches)
        self._add(min(next_s, self._done_s + sampled_every_s(group.lived_s)), "unknown", group.name)
        self._close(group)
        self._gap = self.stretches[-1] if len(self.stretches) > before else None

    def _close(self, group: _Open) -> None:
        self._ended.add(group.name)
        self._high = max(self._high, group.step)
        self._open = None

    def _sampled(self, now: Sampled, now_s: float) -> None:
        group = self._open
        assert group is not None
        group.lived_s = max(group.lived_s, now.lived)
        had_stepped = group.steps > 0
        if not had_stepped and now.steps <= 0:
            group.begins = now_s, now  # what it has spent so far may be told of late: all of that comes with its first step
            return
        group.begins = None
        stretch = self._train(now_s)
        if stretch is None:  # no time has passed: all that is new comes with the next sample
            return
        steps, step = max(0, now.steps - group.steps), max(group.step, now.step)
        group.steps, group.step = group.steps + steps, step
        stretch.training_s += stretch.seconds.pop("start", 0.0)
        # A save that stood still is told of at its end: it began after the last step, which was done before `quiet`.
        since = len(self.stretches) - max(0, group.quiet - 1)
        _explain(itertools.islice(reversed(self.stretches), since), group, now.spent)
        repeated = min(steps, max(0, min(step, self._high) - (step - steps)))
        if not had_stepped:  # what is more than the steps' own time is the first one's, and what was before
            ideal_s, left_s = self._step_s.get(group.name, self._step_s.get("", 0.0)), stretch.training_s
            stretch.training_s = min(left_s, steps * ideal_s)
            stretch.seconds["start"] = left_s - stretch.training_s
        if steps:
            self._spread(steps, repeated)
            group.quiet = len(self.stretches)

    def _spread(self, steps: float, repeated: float) -> None:
        """Steps have been done since those before, however many samples came meanwhile."""
        assert self._open is not None
        those = [one for one in self.stretches[self._open.quiet :] if one.group == self._open.name and one.training_s > 0]
        whole_s = sum(one.training_s for one in those)
        for one in those or self.stretches[-1:]:
            share = one.training_s / whole_s if whole_s > 0 else 1.0
            one.steps, one.repeated = share * steps, share * repeated


def _explain(newest_first: Iterable[Stretch], group: _Open, spent: Mapping[str, float]) -> None:
    """Take what the trainers tell of from the training of these stretches, up to a stretch that has been explained: nothing that is new
    began before it. What is too much comes with the next sample."""
    news = {cause: more for cause, seconds in spent.items() if (more := seconds - group.spent.get(cause, 0.0)) > 0}
    for stretch in newest_first:
        room_s = stretch.training_s if stretch.group == group.name else 0.0
        fitting = {cause: min(seconds, room_s) for cause, seconds in news.items()}
        if (total_s := sum(fitting.values())) <= 0:
            return
        share = min(1.0, room_s / total_s)
        for cause, most_s in fitting.items():
            seconds = share * most_s
            news[cause] -= seconds
            group.spent[cause] = group.spent.get(cause, 0.0) + seconds
            name = cause if cause in _OWN else "waiting"
            stretch.seconds[name] = stretch.seconds.get(name, 0.0) + seconds
            if name == "waiting":
                section = cause.removeprefix(SECTION)
                stretch.waiting[section] = stretch.waiting.get(section, 0.0) + seconds
        stretch.training_s = max(0.0, room_s - total_s)
