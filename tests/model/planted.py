"""Bugs that raystate had, put back one by one: the model has to find each of them.

Named by their rows in the list of what was seen when raystate was used as strangers would (the numbers in brackets).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import raystate.arrays.tree as tree
import raystate.core.coordinator.journal as journal
import raystate.core.coordinator.leaving as leaving
import raystate.core.coordinator.saves as saves
import raystate.core.coordinator.storage_watch as storage_watch
import raystate.core.host.machine as host
import raystate.core.trainer.machine as trainer
import raystate.core.trainer.own_past as own_past
import raystate.manager.ending as ending
import raystate.manager.facade as facade
import raystate.manager.newest as newest
import raystate.manager.pace as pace
import raystate.manager.pipeline as pipeline
import raystate.manager.restoring as restoring
import raystate.manager.room as room
import raystate.manager.session as session
import raystate.runtime.host.slot_store as slot_store
from raystate.core.formats.host_messages import Connected, Kill
from raystate.core.formats.messages import SnapshotId
from raystate.core.formats.words import host_word_to_json
from tests.searching import planted


def _old_slots_are_a_dead_trainers() -> Any:
    """(1) New slots of a living trainer: its old set counts as that of a dead one, and the process is ended."""
    real = host.Host._connected

    def connected(self: host.Host, event: Connected) -> None:
        known = self._connections.trainers.get(event.connection)
        old = -1 if known is None else known.hello.set_index
        real(self, event)
        if old not in (-1, event.set_index):
            self._out.append(Kill(pid=event.pid, rank=event.rank, reason="it holds the slots of a dead trainer"))

    return planted((host.Host, "_connected", connected))


def _abandoned_copies_go_on() -> Any:
    """(2, 9) A restore gives up nothing of what waits to be copied, and doesn't wait for what is being copied."""

    def begin(self: pipeline.Pipeline, lineage: str, base: SnapshotId | None) -> None:
        with self.lock:
            kept, safe = self.machine.kept, self.machine.past.safe
            self.machine.begin(lineage, base)
            self.machine.kept, self.machine.past.safe = kept, safe
            self._session.begin(lineage)
            self._session.write_word(self.machine.word())

    @contextlib.contextmanager
    def paused(self: pipeline.Pipeline) -> Iterator[None]:
        del self
        yield

    return planted((pipeline.Pipeline, "begin", begin), (pipeline.Pipeline, "paused", paused))


def _retention_by_number() -> Any:
    """(3, 8) Retention keeps the highest numbers, whatever past they are of."""
    return planted((saves.Saves, "_kept_at", staticmethod(lambda kept, _: frozenset(kept))))


def _the_last_step_is_not_kept() -> Any:
    """(4) close() trusts that the last step was made durable."""
    return planted((newest.NewestSave, "make_durable", lambda _: None))


def _a_repeat_is_captured_anew() -> Any:
    """(5) A step number names two states."""
    real = trainer.Trainer.on_save

    def on_save(self: trainer.Trainer, step: int, **more: Any) -> Any:
        self.slots.captured = None
        return real(self, step, **more)

    return planted((trainer.Trainer, "on_save", on_save))


def _tables_do_not_grow() -> Any:
    """(6) The table has a fixed room, and a step that doesn't fit is dropped in silence."""
    return planted(
        (room, "table_bytes_of", lambda *_: 4096),
        (pipeline.Pipeline, "_break_promise", lambda _self, job, _why: job.held.release()),
    )


LONG_BYTES = 100  # words are short here


def _long_words_are_not_sent() -> Any:
    """(7) A word of the host beyond a few hundred bytes is never written."""
    real = slot_store.SlotStore.speak

    def speak(self: slot_store.SlotStore, command: Any) -> None:
        if len(host_word_to_json(command.word)) < LONG_BYTES:
            real(self, command)

    return planted((slot_store.SlotStore, "speak", speak))


def _steps_of_another_past_are_taken() -> Any:
    """(8) save() takes a step that storage holds of another past."""
    return planted((own_past.OwnPast, "refuse_others", lambda *_, **__: None))


def _a_failed_save_leaves_traces() -> Any:
    """(11, 12) What was decided stays decided although the bytes could not be kept."""
    return planted((trainer.Trainer, "put_back", lambda *_: None))


