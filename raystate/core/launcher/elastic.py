"""How many workers an elastic run has: the sizes that it may have, with how many it starts, and when it makes way for more.

A run shrinks because it must: its next worker group is as large as the nodes that are left allow.
It grows because it may, at a step that all ranks agree on. Before, there has been room for a while,
and the last start is as long ago as the user wants.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

from raystate.core.formats.errors import ConfigError
from raystate.core.formats.texts import counted
from raystate.waits import LOOK_EVERY_S, ROOM_STAYS_S

GROWN_FOR = 10  # times `every_s`: a larger group that loses its size sooner was not worth its restarts
MOST_PATIENCE = 32  # times `every_s`: the longest that growths which bring nothing are put off
MOST_HELD = 2048  # the same of one that was taken back: with 30 s, 17 hours
FEW_STEPS = 3  # a group that fails after so few has not worked
_MOST_ENDS = 64  # that are looked at together

# The newest step (snapshots included) at that time; None: unknown.
Newest = Callable[[], int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The numbers of workers that a run may have: those from `fewest` to `most` that divide its global batch.

    Attributes:
        fewest, most: equal: the run is not elastic.
        global_batch: examples of one step over all processes, the same for every size; None: not
            given.
    """

    fewest: int
    most: int
    global_batch: int | None = None

    @classmethod
    def of(cls, num_workers: Any, global_batch: Any = None) -> Sizes:
        """From what a user gave: an int, or (fewest, most).

        Raises:
            ConfigError: that is no number of workers, or they can't share the batch evenly.
        """
        bounds = cast("tuple[Any, ...]", num_workers) if isinstance(num_workers, tuple) else (num_workers, num_workers)
        fewest, most = bounds if len(bounds) == 2 else (None, None)
        if not _is_count(fewest) or not _is_count(most) or fewest > most:
            allowed = "an int of at least 1, or (fewest, most)"
            text = f"num_workers = {num_workers!r}: must be {allowed}"
            raise ConfigError(text, field="num_workers", expected=allowed, got=num_workers)
        if global_batch is not None and not _is_count(global_batch):
            allowed = "an int of at least 1: the examples of one step over all processes"
            text = f"global_batch = {global_batch!r}: must be {allowed}"
            raise ConfigError(text, field="global_batch", expected=allowed, got=global_batch)
        sizes = cls(fewest=fewest, most=most, global_batch=global_batch)
        for workers in dict.fromkeys((fewest, most)):
            if not sizes._divides(workers):
                fitting = [str(one) for one in range(1, sizes._most_within(most) + 1) if sizes._divides(one)]
                text = (
                    f"num_workers = {num_workers!r}: {workers} workers can't share a global batch of {global_batch} examples evenly; "
                    f"of up to {most} these can: {', '.join(fitting)}"
                )
                raise ConfigError(text, field="num_workers", expected=fitting, got=workers)
        return sizes

    def _divides(self, workers: int) -> bool:
        return self.global_batch is None or self.global_batch % workers == 0

    def fitting(self, room: int) -> int | None:
        """The largest for which there is room; None: there is not enough for any."""
        most = self._most_within(room)
        return next((workers for workers in range(most, self.fewest - 1, -1) if self._divides(workers)), None)

    def _most_within(self, room: int) -> int:
        """No size that is allowed is larger. A user may give any `most` that means "as many as there are"."""
        return min(self.most, room) if self.global_batch is None else min(self.most, room, self.global_batch)


