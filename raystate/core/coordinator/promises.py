"""What became of the steps for which save() has returned True: a rank that flushes waits for it, a
rank that closes is told."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import cache

from raystate.core.coordinator.context import Context
from raystate.core.coordinator.group import Group
from raystate.core.coordinator.joins import Joins
from raystate.core.coordinator.journal import Journal
from raystate.core.coordinator.memory import Memory
from raystate.core.coordinator.saves import Saves
from raystate.core.formats.declared import Failure
from raystate.core.formats.names import Ask, SnapshotId
from raystate.core.formats.questions import FlushAsked, LeaveAsked
from raystate.core.formats.replies import FlushReply
from raystate.core.formats.texts import of_step

Fate = tuple[bool | None, str]  # see `Saves.fate`


class Fates:
    """What has become of promises, as of now: each is looked at once, however many ranks ask about it."""

    def __init__(self, joins: Joins, fate: Callable[[SnapshotId], Fate], waits_for: Callable[[SnapshotId], str]):
        self._joins = joins
        self.fate = cache(fate)
        self._waits_for = cache(waits_for)

    def is_heard(self, event: FlushAsked | LeaveAsked) -> bool:
        """Whether a report has told of what the rank had saved when it asked; nothing is known of its promises before."""
        group = self._joins.group
        return not event.promised or (group is not None and group.heard(event.rank, event.word))

    def unfinished(self, event: FlushAsked | LeaveAsked, *, but: int = -1) -> tuple[list[SnapshotId], list[str], list[SnapshotId]]:
        """(what is still undecided; why others have failed; which of these were not broken) of what was promised to a rank, but for one
        step."""
        # What the lineage began with keeps the promise of the same step, too.
        broken = [f"step {key.step}: {why}" for key, why in event.broken if key.step != but and self.fate(key)[0] is not True]
        promised = [key for key in event.promised if key.step != but]
        if not self.is_heard(event):
            return promised, broken, []
        undecided = [key for key in promised if self.fate(key)[0] is None]
        lost = [key for key in promised if self.fate(key)[0] is False]
        whys = [(key, self.fate(key)[1]) for key in lost]
        return undecided, [*broken, *(of_step(key.step, why) for key, why in whys)], lost

    def texts(self, event: FlushAsked | LeaveAsked, undecided: Iterable[SnapshotId]) -> Iterable[str]:
        """What these wait for, each once."""
        if not self.is_heard(event):
            return [f"no report yet of what {self._joins.where([event.rank])} has saved"]
        return dict.fromkeys(self._waits_for(key) for key in undecided)

    def is_newest_lost(self, event: LeaveAsked, last: SnapshotId | None) -> bool:
        """Whether neither the newest step that was promised to a rank is durable, nor a later one: an end is judged by that.

        Args:
            last: the run ends with it, and it is durable.
        """
        keys = (*event.promised, *(key for key, _ in event.broken), *(() if last is None else (last,)))
        newest = max(keys, key=lambda key: key.order, default=last)
        return newest != last and newest is not None and self.fate(newest)[0] is not True

    def late(self, event: FlushAsked | LeaveAsked, *, but: int = -1) -> list[str]:
        """Why what was promised to a rank is not durable, or not yet; but for one step."""
        undecided, errors, _ = self.unfinished(event, but=but)
        return [*errors, *self.texts(event, undecided)]


class Promises:
    """Waits for durability on behalf of the ranks that have called wait_until_finished(). All are looked at after each batch of events."""

    def __init__(self, context: Context, memory: Memory, joins: Joins, journal: Journal, saves: Saves):
        self._context = context
        self._memory = memory
        self._joins = joins
        self._journal = journal
        self._saves = saves
        # By what they wait for, which is the same for most ranks: so a look costs as much as there are ranks and promises, not their
        # product. With the time when each was asked. (test_scaling.test_a_look_at_who_waits_costs_ranks_plus_promises)
        self._waiting: dict[frozenset[SnapshotId], dict[Ask, tuple[FlushAsked, float]]] = {}

    def flush_asked(self, event: FlushAsked) -> None:
        """A rank waits until everything that it was promised is durable, or known to be lost."""
        if self._joins.check(event.ask, event.lineage, event.rank):
            for key, why in event.broken:
                self._saves.copy_broke(key, event.rank, why)
            # A rank that asks again, because the answer may be lost, waits no longer for it.
            keys = frozenset((*event.promised, *(key for key, _ in event.broken)))
            self._waiting.setdefault(keys, {}).setdefault(event.ask, (event, self._context.now_s))

    def answer(self, failure: Failure | None) -> None:
        """Answer those whose promises are all settled, whose group is gone, or who have waited long enough.

        Args:
            failure: why the present lineage can't go on, if that is known: no wait for it goes on then.
        """
        if not self._waiting:
            return
        fates = self.fates()
        for keys, asks in list(self._waiting.items()):
            is_open = any(fates.fate(key)[0] is None for key in keys)
            for ask, (event, since_s) in list(asks.items()):
                if not self._has_to_wait(event, since_s, fates, is_open=is_open):
                    self._tell(ask, *asks.pop(ask), fates)
                elif failure is not None:
                    self._context.answer(ask, failure)
                    del asks[ask]
            if not asks:
                del self._waiting[keys]

    def _has_to_wait(self, event: FlushAsked, since_s: float, fates: Fates, *, is_open: bool) -> bool:
        group = self._joins.group
        gone = group is None or not group.alive or group.lineage != event.lineage
        if not event.wait or gone or self._context.now_s - since_s >= self._context.settings.save_timeout_s:
            return False
        return is_open or not fates.is_heard(event)

    def _tell(self, ask: Ask, event: FlushAsked, since_s: float, fates: Fates) -> None:
        waited_s = self._context.now_s - since_s
        undecided, errors, lost = fates.unfinished(event)
        if event.wait:
            errors += [f"{text} (after {waited_s:.1f} s)" for text in fates.texts(event, undecided)]
        mistake = self._saves.mistake
        if event.wait and mistake is not None and mistake[0] in lost:
            step = mistake[0].step
            self._context.fail([ask], "ConfigError", "; ".join((mistake[1], *fates.late(event, but=step))), step=step)
            return
        durable_step = self._journal.durable_step
        reply = FlushReply(durable_step=durable_step, errors=tuple(errors), lost=tuple(lost), undecided=tuple(undecided))
        self._context.answer(ask, reply)

    # ---------------------------------------------------------------- what became of them

    def fates(self) -> Fates:
        """For questions that are answered now."""
        return Fates(self._joins, self._fate, self._saves.waits_for)

    def _fate(self, key: SnapshotId) -> Fate:
        """As `Saves.fate`; also of a snapshot that can't become complete."""
        durable, why = self._saves.fate(key)
        if durable is None and key not in self._saves.jobs and key.step not in self._journal.live:
            if skipped := self._skipped(key):
                return False, f"{self._joins.where(skipped)} has no copy of it, and newer steps came"
            if self._is_passed_over(key):
                return False, "a later step was made durable without it"
        return durable, why

    def _is_passed_over(self, key: SnapshotId) -> bool:
        """Whether a later step of its lineage is durable, or was, and no host can bring what is missing."""
        restore, lineages = self._memory.restore, {key.lineage}
        if restore is not None and (restore.lineage, restore.step) == (key.lineage, key.step):
            lineages.add(restore.by)  # what a lineage began with is passed over by that lineage's steps, too
        newer = itertools.takewhile(lambda one: one.step > key.step, reversed(self._journal.live.values()))
        past = (gone for gone in self._journal.facts.retired.values() if gone.step > key.step)
        if not any(one.lineage in lineages for one in itertools.chain(newer, past)):
            return False
        if self._memory.complete(key) is not None or self._memory.gathering:
            return False
        return all(view.up for view in self._memory.views)

    def _skipped(self, key: SnapshotId) -> list[int]:
        """Ranks that are past the snapshot and neither hold nor stage it: it can't become complete any more.

        A host that is down is left out: it may come back with its piece.
        """
        group = self._joins.group
        snap = self._memory.snaps.get(key)
        pieces = {} if snap is None else snap.pieces
        seen = {} if group is None or group.lineage != key.lineage else group.seen
        return [
            rank
            for rank in sorted(seen)
            if (one := seen[rank]).newest_step > key.step
            and key.step not in one.pending
            and rank not in pieces
            and self._is_up(group, rank)
        ]

    def _is_up(self, group: Group | None, rank: int) -> bool:
        view = None if group is None else self._memory.hosts[group.hosts[rank]]
        return view is not None and view.up
