"""The log as pure functions, and retention."""

from __future__ import annotations

from dataclasses import replace

from raystate.core.coordinator.retention import choose_retired
from raystate.core.formats.entries import DELETE, MOST_FACTS, Fact, deleted_steps, lost_saves, newest_facts
from raystate.core.formats.log import claim_entry, key_of, live_steps, next_entry, published_steps, refuse_retire, refuse_save
from raystate.core.formats.messages import (
    Intent,
    LiveStep,
    LogEntry,
    SnapshotId,
)
from tests.steps import keep_newest


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


def test_of_many_steps_an_error_says_how_many_there_are():
    assert refuse_retire(entry(), 2, attempt=1) == "there is no durable step 2"
    assert refuse_retire(entry(*range(3, 13)), 2, attempt=1) == f"there is no durable step 2; there are {list(range(3, 13))}"
    told = refuse_retire(entry(*range(3, 14)), 2, attempt=1)
    assert told == f"there is no durable step 2; there are 11, the newest: {list(range(4, 14))}"


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


def live(*steps: int) -> list[LiveStep]:
    return [LiveStep(step=step, save="k") for step in steps]


def test_retention_takes_what_the_policy_does_not_keep():
    steps = live(1, 2, 3, 4, 5, 6)
    assert [one[0] for one in choose_retired(steps, keep_newest(2)(steps))] == [1, 2, 3, 4]
    assert [one[0] for one in choose_retired(steps, [3])] == [1, 2, 4, 5]
    assert [one[0] for one in choose_retired(steps, keep_newest(1)(steps), in_use={2})] == [1, 3, 4, 5]
    assert choose_retired(steps, keep_newest(None)(steps)) == []
    assert choose_retired([], []) == []


def test_retention_never_takes_the_newest():
    assert [one[0] for one in choose_retired(live(5, 6), [])] == [5]


def facts(*steps: int, why: str = "retention", lineage: str = "1.1.x") -> tuple[Fact, ...]:
    return tuple(Fact(SnapshotId(lineage, step), why) for step in steps)


def test_a_step_stays_deleted_until_its_number_is_committed_again():
    assert deleted_steps(replace(entry(1, 4), retired=(*facts(3, why=DELETE), *facts(2)))).keys() == {3}
    assert deleted_steps(replace(entry(1, 3, 4), retired=facts(3, why=DELETE))) == {}


def test_an_entry_says_what_it_retires_and_what_was_given_up():
    tail = replace(entry(1, 2), retired=facts(0), given_up=facts(1, why="the disk was full"))
    live = {one.step: one for one in tail.live}
    new = next_entry(
        tail,
        attempt=1,
        writer="w",
        carried=(),
        dead=(),
        retires=[(1, False, "retention"), (2, True, "damaged")],
        given_up=facts(3, why="slow"),
        reason="r",
    )
    assert new.retired == (Fact(live[1].snapshot, "retention"), *facts(0)), "oldest first: the lineage of step 1 isn't known"
    assert new.given_up == (*facts(1, why="the disk was full"), *facts(3, why="slow"))
    claim = claim_entry(new, "w2", "run")
    assert (claim.retired, claim.given_up) == (new.retired, new.given_up)
    assert LogEntry.from_json(claim.to_json()) == claim


def test_an_entry_keeps_the_newest_saves_of_a_kind():
    newest = newest_facts(facts(*range(MOST_FACTS)), (*facts(MOST_FACTS), *facts(5, why="other")))
    assert [one.snapshot.step for one in newest] == [*range(1, MOST_FACTS + 1)]
    assert newest[4] == facts(5, why="other")[0], "the last word on a save counts"


def test_a_save_is_lost_unless_another_try_or_a_later_lineage_has_its_step():
    def lost(**kept: tuple[Fact, ...]) -> list[int]:
        return [one.snapshot.step for one in lost_saves(replace(entry(), given_up=facts(3, lineage="1.2.x"), **kept))]

    assert lost() == lost(retired=facts(2, lineage="1.2.x")) == lost(retired=facts(3, lineage="1.1.x")) == [3]
    assert lost(retired=facts(3, lineage="1.2.x")) == lost(retired=facts(3, lineage="2.3.y")) == []
