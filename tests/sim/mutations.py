"""Bugs to plant, to show that the simulator can see: each is a context manager around a schedule.

Some change core's decisions, by patching; others the simulated shells, by a name that `simulate(mutations=…)` takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from raystate.core.coordinator import agreement, copying, fresh_reports, group, joins, journal, memory, restorable, saves
from raystate.core.formats.host_messages import Empty
from raystate.core.formats.messages import EndTrainers, LiveStep, SnapshotId, Write
from raystate.core.host import copies, slot_sets, slots
from raystate.core.host import machine as host
from raystate.core.trainer import own_answers
from tests.searching import planted


def _always(*_: Any) -> bool:
    return True


def _never(*_: Any) -> bool:
    return False


def _commit_without_coverage() -> Any:
    """The first host that has written is taken for all, and nobody checks what the package covers."""
    real = saves.Saves.written

    def written(self: saves.Saves, event: Any) -> None:
        real(self, event)
        job = self.running
        if job is not None and job.phase == "writing" and job.save == event.save and not event.error and job.waiting:
            job.waiting = {event.host}
            real(self, event)

    return planted((saves.Saves, "written", written), shells={"no_coverage"})


def _stop_step_overtaken() -> Any:
    """A trainer agrees to a step that it has passed."""
    real = own_answers.OwnAnswers.answer

    def answer(self: own_answers.OwnAnswers, step: int, proposal: Any) -> Any:
        result = real(self, step, proposal)
        if proposal is not None and self.id == proposal.id and not self.ok:
            self.ok = True
            self.agreed = proposal
            return False, None
        return result

    return planted((own_answers.OwnAnswers, "answer", answer))


def _stop_without_waiting() -> Any:
    """A trainer that has agreed acts at its step although nobody has confirmed it."""
    real = own_answers.OwnAnswers.answer

    def answer(self: own_answers.OwnAnswers, step: int, proposal: Any) -> Any:
        wait, agreed = real(self, step, proposal)
        if wait:
            agreed, self.agreed = self.agreed, None
            return False, agreed
        return wait, agreed

    return planted((own_answers.OwnAnswers, "answer", answer))


def _mixed_lineages() -> Any:
    """Pieces of the same step count together, whatever lineage they are of."""
    real = memory.Memory.candidates

    def candidates(self: memory.Memory) -> list[memory.Snap]:
        found = real(self)
        steps: dict[int, list[memory.Snap]] = {}
        for snap in sorted(self.snaps.values(), key=lambda one: one.order, reverse=True):
            steps.setdefault(snap.step, []).append(snap)
        for same in steps.values():
            merged = memory.Snap(same[0].id)
            for snap in same:
                for rank, pieces in snap.pieces.items():
                    if rank not in merged.pieces:
                        for node, piece in pieces.items():
                            merged.add(node, piece)
            if merged.complete:
                found.append(merged)
        return sorted(found, key=lambda one: -one.step)

    def complete(self: memory.Memory, key: Any) -> Any:
        return next((one for one in candidates(self) if one.step == key.step), None)

    return planted(
        (memory.Memory, "candidates", candidates),
        (memory.Memory, "believed", _always),
        (memory.Memory, "complete", complete),
        shells={"keep_slots"},
    )


def _slot_reused_early() -> Any:
    """A slot is free as soon as its host holds something newer, stable or not."""
    real = slots.why_free

    def why_free(snapshot: SnapshotId, advice: Any, **more: Any) -> str | None:
        if advice.lineage == snapshot.lineage and snapshot not in advice.keep and snapshot.step <= advice.stable + 1:
            return "planted"
        return real(snapshot, advice, **more)

    return planted((slots, "why_free", why_free))


def _retention_takes_last() -> Any:
    """Retention keeps only the step that is being committed, and removes the others before that one is visible."""

    def choose(live: list[LiveStep], *_: Any) -> list[tuple[int, str]]:
        return [(one.step, "retention") for one in live[:-1]]

    return planted((saves, "choose_retired", choose), (journal.Journal, "_has_to_wait", _never))


def _older_memory_wins() -> Any:
    """Memory is preferred, newer durable step or not."""

    return planted((restorable.Restorable, "is_behind", _never))


def _no_hold_rule() -> Any:
    """Open intents of superseded attempts are forgotten once this attempt has carried them out."""

    def is_closed(intent: Any, *, carried: Any, **_: Any) -> bool:
        return (intent.kind, intent.step, intent.save, intent.seq) in carried

    from raystate.core.formats import log

    return planted((log, "is_closed", is_closed))


def _discard_unknown_append() -> Any:
    """An append without an answer counts as one that did not happen: the save is discarded and tried anew."""
    real = journal.Journal.appended

    def appended(self: journal.Journal, event: Any) -> None:
        flight = self._flight
        if event.outcome == "failed" and flight is not None and flight.entry.kind == "commit" and event.seq == flight.entry.seq:
            self._flight = None
            self._logged(flight.request, None)
            return
        real(self, event)

    return planted((journal.Journal, "appended", appended))


def _rejoin_without_discard() -> Any:
    """A host that was away when the others discarded is believed when it comes back, and is not told to discard."""

    return planted((memory.Memory, "believed", _always), (memory.Memory, "has_discarded", _always), shells={"keep_slots"})


def _stable_without_all() -> Any:
    """A snapshot counts as complete one piece too early."""

    def complete(self: memory.Snap) -> bool:
        return self.world > 0 and len(self.pieces) >= max(1, self.world - 1)

    return planted((memory.Snap, "complete", property(complete)))


def _stale_reports_believed() -> Any:
    """The choice is made from whatever reports there are, however old."""

    def is_fresh(*_: Any) -> bool:
        return True

    return planted((fresh_reports.RestoreReports, "is_fresh", is_fresh))


def _ends_not_fenced() -> Any:
    """A HostActor kills trainers for whichever attempt."""
    real = host.Host._end_trainers

    def end_trainers(self: host.Host, order: EndTrainers) -> None:
        real(self, replace(order, attempt=max(order.attempt, self._attempt or 0)))

    return planted((host.Host, "_end_trainers", end_trainers))


def _discarded_while_read() -> Any:
    """A HostActor discards a slot although it is being written to storage."""

    def discard(self: slot_sets.SlotSets, one: slot_sets.SetState, number: int) -> None:
        one.slots[number].content = None
        self.out.append(Empty(index=one.index, slot=number, reason="planted"))

    return planted((slot_sets.SlotSets, "discard", discard))


def _restore_in_the_same_lineage() -> Any:
    """A restore goes on in the lineage that it gives up."""

    def next_lineage(self: joins.Joins) -> str:
        assert self.group is not None
        return self.group.lineage

    return planted((joins.Joins, "next_lineage", next_lineage))


def _lost_promise_told_as_kept() -> Any:
    """What was given up is told as durable."""
    real = saves.Saves.fate

    def fate(self: saves.Saves, key: SnapshotId) -> tuple[bool | None, str]:
        durable, why = real(self, key)
        return (True, "") if durable is False else (durable, why)

    return planted((saves.Saves, "fate", fate))


def _late_pieces_believed() -> Any:
    """What a trainer stages late in a past that was given up counts, on its host and at the Coordinator."""
    real = slot_sets.SlotSets.take

    def take_contents(self: slot_sets.SlotSets, *args: Any) -> None:
        restore, self.restore = self.restore, None
        real(self, *args)
        self.restore = restore

    return planted((slot_sets.SlotSets, "take", take_contents), (memory.Memory, "believed", _always))


def _save_executed_twice() -> Any:
    """A HostActor forgets which saves it has executed."""
    real = host.Host._write

    def write(self: host.Host, order: Write) -> None:
        self._saves.pop(order.save, None)
        self._newest_save = (0, 0)
        real(self, order)

    return planted((host.Host, "_write", write))


def _reported_before_all_is_found() -> Any:
    """A HostActor that starts again reports as soon as it has found one of its sets."""
    real = host.Host.handle

    def handle(self: host.Host, event: Any, now_s: float) -> Any:
        self._knows_all = True
        return real(self, event, now_s)

    return planted((host.Host, "handle", handle))


MUTATIONS: dict[str, Callable[[], Any]] = {
    "marker before data": lambda: planted(shells={"marker_first"}),
    "commit without full coverage": _commit_without_coverage,
    "commits what is gone": lambda: planted(shells={"append_unfounded"}),
    "stale attempt commits": lambda: planted(shells={"stale_commits"}),
    "merge takes strangers": lambda: planted(shells={"merge_strangers"}),
    "published before it is committed": lambda: planted(shells={"publish_first"}),
    "stop step overtaken": _stop_step_overtaken,
    "stop without waiting for the others": _stop_without_waiting,
    "mixed lineages chosen": _mixed_lineages,
    "slot reused before stable": _slot_reused_early,
    "retention takes the last step": _retention_takes_last,
    "older memory step over newer durable one": _older_memory_wins,
    "late retire deletes a step saved again": _no_hold_rule,
    "lost acknowledgement taken for failure": _discard_unknown_append,
    "host rejoins without discarding": _rejoin_without_discard,
    "complete without one piece": _stable_without_all,
    "recovery believes old reports": _stale_reports_believed,
    "host forgets over its restart": lambda: planted(shells={"forgetful_host"}),
    "ends are not fenced": _ends_not_fenced,
    "discarded while it is read": _discarded_while_read,
    "questions judged on older reports": lambda: planted((group.Group, "heard", _always)),
    "restore without a new lineage": _restore_in_the_same_lineage,
    "lost promise told as durable": _lost_promise_told_as_kept,
    "late pieces of a given-up past believed": _late_pieces_believed,
    "save executed twice": _save_executed_twice,
    "reported before all is found": _reported_before_all_is_found,
    "slots are handed on by the lock alone": lambda: planted(
        (slot_sets, "trainer_state", lambda *, locked, **_: "attached" if locked else "gone")
    ),
}


def _copy_reused_early() -> Any:
    """A copy is overwritten as soon as a newer one comes, stable or not."""

    def free_slot(one: slot_sets.SetState, _: Any) -> int | None:
        return next((number for number, slot in enumerate(one.slots) if not slot.holds), None)

    return planted((copies.Copies, "_free_slot", staticmethod(free_slot)))


def _copy_slot_not_held() -> Any:
    """The slot of a copy that is on its way may be given to the next one."""
    real = copies.Copies.measured

    def measured(self: copies.Copies, event: Any, advice: Any) -> None:
        real(self, event, advice)
        transfer = self._transfers.get(event.transfer)
        if transfer is not None and transfer.address is not None:
            self._slot_sets.let_go((transfer.address,))
            transfer.address = copies.SlotAddress(rank=transfer.rank, index=transfer.address.index, slot=transfer.address.slot)

    return planted((copies.Copies, "measured", measured))


def _copies_in_one_domain() -> Any:
    """The peers are the next hosts, whatever they are lost together with."""
    real = copying.assign_peers

    def assign(domains: Any, replicas: int, before: Any, leaving: Any) -> Any:
        return real(dict.fromkeys(domains, ""), replicas, before, leaving)

    return planted((copying, "assign_peers", assign))


def _copies_where_they_go_away() -> Any:
    """The peers are chosen without a look at the notices."""
    real = copying.assign_peers
    return planted((copying, "assign_peers", lambda domains, replicas, before, _: real(domains, replicas, before)))


def _one_copy() -> Any:
    """However many are asked for."""
    real = copying.assign_peers
    return planted((copying, "assign_peers", lambda domains, _, before, leaving: real(domains, 1, before, leaving)))


def _growth_taken_back() -> Any:
    """A step that all have agreed on is withdrawn when they don't reach it within a second."""
    asked, late = agreement.Agreement.stop, agreement.Agreement._stop_is_late

    def stop(self: agreement.Agreement, reason: str, within_s: float | None, only: Any) -> None:
        asked(self, reason, within_s, only)
        if within_s is None and self._stop is not None:
            self._stop.agree_until_s = self.context.now_s + 1.0

    def stop_is_late(self: agreement.Agreement, stop: Any, proposal: Any) -> None:
        if stop.gone_s == math.inf and proposal is not None and proposal.state == "confirmed":
            self._end(proposal, "it takes too long")
            self._stop = None
        else:
            late(self, stop, proposal)

    return planted((agreement.Agreement, "stop", stop), (agreement.Agreement, "_stop_is_late", stop_is_late))


WITH_COPIES: dict[str, Callable[[], Any]] = {
    "stable without copies": lambda: planted((copying.Copying, "is_safe", _always)),
    "copy reused before stable": _copy_reused_early,
    "copy's slot is given away": _copy_slot_not_held,
    "copies in one failure domain": _copies_in_one_domain,
    "copies on a host that goes away": _copies_where_they_go_away,
    "copied from a slot that has changed": lambda: planted(shells={"copy_anything"}),
    "a growth taken back": _growth_taken_back,
}
"""Bugs in what peer copies and larger groups need; to be found with `replicas=1`."""

WITH_TWO_COPIES: dict[str, Callable[[], Any]] = {
    "one copy where two are wanted": _one_copy,
    "let go while its heir has fewer copies": lambda: planted((copying.Copying, "kept_beside", lambda *_: [])),
}
"""Bugs to be found with `replicas=2`."""
