"""Ranks that take longer than the others, step for step: which, where, by how much, since when.

A rank is compared with the median of the others by what its words say of itself:

- seconds a step in each section, and in save(). In a save a rank may be waiting for the others' part of the computation. So one that
  comes to save() before them is not slow in it.
- when it comes to save(): the steps that are snapshotted are the same on all ranks, and the hosts' clocks are brought together. That
  tells of what no section names. It counts only where neither a section nor a save explains it.

A device that is slow within a collective can't be seen. All ranks come out of that together, the slow one, too. Nor can a section
in which a rank waits for others be told from one in which it works; with three ranks or more, those that wait are the many, and no rank
is slower than the many.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from raystate.core.coordinator.clocks import HostClocks
from raystate.core.coordinator.context import Context
from raystate.core.coordinator.group import Group
from raystate.core.coordinator.joins import Joins
from raystate.core.coordinator.memory import HostView
from raystate.core.formats.names import HostId
from raystate.core.formats.reports import SAVES, SECTION, HostSummary, TrainerWord
from raystate.core.formats.texts import duration
from raystate.waits import LOOK_EVERY_S, SELDOM_S

WINDOW_STEPS = 5  # of all ranks, at least, and for LOOK_EVERY_S
WINDOW_ARRIVALS = 5  # steps whose arrival is known of all
# A pause now and then, even in every other window, is no slow rank: so many windows have to be slow, with at most one other between
# them, in which another rank had a pause of its own. (test_slow_ranks.test_a_thousand_even_runs_have_none)
WINDOWS = 8
# Of a step. Less is not worth a person's time, and ranks of an even run differ by some of it.
SHARE = 0.1
LEAST = 0.002  # seconds a step, where steps are short: what a busy core costs now and then
LEAST_LATE = 0.02  # seconds; of two hosts that is not told from a report that takes longer
REMEMBERED_STEPS = 64  # whose arrival is not known of all ranks

SAVE, LATE = "save()", ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """One rank that takes longer than the others.

    Attributes:
        section: where: its name; "save()"; or "": it comes to save() so late, for what no section names.
        by_s: seconds a step.
        since_step: from this step on.
    """

    rank: int
    host: HostId
    section: str
    by_s: float
    since_step: int


class Key(NamedTuple):
    """A rank in a section: that is judged."""

    rank: int
    section: str


@dataclass(slots=True)
class Streak:
    """Windows in a row."""

    since_step: int
    high: int = 0  # of them, in which the rank was slow
    has_missed: bool = False  # one of them was not
    excess_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=WINDOWS))

    @property
    def may_miss(self) -> bool:
        """Whether it goes on after a window in which the rank was not slow."""
        return self.high > 1 and not self.has_missed

    @property
    def by_s(self) -> float:
        """Seconds a step."""
        return statistics.median(self.excess_s)


def excess(values: Mapping[int, float], ranks: int) -> dict[int, float]:
    """Rank -> by how much it is above the median of the others, of so many `ranks`; of two in the middle, the higher.

    Ranks without a value have 0, and cost nothing here: each rank may have names of its own.
    """
    ordered, zeros = sorted(values.values()), ranks - len(values)
    middle = (ranks - 1) // 2
    found: dict[int, float] = {}
    for rank, value in values.items():
        at = middle if middle < zeros + bisect_left(ordered, value) else middle + 1
        found[rank] = value - (ordered[at - zeros] if at >= zeros else 0.0)
    return found


class Streaks:
    """Slow ranks, by window after window."""

    def __init__(self) -> None:
        self.rising: dict[Key, Streak] = {}  # slow so far, and not for long enough
        self.slow: dict[Key, Streak] = {}

    def judge(self, found: Mapping[Key, float], least_s: float, step: int) -> tuple[list[Key], list[Key]]:
        """Another window has ended.

        Args:
            found: the excess of those that are compared, in seconds a step.
            least_s: so much is slow, and half of it is no longer.
            step: with which the window began.

        Returns:
            Those that are slow now and were not; those that were and are not.
        """
        high = {key for key, excess_s in found.items() if excess_s >= least_s and key not in self.slow}
        self.rising = {key: streak for key, streak in self.rising.items() if key in high or streak.may_miss}
        for key in high | self.rising.keys():
            streak = self.rising.setdefault(key, Streak(step))
            streak.excess_s.append(found.get(key, 0.0))
            streak.high += key in high
            streak.has_missed |= key not in high
        begun = [key for key, streak in self.rising.items() if streak.high == WINDOWS]
        for key, streak in self.slow.items():
            streak.excess_s.append(found.get(key, 0.0))
        ended = [key for key, streak in self.slow.items() if streak.by_s < least_s / 2]
        self.slow |= {key: self.rising.pop(key) for key in begun}
        return begun, ended


class OwnTimes:
    """Of a window: what each rank has spent in sections and saves."""

    def __init__(self) -> None:
        self._began: dict[int, TrainerWord] = {}
        self._began_s = 0.0
        self._behind: set[int] = set()  # ranks that have not made enough steps

    def knows(self, group: Group) -> bool:
        """Whether a window of these ranks has begun."""
        return len(self._began) == len(group.seen)

    def begin(self, group: Group, now_s: float) -> None:
        """A window begins with the newest words of all."""
        self._began, self._began_s, self._behind = dict(group.seen), now_s, set(group.seen)

    def came(self, word: TrainerWord) -> None:
        """A rank has told how far it is."""
        if word.rank in self._behind and word.steps - self._began[word.rank].steps >= WINDOW_STEPS:
            self._behind.discard(word.rank)

    def ended(self, now_s: float) -> bool:
        """Whether all ranks have made their steps."""
        return not self._behind and now_s - self._began_s >= LOOK_EVERY_S

    @property
    def step(self) -> int:
        """With which it began."""
        return min(word.newest_step for word in self._began.values())

    def step_s(self, group: Group) -> float:
        """The time of a step."""
        return statistics.median(
            (word.lived_s - self._began[rank].lived_s) / (word.steps - self._began[rank].steps) for rank, word in group.seen.items()
        )

    def spent(self, group: Group) -> dict[str, dict[int, float]]:
        """Section -> rank -> seconds a step; without ranks that never were in it."""
        found: dict[str, dict[int, float]] = {}
        for rank, word in group.seen.items():
            before, steps = dict(self._began[rank].spent), word.steps - self._began[rank].steps
            for cause, sum_s in word.spent:
                if cause != SAVES and not cause.startswith(SECTION):
                    continue
                section = SAVE if cause == SAVES else cause.removeprefix(SECTION)
                of_all = found.setdefault(section, {})
                of_all[rank] = of_all.get(rank, 0.0) + max(0.0, sum_s - before.get(cause, 0.0)) / steps
        return found


class Arrivals:
    """When the ranks came to save() of the same steps, on the Coordinator's clock."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[int, float]] = {}  # that not all ranks are known to have reached
        self._newest = -1  # of which all are known
        self._late_s: dict[int, float] = {}  # rank -> sum over the steps of this window
        self._count = 0
        self.first = -1  # step of this window
        self.known: dict[int, float] = {}  # rank -> seconds behind the others, in the newest window; none has ended: empty

    def came(self, rank: int, step: int, at_s: float, world: int) -> None:
        """A rank has reached a step. Its words say so again and again."""
        if step <= self._newest or rank in (of_step := self._steps.setdefault(step, {})):
            return
        of_step[rank] = at_s
        if len(of_step) < world:
            if len(self._steps) > REMEMBERED_STEPS:
                del self._steps[min(self._steps)]
            return
        self._newest = step
        self._steps = {one: ranks for one, ranks in self._steps.items() if one > step}
        self.first = step if self.first < 0 else self.first
        for one, late_s in excess(of_step, world).items():
            self._late_s[one] = self._late_s.get(one, 0.0) + late_s
        self._count += 1

    def ended(self) -> bool:
        """Whether a window has ended. `known` is of it then, and another one begins."""
        if self._count < WINDOW_ARRIVALS:
            return False
        self.known = {rank: sum_s / self._count for rank, sum_s in self._late_s.items()}
        self._late_s, self._count = {}, 0
        return True


