"""What one trainer decides at each save()."""

from __future__ import annotations

from random import Random

import pytest

from raystate.core.formats.errors import BarrierTimeoutError, InvalidTransitionError, StepOrderError
from raystate.core.formats.messages import (
    Failure,
    HostWord,
    Proposal,
    SnapshotId,
)
from raystate.core.trainer.machine import Trainer


def host(*grants: int, **more: object) -> HostWord:
    return HostWord(grants=grants or (1, 1, 1), **more)  # type: ignore[arg-type]


def trainer(**more: object) -> Trainer:
    made = Trainer(0, 2, "1.1.x", **more)  # type: ignore[arg-type]
    made.begin("1.1.x", None)
    return made


def test_durable_is_the_first_save_at_or_after_each_multiple():
    made = trainer(save_every_steps=10, snapshot_every=0)
    promised = [step for step in range(3, 60, 4) if made.on_save(step, host_word=host(), stager_busy=False).promised]
    assert promised == [11, 23, 31, 43, 51]
    later = Trainer(0, 2, "1.1.x", save_every_steps=10)
    later.begin("1.2.x", SnapshotId("1.1.x", 23))
    assert later.on_save(30, host_word=host()).promised


def test_a_save_that_passes_keeps_and_answers_nothing():
    """Whatever has been agreed upon, and whatever others' interval is; and it does what on_save would do."""
    for seed in range(300):
        rng = Random(seed)
        made = trainer(save_every_steps=rng.choice((None, 5)), snapshot_every=rng.choice((None, 0, 2, 3)))
        passed = 0
        for step in range(1, 20):
            state = rng.choice(("proposed", "confirmed", "withdrawn"))
            proposal = Proposal(id=step // 4, kind="stop", step=step // 4 * 4 + 5, state=state) if seed % 2 else None
            word = host(*(rng.randrange(1, 9) for _ in range(3)), interval=rng.choice((1, 2)), proposal=proposal)
            if not made.passes(step, word):
                made.on_save(step, host_word=word)
                continue
            passed += 1
            before = made.memento()
            decision = made.on_save(step, host_word=word)
            assert (decision.action, decision.promised, decision.wait, decision.stop, decision.ignored) == (
                "none", False, False, False, False,
            )  # fmt: skip
            after = made.memento()
            made.put_back(before)
            made.pass_by(step)
            assert made.memento() == after
        assert passed or seed % 2


def test_slots_are_used_one_by_one_and_then_skipped():
    made = trainer()
    word = host(1, 1)
    first, second = made.on_save(1, host_word=word), made.on_save(2, host_word=word)
    assert (first.action, first.slot, second.slot) == ("stage", 0, 1)
    assert second.word.pending == (1, 2)
    third = made.on_save(3, host_word=word)
    assert (third.action, third.promised) == ("skip", False)
    made.staged(0, 1)
    assert made.word().done == (1, 0, 0)
    assert made.on_save(4, host_word=word).action == "skip"
    assert made.on_save(5, host_word=host(2, 1)).slot == 0


def test_the_newest_step_that_was_skipped_gets_a_slot_until_the_next_is_saved():
    made = trainer()
    made.on_save(1, host_word=host(1))
    skipped = made.on_save(2, host_word=host(1))
    assert (skipped.action, skipped.word.pending, made.slots.late) == ("skip", (1, 2), 2)
    assert made.take_slot(host(1)) is None
    made.staged(0, 1)
    assert made.take_slot(host(2)) == (0, 2)
    assert (made.slots.late, made.kept, made.word().pending) == (None, SnapshotId("1.1.x", 2), (2,))
    made.staged(0, 2)
    assert made.word().pending == ()
    skipped = made.on_save(3, host_word=host(2))
    assert skipped.action == "skip" and made.on_save(4, host_word=host(2)).word.pending == (4,)  # 3 comes no more
    made.begin("1.2.x", None)
    assert made.take_slot(host(3)) is None


def test_a_promise_of_a_past_that_was_given_up_keeps_no_skipped_step_waiting():
    made = trainer(save_every_steps=2)
    made.on_save(2, host_word=host(1))
    made.staged(0, 2)
    made.begin("1.2.x", None)
    made.settled(ahead=(), safe=False, stored=False)
    assert made.on_save(1, host_word=host(1)).action == "skip"
    assert made.take_slot(host(2)) == (0, 1)


def test_a_promised_step_goes_before_one_that_was_skipped():
    made = trainer(save_every_steps=2)
    none = host(0)
    made.on_save(2, host_word=none)
    assert made.on_save(3, host_word=none).word.pending == (2, 3)
    assert made.take_slot(host(1)) == (0, 2)
    assert made.take_slot(host(1, 1)) == (1, 3)
    assert made.on_save(5, host_word=none).action == "hold"  # 4 was due, and is made up for
    assert made.slots.late is None
    made.on_save(7, host_word=none)
    made.closing()
    assert 7 not in made.word().pending or made.slots.held == 7


def test_durable_without_a_slot_is_held_and_gets_the_next_one():
    made = trainer(save_every_steps=2)
    held = made.on_save(2, host_word=host(0, 0, 0))
    assert (held.action, held.promised, held.word.pending, made.promises.made) == ("hold", True, (2,), (SnapshotId("1.1.x", 2),))
    replaced = made.on_save(4, host_word=host(0, 0, 0))
    assert (replaced.action, replaced.dropped) == ("hold", SnapshotId("1.1.x", 2))
    again = made.on_save(4, force=True, host_word=host(0, 0, 0))
    assert (again.action, again.ignored) == ("none", True)
    assert made.promises.broken == ((SnapshotId("1.1.x", 2), "no slot became free for it before the next durable step"),)
    assert made.take_slot(host(0, 0, 0)) is None
    assert made.take_slot(host(0, 1, 0)) == (1, 4)
    made.staged(1, 4)
    assert made.word().pending == ()


def test_interval_and_busy_stager():
    made = trainer(snapshot_every=2)
    assert made.on_save(2, host_word=host(interval=2)).action == "none"
    assert made.on_save(4, host_word=host(interval=2), stager_busy=True).action == "skip"
    assert made.on_save(8, host_word=host(interval=2)).action == "stage"


def test_equal_step_is_nothing_unless_forced_and_an_older_one_an_error():
    made = trainer()
    made.on_save(5, host_word=host())
    assert made.on_save(5, host_word=host()).action == "none"
    forced = made.on_save(5, force=True, host_word=host())
    assert (forced.action, forced.promised) == ("promise", True)
    with pytest.raises(StepOrderError):
        made.on_save(4, host_word=host())


def test_failure_of_the_host_word_is_raised():
    failure = Failure(error="BarrierTimeoutError", message="rank 1 is missing", details={"missing_ranks": [1]})
    with pytest.raises(BarrierTimeoutError) as caught:
        trainer().on_save(1, host_word=host(failure=failure))
    assert caught.value.missing_ranks == [1]


def proposal(state: str, step: int = 5, number: int = 1, kind: str = "stop") -> Proposal:
    return Proposal(id=number, kind=kind, step=step, state=state, reason="preemption")  # type: ignore[arg-type]


def test_stop_waits_at_its_step_until_it_is_confirmed():
    made = trainer()
    first = made.on_save(4, host_word=host(proposal=proposal("proposed")))
    assert (first.word.ack_id, first.word.ack_ok, first.word.ack_step) == (1, True, 4)
    assert made.on_save(5, host_word=host(proposal=proposal("proposed"))).wait
    assert made.on_save(5, host_word=host()).wait
    assert made.reached(5, host(proposal=proposal("confirmed"))) == (True, False)
    last = made.on_save(5, host_word=host(proposal=proposal("confirmed")))
    assert (last.action, last.promised, last.stop) == ("stage", True, True)
    assert made.reached(5, host(proposal=proposal("confirmed"))) == (True, False)


def test_a_stop_without_a_slot_says_why_it_stops_and_no_more():
    made = trainer()
    asked = {state: host(0, proposal=proposal(state)) for state in ("proposed", "confirmed")}
    made.on_save(4, host_word=asked["proposed"])
    last = made.on_save(5, host_word=asked["confirmed"])
    assert (last.action, last.stop, last.reason) == ("hold", True, "all ranks stop at step 5: preemption")


def test_stop_is_refused_when_its_step_is_reached_and_gone_when_withdrawn():
    made = trainer()
    refused = made.on_save(5, host_word=host(proposal=proposal("proposed")))
    assert (refused.word.ack_id, refused.word.ack_ok, refused.word.ack_step) == (1, False, 5)
    made.on_save(6, host_word=host(proposal=proposal("proposed", 9, 2)))
    assert made.on_save(9, host_word=host(proposal=proposal("withdrawn", 9, 2))).wait is False


def test_what_was_agreed_to_before_a_restore_does_not_count_after_it():
    """A new Coordinator counted it, and confirmed a step at which this rank does not stop."""
    made = trainer()
    asked = host(proposal=proposal("proposed"))
    assert made.on_save(4, host_word=asked).word.ack_ok
    made.begin("1.2.x", SnapshotId("", 3))
    after = made.on_save(5, host_word=asked)
    assert (after.wait, after.word.ack_id, after.word.ack_ok) == (False, 1, False)


# ---------------------------------------------------------------- restores, promises, mistakes


def test_a_restore_begins_a_lineage_and_ends_the_promises():
    made = trainer(save_every_steps=2)
    assert made.on_save(2, host_word=host()).promised
    made.staged(0, 2)
    made.begin("1.2.x", SnapshotId("", 1))
    made.settled(ahead=(3, 4), safe=True)
    word = made.word()
    assert (word.lineage, word.newest_step, word.pending) == ("1.2.x", 1, ())
    assert made.promises.made == ()
    assert made.is_safe
    assert made.on_save(2, host_word=host()).promised, "the same step, of another line"
    assert made.promises.made == (SnapshotId("1.2.x", 2),)


def test_a_step_of_another_past_is_refused_by_save_itself():
    made = trainer()
    made.settled(ahead=(3, 5), safe=True)
    made.on_save(2, host_word=host())
    before = made.memento()
    with pytest.raises(StepOrderError, match=r"of another past: restore\(step=…, rollback=True\) retires"):
        made.on_save(3, host_word=host())
    assert made.memento() == before
    assert made.on_save(4, host_word=host()).action == "stage"
    never_restored = Trainer(0, 1, "1.1.x", stored_step=4)
    with pytest.raises(StepOrderError, match="has restored none of them"):
        never_restored.on_save(4, host_word=host())
    assert never_restored.on_save(5, host_word=host()).action == "stage"


def test_what_the_shell_could_not_do_leaves_no_trace_but_its_numbers():
    made = trainer(save_every_steps=2)
    before = made.memento()
    assert made.on_save(2, host_word=host(proposal=proposal("proposed"))).promised
    number = made.number
    made.put_back(before)
    assert made.word().number > number
    assert (made.promises.made, made.newest, made.staging) == ((), -1, False)
    corrected = made.on_save(2, host_word=host(proposal=proposal("proposed")))
    assert (corrected.promised, corrected.slot) == (True, 0)


def test_a_forced_repetition_promises_the_capture():
    made = trainer()
    taken = made.on_save(5, host_word=host())
    made.staged(taken.slot or 0, 5)
    decision = made.on_save(5, force=True, host_word=host(0, 1, 1))
    assert (decision.action, decision.promised, decision.slot) == ("promise", True, taken.slot)
    assert (made.promises.made, made.is_safe, made.staging) == ((SnapshotId("1.1.x", 5),), True, False)
    for force in (False, True):
        late = made.on_save(5, force=force, host_word=host(0, 1, 1))
        assert (late.action, late.promised, late.ignored) == ("none", False, True)


@pytest.mark.parametrize("gone", ["granted anew", "copy failed", "other slots", "never made", "skipped"])
def test_a_forced_repetition_captures_where_there_is_no_capture(gone: str):
    made, word = trainer(snapshot_every=3 if gone == "never made" else 1), host(0, 1, 1)
    first = made.on_save(5, host_word=host(0, 0, 0) if gone == "skipped" else host(1, 1, 1))
    if gone in ("granted anew", "copy failed"):
        assert first.slot == 0
        (made.released(0) if gone == "copy failed" else made.staged(0, 5))
        word = host(2, 1, 1) if gone == "granted anew" else word
    elif gone == "other slots":
        made.staged(0, 5)
        made.new_slots(3)
    again = made.on_save(5, force=True, host_word=word)
    assert (again.action, again.promised) == ("stage", True)
    assert made.promises.made == (SnapshotId("1.1.x", 5),)


@pytest.mark.parametrize("saving", [False, True])
def test_what_was_durable_when_it_was_restored_is_not_tried_again(saving: bool):
    made = trainer()
    made.begin("1.2.x", SnapshotId("1.1.x", 5))
    made.settled(ahead=(), safe=not saving, saving=saving)
    assert not made.on_save(5, force=True, host_word=host()).promised


def test_words_are_numbered():
    made = trainer()
    numbers = [made.word().number, made.on_save(1, host_word=host()).word.number, made.word().number]
    assert numbers == sorted(set(numbers))
    made.begin("1.2.x", None)
    assert made.word().number > numbers[-1]


def test_a_slot_that_is_not_being_filled_cannot_be_staged():
    made = trainer()
    with pytest.raises(
        InvalidTransitionError, match=r"rank 0 cannot take step 3 staged in slot 1: .*lineage 1\.1\.x, running, newest step -1"
    ):
        made.staged(1, 3)
    made.on_save(1, host_word=host())
    with pytest.raises(InvalidTransitionError, match="new slots"):
        made.new_slots(3)


def test_a_due_step_waits_while_promised_ones_hold_all_slots_but_one():
    made = trainer(save_every_steps=2)

    def waits(step: int, word: HostWord) -> bool:
        return made.must_wait(step, force=False, host_word=word)

    for step, word in ((2, host(1, 1, 1)), (4, host(1, 1, 1)), (5, host(1, 1, 1))):
        slot = made.on_save(step, host_word=word).slot
        assert slot is not None
        made.staged(slot, step)
    full = host(1, 1, 1)
    assert waits(6, full) and not waits(7, host(1, 1, 2)), "a slot is free"
    assert not made.must_wait(5, force=False, host_word=full), "it is not due"
    assert not made.must_wait(5, force=True, host_word=full), "it has its capture"
    assert made.must_wait(7, force=True, host_word=full)
    assert not waits(6, host(1, 1, 1, durable_step=2)), "one of them is durable: its slot will soon be free"
    assert made.on_save(6, host_word=full).action == "hold"
    assert waits(8, host(1, 1, 1, durable_step=2)), "the one before has none"
