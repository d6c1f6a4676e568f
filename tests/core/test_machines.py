"""The small machines: log, retention, slots, trainer, host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raystate.core.errors import BarrierTimeoutError, StepOrderError
from raystate.core.host import applies, carried_on, grant, is_discarded, is_granted, summarize
from raystate.core.log import claim_entry, key_of, live_steps, next_entry, published_steps, refuse_retire, refuse_save
from raystate.core.messages import (
    Advice,
    Failure,
    HostId,
    HostWord,
    Intent,
    Invalidate,
    LiveStep,
    LogEntry,
    Proposal,
    Staged,
    TrainerWord,
)
from raystate.core.retention import choose_retired, keep_newest
from raystate.core.slots import SlotView, reusable
from raystate.core.trainer import Trainer

# ---------------------------------------------------------------- log


def entry(*steps: int, intents: tuple[Intent, ...] = (), attempt: int = 1) -> LogEntry:
    live = tuple(LiveStep(step=step, save=f"k{step}") for step in steps)
    return LogEntry(seq=7, attempt=attempt, writer="w", kind="commit", run="r", live=live, intents=intents)


def test_first_claim_adopts_what_stock_orbax_wrote():
    first = claim_entry(None, "w", "r", [30, 10])
    assert (first.seq, first.attempt, first.kind) == (1, 1, "claim")
    assert [(one.step, one.save) for one in first.live] == [(10, None), (30, None)]


def test_claim_keeps_state_and_does_not_revive_a_step_being_retired():
    retire = Intent(kind="retire", step=1, save="k1", attempt=1, seq=7)
    claim = claim_entry(entry(2, intents=(retire,)), "x", "r", [1, 2, 3])
    assert (claim.seq, claim.attempt, live_steps(claim), claim.intents) == (8, 2, (2, 3), (replace(retire, carriers=(1, 2)),))


def test_commit_and_retire_in_one_entry_and_the_next_closes_what_is_carried_out():
    made = next_entry(
        entry(1, 2),
        attempt=1,
        writer="w",
        carried=(),
        dead=(),
        commit=LiveStep(step=3, save="k3"),
        retires=[(1, False, "old")],
        reason="x",
    )
    assert live_steps(made) == (2, 3)
    assert [(one.kind, one.step, one.seq) for one in made.intents] == [("retire", 1, 8), ("commit", 3, 8)]
    assert published_steps(made) == (2,)
    carried = {key_of(one) for one in made.intents if one.kind == "commit"}
    assert published_steps(made, carried) == (2, 3)
    closed = next_entry(made, attempt=1, writer="w", carried=carried, dead=(), reason="close")
    assert (closed.kind, [one.kind for one in closed.intents]) == ("close", ["retire"])


def test_a_superseded_attempts_intent_stays_open_until_it_is_known_dead():
    commit = Intent(kind="commit", step=2, save="k2", attempt=1, seq=7)
    claim = claim_entry(entry(2, intents=(commit,)), "x", "r")
    carried = {key_of(commit)}
    open_still = next_entry(claim, attempt=2, writer="x", carried=carried, dead=(), reason="")
    assert open_still.intents == (replace(commit, carriers=(1, 2)),)
    assert "attempt 1" in (refuse_retire(claim, 2, attempt=2, carried=carried) or "")
    assert refuse_retire(claim, 2, attempt=2, carried=carried, dead=(1,)) is None
    assert next_entry(claim, attempt=2, writer="x", carried=carried, dead=(1,), reason="").intents == ()


def test_a_number_is_not_saved_while_its_retirement_is_open():
    retire = Intent(kind="retire", step=2, save="k2", attempt=1, seq=7)
    claim = claim_entry(entry(intents=(retire,)), "x", "r")
    assert "assume-dead 1" in (refuse_save(claim, 2, attempt=2, carried={key_of(retire)}) or "")
    assert refuse_save(claim, 2, attempt=2, carried={key_of(retire)}, dead=(1,)) is None
    assert refuse_save(entry(2), 2, attempt=1) == "step 2 is committed already"


def test_whoever_inherits_an_open_retire_may_be_late_with_it_too():
    """Found by schedule 55829: attempt 3 finished attempt 1's retire again, after attempt 4 had saved the step anew."""
    retire = Intent(kind="retire", step=2, save="k2", attempt=1, seq=7)
    carried = {key_of(retire)}
    second = claim_entry(entry(intents=(retire,)), "x", "r", dead=(1,))
    assert [one.carriers for one in second.intents] == [(2,)]
    third = claim_entry(second, "y", "r")
    assert [one.carriers for one in third.intents] == [(2, 3)]
    assert "assume-dead 2" in (refuse_save(third, 2, attempt=3, carried=carried) or "")
    fourth = claim_entry(third, "z", "r", dead=(3,))
    assert [one.carriers for one in fourth.intents] == [(2, 4)]
    assert "of attempt 2 " in (refuse_save(fourth, 2, attempt=4, carried=carried) or "")
    assert refuse_save(fourth, 2, attempt=4, carried=carried, dead=(2,)) is None