class SlowRanks:
    """Compares the ranks of the present group, window by window."""

    def __init__(self, context: Context, joins: Joins):
        self._context = context
        self._joins = joins
        self._clocks = HostClocks()
        self._moved: dict[HostId, HostView] = {}  # that have reported since somebody looked
        self._group: str = ""
        self._lineage = ""  # of which these are
        self._own, self._arrivals = OwnTimes(), Arrivals()
        self._streaks, self._late = Streaks(), Streaks()
        self._step_s = 0.0  # in the newest window
        self._said_s: dict[Key, float] = {}  # when the log heard of it last
        self._told: frozenset[Key] = frozenset()  # of whose end it has to hear

    @property
    def slow(self) -> tuple[SlowRank, ...]:
        """Those that are slow now, the slowest first."""
        hosts = {} if self._joins.group is None else self._joins.group.hosts
        of_all = {**self._streaks.slow, **self._late.slow}
        found = [
            SlowRank(rank=key.rank, host=hosts[key.rank], section=key.section, by_s=one.by_s, since_step=one.since_step)
            for key, one in of_all.items()
            if key.rank in hosts
        ]
        return tuple(sorted(found, key=lambda one: (-one.by_s, one.rank)))

    def reported(self, summary: HostSummary) -> None:
        """A host has reported."""
        self._clocks.heard(summary.host, summary.clock_s, self._context.now_s)
        if (view := self._joins.memory.hosts.get(summary.host)) is not None:
            self._moved[view.host] = view

    def turn(self) -> None:
        """Take what the words of hosts that have reported say, and judge the windows that have ended."""
        moved, self._moved = self._moved, {}
        group = self._joins.group
        if group is None or not group.alive or group.left:
            self._follow(None)
            return
        self._follow(group)
        if not moved or group.restoring or not group.all_seen or group.world in (None, 1) or len(group.seen) != group.world:
            return
        for view in moved.values():
            for word in view.trainers:
                if word.lineage != group.lineage:
                    continue
                self._own.came(word)
                for step, clock_s in word.reached:
                    self._arrivals.came(word.rank, step, self._clocks.here(view.host, clock_s), group.world)
        now_s = self._context.now_s
        if not self._own.knows(group):
            self._own.begin(group, now_s)
        elif self._own.ended(now_s):
            self._judge_own(group)
            self._own.begin(group, now_s)
        if self._step_s and self._arrivals.ended():
            self._judge_arrivals()

    def _follow(self, group: Group | None) -> None:
        """Begin anew with another group; in another lineage of the same one, which ranks are slow stays known."""
        name = "" if group is None else group.name
        lineage = "" if group is None else group.lineage
        if name != self._group:
            self._group, self._step_s = name, 0.0
            self._streaks, self._late = Streaks(), Streaks()
        if lineage != self._lineage:
            self._lineage = lineage
            self._own, self._arrivals = OwnTimes(), Arrivals()

    def _judge_own(self, group: Group) -> None:
        self._step_s = self._own.step_s(group)
        least_s = max(SHARE * self._step_s, LEAST)
        found: dict[Key, float] = {}
        late_s = self._arrivals.known
        for section, seconds in self._own.spent(group).items():
            for rank, excess_s in excess(seconds, len(group.seen)).items():
                may_wait = section == SAVE and late_s.get(rank, -1.0) < -least_s / 2
                if not may_wait:
                    found[Key(rank, section)] = excess_s
        self._tell(self._streaks, *self._streaks.judge(found, least_s, self._own.step), self._own.step)

    def _judge_arrivals(self) -> None:
        least_s = max(SHARE * self._step_s, LEAST_LATE)
        explained = {key.rank for key in self._streaks.slow}
        self._late.slow = {key: streak for key, streak in self._late.slow.items() if key.rank not in explained}
        # One that may be about to be explained is not told of twice.
        explained |= {key.rank for key in self._streaks.rising} - {key.rank for key in self._late.slow}
        found = {Key(rank, LATE): late_s for rank, late_s in self._arrivals.known.items() if rank not in explained}
        first, self._arrivals.first = self._arrivals.first, -1
        self._tell(self._late, *self._late.judge(found, least_s, first), first)

    # ---------------------------------------------------------------- the log

    def _tell(self, streaks: Streaks, begun: list[Key], ended: list[Key], step: int) -> None:
        for section in dict.fromkeys(key.section for key in begun):
            keys = [key for key in begun if key.section == section]
            first = max(keys, key=lambda key: streaks.slow[key].by_s)
            by_s, since = streaks.slow[first].by_s, streaks.slow[first].since_step
            where, those = self._joins.where([key.rank for key in keys]), "the other ranks"
            if section == LATE:
                text = f"{where} comes to save() {duration(by_s)} after {those} since step {since}, and no section tells why"
            else:
                text = f"{where} takes {duration(by_s)} a step longer than {those} since step {since}, {place(section)}"
            self._say("warning", keys, f"{text}; a step takes {duration(self._step_s)}")
        for key in ended:
            since = streaks.slow.pop(key).since_step
            what = "comes to save() with the others" if key.section == LATE else f"is as fast as the others {place(key.section)}"
            self._say("info", [key], f"{self._joins.where([key.rank])} {what} again; from step {since} to {step} it was not")

    def _say(self, level: str, keys: list[Key], text: str) -> None:
        """A rank that is slow again and again is told of seldom. Whose begin was told, is told of its end."""
        now_s, told = self._context.now_s, self._told
        if level == "info":
            is_news = told.issuperset(keys)
            self._told = told.difference(keys)
        elif is_news := any(now_s - self._said_s.get(key, float("-inf")) >= SELDOM_S for key in keys):
            self._said_s |= dict.fromkeys(keys, now_s)
            self._told = told.union(keys)
        self._context.log(level if is_news else "debug", text)


def place(section: str) -> str:
    """Where a rank is slow, for people."""
    if section == LATE:
        return "before save()"
    return f"in {section}" if section == SAVE else f"in section {section!r}"
