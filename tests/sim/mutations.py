"""Bugs to plant, to show that the simulator can see: each is a context manager around a schedule.

Some change core's decisions, by patching; others the simulated shells, by a name that `simulate(mutations=…)` takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from raystate.core import journal, memory, recovery, saves, slots, snapshots, trainer
from raystate.core.messages import LiveStep


@contextmanager
def _patched(target: Any, name: str, value: Any) -> Iterator[frozenset[str]]:
    with mock.patch.object(target, name, value):
        yield frozenset()


@contextmanager
def _shell(*names: str) -> Iterator[frozenset[str]]:
    yield frozenset(names)


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

    @contextmanager
    def both() -> Iterator[frozenset[str]]:
        with mock.patch.object(saves.Saves, "written", written):
            yield frozenset({"no_coverage"})

    return both()


def _stop_step_overtaken() -> Any:
    """A trainer agrees to a step that it has passed."""
    real = trainer.Trainer._answer

    def answer(self: trainer.Trainer, step: int, proposal: Any) -> Any:
        result = real(self, step, proposal)
        if proposal is not None and self._ack_id == proposal.id and not self._ack_ok:
            self._ack_ok = True
            self._ack = proposal
            return False, None
        return result

    return _patched(trainer.Trainer, "_answer", answer)


def _stop_without_waiting() -> Any:
    """A trainer that has agreed acts at its step although nobody has confirmed it."""
    real = trainer.Trainer._answer

    def answer(self: trainer.Trainer, step: int, proposal: Any) -> Any:
        wait, agreed = real(self, step, proposal)
        if wait:
            agreed, self._ack = self._ack, None
            return False, agreed
        return wait, agreed

    return _patched(trainer.Trainer, "_answer", answer)


def _mixed_lineages() -> Any:
    """Pieces of the same step count together, whatever lineage they are of."""
    real = memory.Memory.candidates

    def candidates(self: memory.Memory) -> list[memory.Snap]:
        found = real(self)
        steps: dict[int, memory.Snap] = {}
        for snap in self.snaps.values():
            merged = steps.get(snap.step)
            if merged is None:
                merged = steps[snap.step] = memory.Snap(snap.lineage, snap.step)
            if snap.order > merged.order:
                merged.lineage, merged.order = snap.lineage, snap.order
            for rank, held in snap.pieces.items():
                merged.pieces.setdefault(rank, {}).update(held)
        for merged in steps.values():
            merged.refresh()
        return sorted([*found, *(one for one in steps.values() if one.complete)], key=lambda one: -one.step)

    def complete(self: memory.Memory, key: Any) -> Any:
        return next((one for one in candidates(self) if one.step == key[1]), None)

    @contextmanager
    def both() -> Iterator[frozenset[str]]:
        with (
            mock.patch.object(memory.Memory, "candidates", candidates),
            mock.patch.object(memory.Memory, "believed", _always),
            mock.patch.object(memory.Memory, "complete", complete),
        ):
            yield frozenset({"keep_slots"})

    return both()


def _slot_reused_early() -> Any:
    """A slot is free as soon as its host holds something newer, stable or not."""
    real = slots.why_free

    def why_free(lineage: str, step: int, advice: Any) -> str | None:
        if advice.lineage == lineage and (lineage, step) not in advice.keep and step <= advice.stable + 1:
            return "planted"
        return real(lineage, step, advice)

    return _patched(slots, "why_free", why_free)


def _retention_takes_last() -> Any:
    """Retention keeps only the step that is being committed, and removes the others before that one is visible."""

    def choose(live: list[LiveStep], *_: Any) -> list[tuple[int, bool, str]]:
        return [(one.step, False, "retention") for one in live[:-1]]

    @contextmanager
    def both() -> Iterator[frozenset[str]]:
        with mock.patch.object(saves, "choose_retired", choose), mock.patch.object(journal.Journal, "_has_to_wait", _never):
            yield frozenset()

    return both()


def _older_memory_wins() -> Any:
    """Memory is preferred, newer durable step or not."""

    return _patched(recovery.Recovery, "_is_behind", _never)


def _no_hold_rule() -> Any:
    """Open intents of superseded attempts are forgotten once this attempt has carried them out."""

    def is_closed(intent: Any, *, carried: Any, **_: Any) -> bool:
        return (intent.kind, intent.step, intent.save, intent.seq) in carried

    from raystate.core import log

    return _patched(log, "is_closed", is_closed)


def _discard_unknown_append() -> Any:
    """An append without an answer counts as one that did not happen: the save is discarded and tried anew."""
    real = journal.Journal.appended

    def appended(self: journal.Journal, event: Any) -> None:
        flight = self._flight
        if event.outcome == "failed" and flight is not None and flight.kind == "commit" and event.seq == flight.seq:
            done, self._flight, self._done = self._done, None, None
            if done is not None:
                done(None)
            return
        real(self, event)

    return _patched(journal.Journal, "appended", appended)


def _rejoin_without_discard() -> Any:
    """A host that was away when the others discarded is believed when it comes back, and is not told to discard."""

    @contextmanager
    def both() -> Iterator[frozenset[str]]:
        with mock.patch.object(memory.Memory, "believed", _always), mock.patch.object(snapshots.Snapshots, "has_base", _always):
            yield frozenset({"keep_slots"})

    return both()


def _stable_without_all() -> Any:
    """A snapshot counts as complete one piece too early."""

    def refresh(self: memory.Snap) -> None:
        world = self.world
        self.complete = world > 0 and len(self.pieces) >= max(1, world - 1)
        self.durable = self.complete and all(p.durable for held in self.pieces.values() for p in held.values())

    return _patched(memory.Snap, "refresh", refresh)


def _stale_reports_believed() -> Any:
    """The choice is made from whatever reports there are, however old."""

    def is_fresh(self: recovery.Recovery, host: Any) -> bool:
        return self.memory.hosts[host].reported_s is not None

    return _patched(recovery.Recovery, "_is_fresh", is_fresh)


MUTATIONS: dict[str, Callable[[], Any]] = {
    "marker before data": lambda: _shell("marker_first"),
    "commit without full coverage": _commit_without_coverage,
    "stale attempt commits": lambda: _shell("stale_commits"),
    "merge takes strangers": lambda: _shell("merge_strangers"),
    "published before it is committed": lambda: _shell("publish_first"),
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
}