def test_entries_survive_json():
    one = entry(1, intents=(Intent(kind="retire", step=1, save=None, attempt=1, seq=7, aside=True, carriers=(1, 2)),))
    assert LogEntry.from_json(one.to_json()) == one


# ---------------------------------------------------------------- retention


def live(*steps: int) -> list[LiveStep]:
    return [LiveStep(step=step, save="k") for step in steps]


def test_retention_takes_what_the_policy_does_not_keep():
    steps = live(1, 2, 3, 4, 5, 6)
    assert [one[0] for one in choose_retired(steps, keep_newest(2))] == [1, 2, 3, 4]
    assert [one[0] for one in choose_retired(steps, lambda _: [3])] == [1, 2, 4, 5]
    assert [one[0] for one in choose_retired(steps, keep_newest(1), in_use={2})] == [1, 3, 4, 5]
    assert choose_retired(steps, keep_newest(None)) == []
    assert choose_retired([], keep_newest(1)) == []


def test_retention_never_takes_the_newest():
    assert [one[0] for one in choose_retired(live(5, 6), lambda _: [])] == [5]


# ---------------------------------------------------------------- slots


def slot(index: int, lineage: str = "", step: int = 0, **more: object) -> SlotView:
    content = Staged(rank=0, world=1, lineage=lineage, step=step, layout="L", durable=False) if lineage else None
    return SlotView(set_index=0, slot_index=index, content=content, **more)  # type: ignore[arg-type]


def free(slots: list[SlotView], advice: Advice | None) -> list[int]:
    return [index for _, index, _ in reusable(slots, advice)]


def test_slots_are_free_by_stable_dead_and_lineage():
    slots = [slot(0, "1.2.x", 4), slot(1, "1.2.x", 5), slot(2, "1.2.x", 6), slot(3, "1.1.x", 9), slot(4), slot(5, "1.3.x", 1)]
    advice = Advice(attempt=1, seq=1, lineage="1.2.x", decided=True, stable=5)
    assert free(slots, None) == [4]
    assert free(slots, Advice(attempt=1, seq=1, lineage="")) == [4]
    assert free(slots, advice) == [0, 3, 4]
    assert free(slots, Advice(attempt=1, seq=1, lineage="1.2.x", decided=True, dead=(6,), keep=(("1.1.x", 9),))) == [2, 4]


def test_older_lineages_stay_until_it_is_decided_what_the_new_one_restores():
    """Schedule 92980: a host gave up step 2, which it had not reported yet, because the new group's advice kept only step 1."""
    slots = [slot(0, "1.1.x", 1), slot(1, "1.1.x", 2), slot(2)]
    undecided = Advice(attempt=1, seq=1, lineage="1.2.x", keep=(("1.1.x", 1),))
    assert free(slots, undecided) == [2]
    assert free(slots, replace(undecided, decided=True)) == [1, 2]


def test_granted_and_held_slots_are_never_free():
    advice = Advice(attempt=1, seq=1, lineage="1.2.x", decided=True, stable=50)
    assert free([slot(0, "1.2.x", 4, granted=True), slot(1, "1.2.x", 4, holds=1), slot(2, granted=True)], advice) == []


# ---------------------------------------------------------------- trainer


def host(*grants: int, **more: object) -> HostWord:
    return HostWord(grants=grants or (1, 1, 1), **more)  # type: ignore[arg-type]


def trainer(**more: object) -> Trainer:
    made = Trainer(0, 2, "1.1.x", **more)  # type: ignore[arg-type]
    made.restored(0)
    return made