def room_of(places: Mapping[str, int], strategy: str = "PACK") -> int:
    """How many workers fit together.

    Args:
        places: how many fit on each node.
        strategy: Ray's for placement groups.
    """
    if strategy == "STRICT_PACK":
        return max(places.values(), default=0)
    if strategy == "STRICT_SPREAD":
        return sum(count > 0 for count in places.values())
    return sum(places.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """To go on with more workers, and why."""

    workers: int
    reason: str


class _Proven:
    """Which sizes have worked: groups of so many workers that have made new steps since the run last grew to that size."""

    def __init__(self) -> None:
        self.newest: Newest = lambda: None  # before the groups that have ended
        self._growths = 0
        self._grown_to: dict[int, int] = {}  # size -> which growth last led to it
        # Ended groups, not judged yet: (workers, after how many growths, whether it failed, its newest step).
        self._ends: list[tuple[int, int, bool, Newest]] = []
        self._worked: dict[int, int] = {}  # size that has made new steps -> after how many growths it last has

    def grown(self, workers: int) -> None:
        """The run has grown to this size."""
        self._growths += 1
        self._grown_to[workers] = self._growths

    def ended(self, workers: int, newest: Newest, *, failed: bool) -> None:
        """A group of so many workers has ended."""
        self._ends.append((workers, self._growths, failed, newest))
        if len(self._ends) == _MOST_ENDS:
            self._look_back()

    def below(self, size: int, *, is_new: bool) -> list[int]:
        """Smaller sizes that have ever worked, if this one has not; else none. `is_new`: no group of this size has started yet."""
        self._look_back()
        has_worked = not is_new and self._worked.get(size, -1) >= self._grown_to.get(size, 0)
        return [] if has_worked else [one for one in self._worked if one < size]

    def _look_back(self) -> None:
        before = self.newest()
        before = -1 if before is None else before
        for workers, growths, failed, newest in self._ends:
            step = newest()
            if step is None:
                continue
            if step - before > (FEW_STEPS if failed else 0):
                self._worked[workers] = growths
            before = step
        self.newest = lambda: before
        self._ends.clear()


class Elastic:
    """Decides the size of each worker group, and when a running one makes way for a larger one.

    A growth costs a restart. So there are `every_s` seconds between the start of a group and the
    next growth, and there has to be room for a while. A growth may bring nothing: the workers find
    no place, or the larger group soon loses its size. That doubles the time before the next one. A
    size that has not worked since the run grew to it is taken back when the launcher would give up.
    The run goes on with the next smaller size that has ever worked. It has no more for 32 times
    `every_s`, the next time for twice as long.

    Args:
        sizes: that the run may have.
        every_s: seconds, at least, from the start of a worker group to a growth; never less than one.
    """

    def __init__(self, sizes: Sizes, every_s: float):
        self.sizes = sizes
        self._every_s = max(every_s, LOOK_EVERY_S)
        self._settle_s = min(ROOM_STAYS_S, self._every_s)
        self._limit: int | None = None  # more were not placed although there seemed to be room
        self.tried = 0  # workers of the group that was started last, whether it trained or not
        self._workers = 0  # of the group that runs
        self._started_s = -math.inf
        self._patience = 1  # times `every_s` until the next growth
        self._wish: Wish | None = None  # was asked for in the present group
        self._asked_s = -math.inf
        self._runs = False  # the group that was started last
        self._grew = False  # it is the outcome of a growth
        self._proven = _Proven()
        self._ceiling = 0  # a larger group only failed: no more than this until then
        self._ceiling_until_s = -math.inf
        self._taken_back: Counter[int] = Counter()  # how often, by size
        self._seen: list[tuple[float, int]] = []  # (since when, room), as far back as matters
        self._chance_s: float | None = None  # since when a growth is due

    # ---------------------------------------------------------------- a group starts

    def size_for(self, room: int, now_s: float) -> int:
        """Workers of the next group. Without room for the fewest it is these, and they wait for it."""
        if self._limit is not None and self._limit < self.sizes.fewest:
            self._limit = None  # no size was placed: from the beginning
        most = self._below_ceiling(room, now_s)
        size = self.sizes.fitting(most if self._limit is None else min(most, self._limit))
        self.tried = self.sizes.fewest if size is None else size
        return self.tried

    def not_placed(self) -> None:
        """The group found no place: the next one is smaller, if it may be."""
        self._limit = self.tried - 1

    def ended(self, newest: Newest, *, failed: bool) -> None:
        """The present group has ended.

        Args:
            newest: the newest step now. It is asked for when it matters.
            failed: by itself, and not because its node went or it was asked to stop.
        """
        if self._runs:  # else its start has failed
            self._runs = False
            self._proven.ended(self._workers, newest, failed=failed)

    def take_back(self, now_s: float) -> bool:
        """The present group has failed for good. Whether the next one is smaller: of a size that
        has worked, as this one has not since the run grew to it. A success before the growth proves
        nothing: nodes or memory may have gone since."""
        below = self._proven.below(self.tried, is_new=self.tried > self._workers > 0)
        if not below:
            return False
        held = min(MOST_PATIENCE * 2 ** self._taken_back[self.tried], MOST_HELD)
        self._taken_back[self.tried] += 1
        self._ceiling, self._ceiling_until_s = max(below), max(self._ceiling_until_s, now_s + self._every_s * held)
        self._wish = None
        return True

    def _below_ceiling(self, room: int, now_s: float) -> int:
        return min(room, self._ceiling) if now_s < self._ceiling_until_s else room

    def outcome(self, workers: int) -> str:
        """What becomes of the run's size in a group of so many, in words for "the run …"; "" if there is nothing to say."""
        if self._workers and workers != self._workers:
            return f"goes on with {counted(workers, 'worker')} instead of {self._workers}"
        if self._wish is not None:
            return f"goes on with {counted(workers, 'worker')} all the same: the room was gone"
        return ""

    def started(self, now_s: float, newest: Newest) -> None:
        """The group runs. `newest`: as in `ended`."""
        before, wish, lived_s = self._workers, self._wish, now_s - self._started_s
        workers = self.tried
        fell_short = wish is not None and workers < wish.workers
        soon_lost = self._grew and workers < before and lived_s < GROWN_FOR * self._every_s
        if fell_short or soon_lost:
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        elif workers < before:
            self._patience = 1
        if not before:
            self._proven.newest = newest
        grows = workers > before > 0
        if grows:
            self._proven.grown(workers)
        self._runs, self._grew = True, grows or (workers == before and self._grew)
        self._workers, self._started_s, self._wish, self._limit = workers, now_s, None, None
        self._seen, self._chance_s = [], None

    # ---------------------------------------------------------------- a group runs

    def look(self, room: int, now_s: float) -> Wish | None:
        """Whether the running group is to make way for a larger one now.

        Args:
            room: for how many workers, those that run included.
            now_s: monotonic.
        """
        self._see(room, now_s)
        wait_s = self._every_s * self._patience
        if now_s - self._started_s < wait_s or now_s - self._asked_s < wait_s:
            return None
        settled = self._settled(now_s)
        size = None if settled is None else self.sizes.fitting(self._below_ceiling(settled, now_s))
        if size is None or size <= self._workers:
            self._chance_s = None
            return None
        if self._chance_s is None:
            self._chance_s = now_s
        if (self.sizes.fitting(self._below_ceiling(room, now_s)) or size) > size and now_s - self._chance_s < self._settle_s:
            return None  # more has come just now: one restart for both
        return Wish(
            workers=size,
            reason=f"there has been room for {counted(size, 'worker')} for {self._settle_s:.0f} s: the run grows from {self._workers}",
        )

    def asked(self, wish: Wish, now_s: float) -> None:
        """The ranks have been asked to stop for it. They are asked again if they don't."""
        self._wish, self._asked_s = wish, now_s

    def _see(self, room: int, now_s: float) -> None:
        if not self._seen or self._seen[-1][1] != room:
            self._seen.append((now_s, room))
        while len(self._seen) > 1 and self._seen[1][0] <= now_s - self._settle_s:
            del self._seen[0]

    def _settled(self, now_s: float) -> int | None:
        """The least room of late; None: it has not been looked at for long enough."""
        if self._seen[0][0] > now_s - self._settle_s:
            return None
        return min(room for _, room in self._seen)

    @property
    def is_full(self) -> bool:
        """Whether the running group is as large as it may be."""
        return self._workers >= self.sizes.most


def _is_count(given: Any) -> TypeGuard[int]:
    return isinstance(given, int) and not isinstance(given, bool) and given >= 1