def _checked_after_the_decision() -> Any:
    """(11) A mistake is found when the step has been decided."""
    real = pipeline.Pipeline._decide

    def decide(self: pipeline.Pipeline, given: Any, described: Any, force: bool, told: Any) -> Any:
        decision = real(self, given, described, force, told)
        if isinstance(given.custom, dict) and any(not isinstance(one, str | float) for one in given.custom.values()):
            facade.check_metrics({"custom": "is not a number"})
        return decision

    return planted(
        (facade, "check_custom", lambda custom: {"bad": 1} if isinstance(custom, set) else custom),
        (pipeline.Pipeline, "_decide", decide),
    )


def _due_saves_wait() -> Any:
    """(13) A due save waits for storage, however long that is out."""

    def wait(_: pace.StoragePace, has_slot: Any) -> None:
        while not has_slot(pace.AGAIN_S):
            pass

    return planted(
        (pace.StoragePace, "wait_for_slot", wait),
        (storage_watch.StorageWatch, "room", 1_000_000),
    )


def _text_is_a_metric() -> Any:
    """(17) A metric that is no number: True, never snapshotted, and nobody says so."""
    real = facade.check_metrics

    def check(metrics: Any) -> Any:
        return real({name: 0.0 if isinstance(value, str) else value for name, value in (metrics or {}).items()})

    return planted((facade, "check_metrics", check))


def _a_run_is_released_under_a_new_group() -> Any:
    """Found by the model: who joins while the run ends is let in."""
    return planted((leaving.Leaving, "is_settled", False))


def _slots_are_replaced_while_one_is_to_be_filled() -> Any:
    """Found by the model: new slots although a copy into one of the old is decided and has not begun."""
    return planted((pipeline.Pipeline, "_is_idle", lambda self: self._running is None))


def _a_restored_step_counts_as_durable() -> Any:
    """(4) What was restored from memory needs no save, as if it were in storage."""
    real = restoring.Restoring._settled

    def settled(self: Any, reply: Any) -> None:
        real(self, reply)
        with self._pipeline.lock:
            machine = self._pipeline.machine
            machine.past.safe = machine.newest

    return planted((restoring.Restoring, "_settled", settled))


def _earlier_commits_are_forgotten() -> Any:
    """What was durable once, and retention has removed since, counts as lost."""
    real = journal.Journal._arrived

    def arrived(self: journal.Journal, entry: Any) -> None:
        real(self, entry)
        self.facts.retired = {}

    return planted((journal.Journal, "_arrived", arrived))


def _another_dtype_is_the_same_state() -> Any:
    """A state whose arrays are of another dtype and the same size is kept as the one before."""
    real = tree._fits_leaf

    def fits(signature: tree.Signature, leaf: Any) -> bool:
        return real(signature._replace(dtype=getattr(leaf, "dtype", None)), leaf)

    return planted((tree, "_fits_leaf", fits))


def _another_thread_saves_while_one_leaves() -> Any:
    """What was promised is counted, and then another thread's save says True."""
    return planted((session.Session, "is_left", False))


def _a_closed_generator_has_failed() -> Any:
    """GeneratorExit counts as an exception of the training: nothing is made durable, and Python swallows it."""
    return planted((ending, "is_clean_exit", lambda error: error is None))


PLANTED: dict[str, Callable[[], Any]] = {
    "old slots are a dead trainer's": _old_slots_are_a_dead_trainers,
    "abandoned copies go on": _abandoned_copies_go_on,
    "retention by number": _retention_by_number,
    "the last step is not kept": _the_last_step_is_not_kept,
    "a repeat is captured anew": _a_repeat_is_captured_anew,
    "tables do not grow": _tables_do_not_grow,
    "long words are not sent": _long_words_are_not_sent,
    "steps of another past are taken": _steps_of_another_past_are_taken,
    "a failed save leaves traces": _a_failed_save_leaves_traces,
    "checked after the decision": _checked_after_the_decision,
    "due saves wait": _due_saves_wait,
    "text is a metric": _text_is_a_metric,
    "released under a new group": _a_run_is_released_under_a_new_group,
    "slots replaced while one is to be filled": _slots_are_replaced_while_one_is_to_be_filled,
    "earlier commits are forgotten": _earlier_commits_are_forgotten,
    "a restored step counts as durable": _a_restored_step_counts_as_durable,
    "another dtype is the same state": _another_dtype_is_the_same_state,
    "another thread saves while one leaves": _another_thread_saves_while_one_leaves,
    "a closed generator has failed": _a_closed_generator_has_failed,
}
