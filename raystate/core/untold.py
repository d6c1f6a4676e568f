"""Promises that are lost, and whose trainers may be gone before they have heard of it.

A trainer asks itself what became of its promises, when it waits for them and when it closes. One that dies can't. If its run is
restored, the steps after the restored one are made again. Of those before it, some may never have
got to storage: the process that ends the run is told. A Coordinator knows what it has seen itself,
and the last words of trainers; what an earlier one alone knew is in its log.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from raystate.core.desk import remember
from raystate.core.events import TrainerExited
from raystate.core.names import SnapshotId, group_of, lineage_order

Promises = dict[SnapshotId, str]  # broken ones, and why

REMEMBERED = 1024
EXPLAINED = 8  # steps; the others are named

UNFINISHED = "the trainers ended before all ranks had copied it"


class Untold:
    """Lost promises that no user has been told of, oldest first."""

    def __init__(self) -> None:
        self._lost: Promises = {}
        self._broken: Promises = {}  # by trainers that have died since the newest restore
        self._newest: tuple[SnapshotId, ...] = ()  # promises of theirs, one of each
        self._lineage = ""  # the newest that a restore has begun
        self._base = SnapshotId("", -1)  # what it goes on from
        self._went_on = ""  # the newest lineage that a restore had begun under an earlier Coordinator
        self._forgotten: dict[str, int] = {}  # group -> how many of its there were before the oldest in `_lost`

    @property
    def has_judged(self) -> bool:
        """A restore has settled what the trainers before it had promised."""
        return bool(self._lineage)

    def lost(self, key: SnapshotId, why: str) -> None:
        """It was promised, and can't become durable any more."""
        if key.step <= self._base.step or not self._is_past(key.lineage):
            if len(self._lost) == REMEMBERED and key not in self._lost:
                group = group_of(next(iter(self._lost)).lineage)
                self._forgotten[group] = self._forgotten.get(group, 0) + 1
            remember(self._lost, key, why, most=REMEMBERED)  # else the news is late: its step is made again

    def _is_past(self, lineage: str) -> bool:
        return lineage_order(lineage) < lineage_order(self._lineage)

    def told(self, keys: Iterable[SnapshotId]) -> None:
        """A user knows of these, and of all that the same trainers were promised before."""
        for key in keys:
            self._lost.pop(key, None)
            self._forgotten.pop(group_of(key.lineage), None)

    def saved(self, saved: SnapshotId) -> None:
        """A step of that number is durable after all, perhaps made again."""

        def is_open(key: SnapshotId) -> bool:
            return key.step != saved.step or key.order > saved.order

        self._lost = {key: why for key, why in self._lost.items() if is_open(key)}
        self._broken = {key: why for key, why in self._broken.items() if is_open(key)}
        self._newest = tuple(filter(is_open, self._newest))

    # ---------------------------------------------------------------- trainers that died, and restores

    def exited(self, event: TrainerExited) -> Promises:
        """Take a trainer's last words; gives what is lost by them, and why. Most is known only when the run is restored, or ends."""
        broken, newest = dict(event.broken), () if event.promised is None else (event.promised,)
        if self._is_past(event.lineage) and group_of(event.lineage) != group_of(self._lineage):
            # The next group has restored meanwhile: what it goes on from decides.
            # (test_untold.test_late_news)
            return self._judged(broken, newest)
        self._broken |= broken
        self._newest += newest
        return {}

    def restored(self, lineage: str, base: SnapshotId) -> Promises:
        """The lineage goes on from this snapshot (step -1: from nothing). Gives what is lost by it, and why."""
        self._lineage, self._base = lineage, base
        self._lost = {key: why for key, why in self._lost.items() if key.step <= base.step}
        self._forget_older()
        broken, newest = self._broken, self._newest
        self._broken, self._newest = {}, ()
        return self._judged(broken, newest)

    def went_on(self, lineage: str) -> None:
        """Hosts know that a restore had begun this lineage: it has judged the promises of the
        groups before it."""
        self._went_on = max(self._went_on, lineage, key=lineage_order)

    def _judged(self, broken: Promises, newest: Iterable[SnapshotId]) -> Promises:
        """What dead trainers have promised, up to the step that the run goes on from: it is not made again."""
        base = self._base
        lost = {key: why for key, why in broken.items() if key.step <= base.step}
        # Saved after the bytes that were restored: once more, by force, or in a later lineage,
        # which had gone back to an older step.
        # (test_untold.test_a_promise_of_the_line_that_goes_on_is_not)
        return lost | {key: UNFINISHED for key in newest if key.step <= base.step and key.order > base.order}

    def _forget_older(self) -> None:
        """HostActors tell a new Coordinator also of groups before the last one, whose run was restored since."""
        lines = {self._went_on, *(key.lineage for key in (*self._broken, *self._newest))}
        last = group_of(max(lines, key=lineage_order))
        self._broken = {key: why for key, why in self._broken.items() if group_of(key.lineage) == last}
        self._newest = tuple(key for key in self._newest if group_of(key.lineage) == last)

    # ---------------------------------------------------------------- the end of the run

    def texts(self, asking: str, asked: Collection[SnapshotId], is_made: Callable[[SnapshotId], bool]) -> tuple[str, ...]:
        """What is to be said to a group that closes.

        Args:
            asking: the group, whose ranks ask about their own promises.
            asked: those promises.
            is_made: whether it, or the same step made again, is durable.
        """
        # Only a restore judges what the group before had left: without one that is told now.
        # (test_untold.test_a_group_that_does_not_restore_is_told_of_the_one_before)
        lost = self._lost if group_of(self._lineage) == asking else {**self._left_open(is_made), **self._lost}
        lost = {key: why for key, why in lost.items() if key not in asked and group_of(key.lineage) != asking}
        return self._told(lost, ", saved before a restart", asking)

    def texts_of_release(self, others: Promises, is_made: Callable[[SnapshotId], bool], *, but: int = -1) -> tuple[str, ...]:
        """The same where no group goes on: what the last trainers had promised will not be made
        again.

        Args:
            others: promised snapshots that are in memory, in part or whole, and not durable.
            is_made: as in `texts`.
            but: a step of which that is said already.
        """
        lost = {**self._left_open(is_made), **others, **self._lost}
        return self._told({key: why for key, why in lost.items() if key.step != but}, "")

    def _left_open(self, is_made: Callable[[SnapshotId], bool]) -> Promises:
        """What the last trainers had promised when they died, as far as it is known here."""
        self._forget_older()
        left = {**dict.fromkeys(self._newest, UNFINISHED), **self._broken}
        return {key: why for key, why in left.items() if not is_made(key)}

    def _told(self, lost: Promises, when: str, asking: str = "") -> tuple[str, ...]:
        """One text for each of the newest steps, and one that names the others."""
        by_step = {key.step: why for key, why in sorted(lost.items(), key=lambda one: one[0].order)}
        steps = sorted(by_step)
        whys = {step: by_step[step] for step in steps[-EXPLAINED:]}
        texts = [why if why.startswith(f"step {step} ") and not when else f"step {step}{when}: {why}" for step, why in whys.items()]
        if others := ", ".join(map(str, steps[:-EXPLAINED])):
            texts.insert(0, f"steps {others}{when}: the log says why")
        if forgotten := sum(many for group, many in self._forgotten.items() if group != asking):
            texts.insert(0, f"{forgotten} earlier steps{when}: the log names them")
        return tuple(texts)