def test_durable_is_the_first_save_at_or_after_each_multiple():
    made = trainer(save_every_steps=10, snapshot_every=0)
    durable = [step for step in range(3, 60, 4) if made.on_save(step, host_word=host(), stager_busy=False).durable]
    assert durable == [11, 23, 31, 43, 51]
    later = Trainer(0, 2, "1.1.x", save_every_steps=10)
    later.restored(23)
    assert later.on_save(30, host_word=host()).durable


def test_slots_are_used_one_by_one_and_then_skipped():
    made = trainer()
    word = host(1, 1)
    first, second = made.on_save(1, host_word=word), made.on_save(2, host_word=word)
    assert (first.action, first.slot, second.slot) == ("stage", 0, 1)
    assert second.word.pending == (1, 2)
    third = made.on_save(3, host_word=word)
    assert (third.action, third.durable) == ("skip", False)
    made.staged(0, 1)
    assert made.word().done == (1, 0, 0)
    assert made.on_save(4, host_word=word).action == "skip"
    assert made.on_save(5, host_word=host(2, 1)).slot == 0


def test_durable_without_a_slot_is_held_and_gets_the_next_one():
    made = trainer(save_every_steps=2)
    held = made.on_save(2, host_word=host(0, 0, 0))
    assert (held.action, held.durable, held.word.pending, held.word.durable_due) == ("hold", True, (2,), (2,))
    replaced = made.on_save(4, host_word=host(0, 0, 0))
    assert (replaced.action, replaced.dropped) == ("hold", 2)
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
    assert (forced.action, forced.durable) == ("stage", True)
    assert made.on_save(5, force=True, host_word=host()).durable is False
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
    assert (last.action, last.durable, last.stop) == ("stage", True, True)
    assert made.reached(5, host(proposal=proposal("confirmed"))) == (True, False)


def test_stop_is_refused_when_its_step_is_reached_and_gone_when_withdrawn():
    made = trainer()
    refused = made.on_save(5, host_word=host(proposal=proposal("proposed")))
    assert (refused.word.ack_id, refused.word.ack_ok, refused.word.ack_step) == (1, False, 5)
    made.on_save(6, host_word=host(proposal=proposal("proposed", 9, 2)))
    assert made.on_save(9, host_word=host(proposal=proposal("withdrawn", 9, 2))).wait is False


def test_grants_of_the_trainer_before_are_void():
    made = Trainer(0, 1, "1.2.x", grants=(3, 4, 5))
    made.restored(0)
    assert made.on_save(1, host_word=host(3, 4, 5)).action == "skip"
    assert made.on_save(2, host_word=host(3, 5, 5)).slot == 1


# ---------------------------------------------------------------- host


def test_a_granted_slot_is_not_reported():
    word = TrainerWord(lineage="1.2.x", rank=0, world=1, newest_step=6, done=(1, 0, 0))
    assert is_granted((1, 1, 0), word, 1)
    assert not is_granted((1, 1, 0), word, 0)
    assert not is_granted((1, 1, 0), None, 1)
    views = [slot(0, "1.2.x", 5), slot(1, "1.2.x", 4, granted=True)]
    summary = summarize(HostId("a"), "i", 1, views, [word])
    assert [one.step for one in summary.staged] == [5]
    assert summary.trainers[0].newest_step == 6


def test_grants_go_to_living_trainers():
    views = [slot(0), SlotView(set_index=1, slot_index=0)]
    assert grant({0: (1, 1, 1), 1: (4, 4, 4)}, views, None, [1]) == {1: (5, 4, 4)}


def test_discarding_spares_the_choice_and_what_comes_after():
    order = Invalidate(host=HostId("a"), lineage="1.1.x", step=5, by="1.3.x", attempt=1, seq=2)
    kept = [("1.1.x", 5), ("1.1.x", 4), ("1.3.x", 9), ("1.4.x", 1)]
    assert not any(is_discarded(order, *one) for one in kept)
    assert all(is_discarded(order, *one) for one in [("1.1.x", 6), ("1.2.x", 5), ("1.2.x", 3)])
    assert applies(order, None)
    assert not applies(order, order)


def test_a_proposal_is_not_forgotten_with_new_advice():
    old = Advice(attempt=1, seq=9, lineage="x", proposal=proposal("confirmed"))
    assert carried_on(Advice(attempt=2, seq=1, lineage="x"), old).proposal == old.proposal
