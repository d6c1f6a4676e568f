"""Which step a group restores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raystate.core.formats.messages import (
    Answer,
    Append,
    Appended,
    Ask,
    CarriedOut,
    CarryOut,
    Failure,
    FlushReply,
    HostId,
    Invalidate,
    RestoreChoice,
    RestoreSettled,
    RestoreTried,
    SnapshotId,
    TrainerWord,
    Write,
)
from raystate.core.formats.orders import MOST_OLDER
from tests.core.driver import AB, Driver, adopted, history, running


def test_memory_is_chosen_when_it_is_newer_or_equal():
    driver = running()
    driver.stage(2, promised=True)
    first = driver.lineage
    driver.join(AB, "h")
    choice = driver.restore()
    assert (choice.tier, choice.step, choice.lineage) == ("memory", 2, first)
    driver.stage(3)
    second = driver.lineage
    driver.join(AB, "i")
    assert (driver.restore().step, driver.replies(RestoreChoice)[-1].lineage) == (3, second)


def test_storage_is_chosen_when_memory_is_older():
    driver = Driver(tail=history(5), dead=(1,))
    driver.world, driver.lineage, driver.host_of = 2, "1.1.x", {0: "a", 1: "b"}
    driver.stage(4)
    driver.join(AB, "h")
    choice = driver.restore()
    assert (choice.tier, choice.step, choice.save) == ("storage", 5, "a1k5")
    assert driver.replies(RestoreSettled)


def test_lineages_are_never_mixed():
    driver = running()
    driver.stage(1)
    driver.hold(0, 2)
    driver.join(AB, "h")
    driver.restore()
    driver.hold(1, 2)  # rank 1 of the new lineage; rank 0's step 2 is of the old one
    driver.join(AB, "i")
    choice = driver.restore()
    assert choice.step == 1


def test_what_a_restore_gave_up_is_not_believed_when_a_host_comes_back():
    driver = running(host_timeout_s=5.0)
    driver.stage(1, promised=True)
    driver.stage(7)
    old = {host: list(staged) for host, staged in driver.staged.items()}
    for host in AB:
        driver.lose(host, "cut")
    driver.join(["c"], "h")
    assert driver.restore().tier == "storage"
    driver.staged.update(old)
    driver.auto = False
    driver.report_both()
    assert driver.core.memory.candidates() == []
    assert {one.host for one in driver.take(Invalidate)} >= {"a", "b"}


def test_what_was_promised_before_several_restores_in_a_row_becomes_durable():
    """Storage takes nothing meanwhile. Each group goes on from what the one before it had in memory: they are one past."""
    driver = running(keep_last=None)
    obey = driver._obey
    driver._obey = lambda command: None if isinstance(command, Write) else obey(command)
    promised = []
    for step in (2, 4, 6):
        driver.stage(step - 1)  # a later one of the same group, that nobody goes on from, is given up
        driver.stage(step, promised=True)
        promised.append(driver.key(step))
        driver.join(AB, f"after {step}")
        assert driver.restore().step == step
    assert [driver.core.saves.fate(key)[0] for key in promised] == [None] * 3
    assert {key.step for key in driver.advice().keep} >= {2, 6}
    driver._obey = obey
    for _ in range(8):
        driver.tick(20.0)
        driver.report_both()
    assert list(driver.core.journal.live) == [2, 4, 6]
    assert [driver.core.saves.fate(key) for key in promised] == [(True, "")] * 3


def test_a_late_word_of_a_discard_does_not_count_for_the_next_of_the_same_step():
    """The host still held what the next restore gave up, and was not told again: a new Coordinator would have believed it."""
    driver = running()
    driver.stage(4)
    driver.join(AB, "second")
    driver.take(Invalidate)
    assert driver.restore().step == 4
    (first,) = [one for one in driver.take(Invalidate) if one.host == "b"]
    driver.stage(5)  # nobody goes on from it
    driver.join(AB, "third")
    driver.auto = False
    driver.out.clear()
    driver.ask_all(step=4)
    for host in AB:
        driver.advised[host] = (1, driver.advice().seq)
        driver.report(host)
    driver.tried(driver.replies(RestoreChoice)[-1])
    orders = {one.host: one for one in driver.take(Invalidate)}
    assert (orders[HostId("b")].lineage, orders[HostId("b")].step) == (first.lineage, 4)
    for one in (orders[HostId("a")], first):
        driver.restores[one.host] = one
        driver.report(one.host)
    assert driver.replies(RestoreSettled) == []
    driver.tick(5.0)
    assert [one.host for one in driver.take(Invalidate)] == ["b"], "its order may be lost"
    driver.restores["b"] = orders[HostId("b")]
    driver.report("b")
    assert len(driver.replies(RestoreSettled)) == 2


def test_one_past():
    def then(order: Invalidate, by: str, lineage: str, step: int) -> Invalidate:
        return Invalidate(
            host=HostId("a"), lineage=lineage, step=step, by=by, older=order.before(lineage), attempt=1, seq=order.seq + 1
        )

    first = Invalidate(host=HostId("a"), lineage="1.1.x", step=4, by="1.2.y", attempt=1, seq=1)
    second = then(first, "1.4.z", "1.2.y", 8)
    assert second.older == (("1.1.x", 4),)
    assert all(second.spares(*one) for one in [("1.1.x", 4), ("1.1.x", 2), ("1.2.y", 8), ("1.4.z", 9), ("2.1.q", 1)])
    assert not any(second.spares(*one) for one in [("1.1.x", 5), ("1.2.y", 9), ("1.3.x", 6)])
    again = then(second, "1.6.w", "1.2.y", 6)  # nothing of 1.4.z had become complete
    assert again.older == (("1.1.x", 4),)
    assert not any(again.spares(*one) for one in [("1.4.z", 9), ("1.2.y", 7)])
    back = then(second, "1.6.w", "1.1.x", 2)
    assert back.older == ()
    assert not any(back.spares(*one) for one in [("1.1.x", 4), ("1.2.y", 6)])
    for other in ("", "1.3.x"):
        assert then(second, "1.6.w", other, 6).older == (), "not of this past"
    assert then(then(second, "1.6.w", "", -1), "1.8.v", "1.6.w", 3).older == ()
    for number in range(50):
        second = then(second, f"2.{number + 2}.n", second.by, number)
    assert len(second.older) == MOST_OLDER


def test_nothing_is_discarded_before_all_ranks_have_the_step():
    driver = running()
    driver.stage(2)
    driver.hold(0, 3)
    driver.join(AB, "h")
    driver.out.clear()
    driver.auto = False
    driver.ask_all()
    assert driver.replies(RestoreChoice) == []
    driver.report_both()
    choice = driver.replies(RestoreChoice)[-1]
    assert choice.step == 2 and driver.take(Invalidate) == []
    driver.tried(choice)
    orders = driver.take(Invalidate)
    assert {(one.host, one.step) for one in orders} == {("a", 2), ("b", 2)}
    assert driver.replies(RestoreSettled) == []
    driver.auto = True
    for order in orders:
        driver._obey(order)
    assert [one.step for one in driver.replies(RestoreSettled)] == [2, 2]


def test_missing_step_is_named_with_the_available_ones():
    driver = running()
    driver.stage(2, promised=True)
    driver.join(AB, "h")
    driver.ask_all(step=9)
    failure = driver.replies(Failure)[-1]
    assert (failure.error, failure.details["available"]) == ("StepNotFoundError", [2])


def test_after_a_rollback_the_newest_step_is_that_of_the_new_lineage():
    """By it the launcher sees whether a worker group gets on."""
    driver = running()
    driver.stage(2, promised=True)
    driver.stage(4, promised=True)
    old = driver.lineage
    driver.join(AB, "h")
    assert driver.core.joins.newest == 4, "a restore of the newest step there is gives up nothing"
    driver.restore(step=2, rollback=True)
    assert driver.core.joins.newest == 2
    driver.word(0, 3)
    new, driver.lineage = driver.lineage, old
    driver.word(1, 9)
    assert (driver.core.joins.newest, new != old) == (3, True), "a late report of what was given up"


def test_rollback_retires_the_newer_steps_first():
    driver = running()
    driver.stage(2, promised=True)
    driver.stage(4, promised=True)
    driver.join(AB, "h")
    driver.out.clear()
    choice = driver.restore(step=2, rollback=True)
    assert choice.step == 2
    assert [one.step for one in driver.orders("retire")] == [4]
    assert driver.core.journal.published == (2,)
    driver.stage(4, promised=True)
    assert driver.core.journal.published == (2, 4)


def test_damaged_memory_falls_to_storage_and_damaged_storage_is_set_aside():
    driver = running()
    driver.stage(2, promised=True)
    driver.stage(4, promised=True)
    driver.join(AB, "h")
    choice = driver.restore(ok=False)
    assert (choice.tier, choice.step) == ("memory", 4)
    driver.tried(choice, error="crc32c")
    choice = driver.replies(RestoreChoice)[-1]
    assert (choice.tier, choice.step) == ("storage", 4)
    driver.tried(choice, error="crc32c")
    choice = driver.replies(RestoreChoice)[-1]
    assert choice.step == 2
    assert [step for step, _ in choice.set_aside] == [4, 4]
    assert [(one.step, one.aside) for one in driver.orders("retire")] == [(4, True)]
    driver.tried(choice)
    assert driver.replies(RestoreSettled)[-1].step == 2


class Unpublished(Driver):
    """Storage takes the log's entries, and publishes nothing yet."""

    def _obey(self, command: Any) -> None:
        if not isinstance(command, CarryOut):
            super()._obey(command)


def test_a_restored_step_that_is_committed_and_not_visible_yet_is_waited_for():
    """wait_until_finished() came back before it was durable."""
    driver = Unpublished()
    driver.join(AB)
    driver.restore()
    driver.stage(1, promised=True)
    (intent,) = driver.orders("commit")
    origin, choice = driver.key(1), driver.restore()
    assert (choice.tier, choice.step) == ("memory", 1)
    settled = driver.replies(RestoreSettled)[-1]
    assert (settled.safe, settled.saving) == (False, True)
    driver.flush(0, origin)
    assert driver.replies(FlushReply) == []
    driver.send(CarriedOut(intent=intent))
    (flushed,) = driver.replies(FlushReply)
    assert (flushed.durable_step, flushed.errors, flushed.undecided) == (1, (), ())


def test_unreachable_storage_is_not_taken_for_damage():
    driver = Driver(tail=history(3, 5), dead=(1,))
    driver.join(AB)
    driver.tried(driver.restore(ok=False), error="503", damaged=False)
    assert driver.replies(Failure)[-1].error == "StorageError"
    assert driver.core.journal.published == (3, 5)


def test_nothing_left_is_an_error_and_nothing_is_set_aside():
    driver = Driver(tail=history(5), dead=(1,))
    driver.join(AB)
    driver.tried(driver.restore(ok=False), error="crc32c")
    assert driver.replies(Failure)[-1].error == "CorruptCheckpointError"
    assert driver.orders("retire") == []


def test_a_host_that_has_just_come_back_gets_time_to_report():
    """Schedule 4091: it was given up because the restore had waited long for it, and with it the newest snapshot."""
    driver = running(host_timeout_s=5.0)
    driver.stage(3)
    old = driver.seen["b"]
    driver.join(AB, "h")
    driver.auto = False
    driver.live(5.5, "a")
    driver.numbers[1] += 1  # rank 1 has written a word that nobody has read
    driver.ask_all()
    driver.tick(4.0)
    driver.report("a")
    driver.tick(2.0)
    driver.report("a")
    driver.seen["b"] = old  # it has not noticed yet that the group before is dead
    driver.report("b")
    driver.tick(0.1)
    assert driver.core.memory.hosts[HostId("b")].up
    driver.word(1, -1)
    assert driver.core.recovery.phase == "trying", "it has said what it holds, and the choice is made"


def test_a_late_word_of_the_restore_before_does_not_choose_for_the_next():
    """Schedule 9199: a new Coordinator took a doubled RestoreTried of step 3 for the outcome of the restore that was asked now."""
    driver = adopted(3)
    driver.say(3)
    driver.stage(5)
    late = RestoreTried(ask=Ask("late"), lineage="1.0.x", rank=1, step=3, begins="1.9.x", ok=True)
    driver.send(late)
    assert driver.restore().step == 5
    driver.send(late)
    driver.stage(6)
    assert driver.restore().step == 6


def test_a_late_word_of_a_restore_that_is_over_begins_none():
    """Schedule 15072: a doubled RestoreTried made a new Coordinator give up the lineage in which the rank was training."""
    driver = Driver(dead=(1,), hosts=("a",))
    driver.world, driver.lineage, driver.host_of = 1, "1.1.x", {0: "a"}
    driver.word(0, 3)
    tried = RestoreTried(ask=Ask("late"), lineage="1.1.x", rank=0, step=3, begins="1.9.x", ok=True)
    driver.hold(0, 4)
    driver.send(tried)
    assert driver.replies(Failure)[-1].error == "StaleAttemptError"
    assert driver.take(Invalidate) == []
    assert driver.advice().lineage == "1.1.x"


@pytest.mark.parametrize("bad", [{"error": "crc32c"}, {"mistaken": True, "ok": True}], ids=["damaged", "a mistake"])
def test_a_rollback_that_no_rank_can_use_costs_no_step(bad: dict[str, Any]):
    """A damaged step, or a reference that does not fit: the newer steps stay."""
    driver = Driver(tail=history(2, 4), dead=(1,), hosts=("a", "b"))
    driver.join(AB, "h")
    driver.report_both()
    choice = driver.restore(step=2, rollback=True, ok=False)
    assert (choice.tier, choice.step) == ("storage", 2)
    driver.tried(choice, **bad)
    assert driver.replies(Failure)
    assert [one.step for one in driver.orders("retire") if not one.aside] == []
    assert 4 in driver.core.journal.live


def test_a_rollback_waits_for_the_commit_that_is_being_written():
    """It can't be called back: so its step is retired with the others."""
    driver = running()
    driver.stage(2, promised=True)
    driver.hold(0, 4, promised=True)
    choice = driver.restore(step=2, rollback=True, ok=False)
    driver.appends = False
    driver.hold(1, 4, promised=True)
    driver.tried(choice)
    assert driver.replies(RestoreSettled) == [] and driver.orders("retire") == []
    driver.appends = True
    driver.send(Appended(seq=driver.take(Append)[-1].entry.seq, outcome="ok"))
    assert [one.step for one in driver.orders("retire")] == [4]
    assert [settled.step for settled in driver.replies(RestoreSettled)] == [2, 2]
    assert driver.core.journal.published == (2,)


def test_a_rank_whose_reference_does_not_fit_changes_nothing():
    """The others had restored the step all the same, and what was promised after it was given up."""
    driver = running()
    driver.stage(2)
    driver.hold(0, 3, promised=True)
    before = driver.lineage
    choice = driver.restore(ok=False)
    driver.tried(choice, mistaken=True, ok=True)
    assert [failure.error for failure in driver.replies(Failure)] == ["RaystateError"] * 2
    assert "rank 0 (host a) can't use it as it was asked for" in driver.replies(Failure)[0].message
    assert driver.take(Invalidate) == [] and driver.advice().lineage == before
    driver.hold(1, 3, promised=True)
    assert driver.core.journal.published == (3,)


# ---------------------------------------------------------------- who holds it


def made_durable(step: int) -> Driver:
    """Ranks 0 and 1 on hosts a and b have staged a step, which is durable."""
    driver = running()
    driver.stage(step, promised=True)
    driver.flush(0, driver.key(step))
    assert driver.core.journal.durable_step == step
    return driver


def test_a_choice_says_that_the_same_snapshot_is_durable():
    driver = made_durable(2)
    driver.join(AB, "h")
    assert driver.restore().stored
    driver.stage(3)
    driver.join(AB, "i")
    choice = driver.restore()
    assert (choice.tier, choice.step, choice.stored) == ("memory", 3, False)


def test_what_is_left_in_memory_of_a_durable_step_goes_with_the_choice_and_is_kept():
    driver = made_durable(2)
    held = driver.key(2)
    driver.lose("a", "cut")
    driver.join(["b", "c"], "h")
    choice = driver.restore()
    assert (choice.tier, choice.step, choice.origin) == ("storage", 2, SnapshotId("", 2))
    assert (choice.in_memory, choice.world, choice.holders, choice.stored) == (held, 2, ((1, ("b",)),), True)
    assert [one.step for one in driver.staged["b"]] == [2]


def test_what_becomes_complete_after_the_choice_is_not_called_stable():
    driver = running()
    driver.hold(0, 3)
    driver.ask_all()
    assert [one.tier for one in driver.replies(RestoreChoice)][-2:] == ["none", "none"]
    driver.hold(1, 3)
    assert driver.core.snapshots.stable == -1


def test_a_rank_that_says_again_how_its_restore_went_waits_on():
    """The model's seed 507: its own time-out went off, since all processes had stood still, and it asked once more."""
    driver = running()
    driver.stage(3)
    driver.join(AB, "h")
    driver.ask_all()
    driver.auto = False  # no host discards yet
    choice = driver.replies(RestoreChoice)[-1]
    tried = [driver.try_of(choice, rank, ok=True) for rank in (0, 1)]
    for one in (*tried, tried[0]):
        driver.send(one)
    assert not driver.replies(Failure)


def test_a_coordinator_that_dies_during_a_restore_costs_a_start():
    """What the dead one has told the other ranks is not known: they may have their outcome, and train."""
    driver = adopted(3, 5)
    driver.say(-1)
    tried = RestoreTried(ask=driver.ask(), lineage="1.1.x", rank=0, step=5, begins="1.9.x", ok=True)
    driver.send(tried)
    [failure] = driver.replies(Failure)
    assert (failure.error, failure.details["replaced"]) == ("StaleAttemptError", True)
    assert "its Coordinator has died during it" in failure.message
    driver.ask_all()  # nothing of it is left
    choice = driver.replies(RestoreChoice)[-1]
    assert choice.step == 5
    driver.send(replace(tried, ask=driver.ask()))
    assert len(driver.replies(Failure)) == 2, "the same step in another lineage"
    driver.tried(choice)
    assert [one.step for one in driver.replies(RestoreSettled)] == [5, 5]


def test_a_rank_that_asks_for_another_restore_does_not_get_the_answer_of_this_one():
    """It had its outcome from an earlier attempt, and has gone on."""
    driver = adopted(3, 5)
    driver.say(5)
    for rank in range(2):
        driver.ask_restore(rank)
    assert driver.replies(RestoreChoice)[-1].step == 5
    driver.out.clear()
    driver.numbers[1] += 1
    ask = driver.ask_restore(1, step=3)
    assert [one.ask for one in driver.out if isinstance(one, Answer)] == [ask]
    assert "rank 1" in driver.replies(Failure)[-1].message
    assert driver.replies(Failure)[-1].error == "StaleAttemptError"


def test_what_a_host_that_is_down_holds_is_not_lost():
    """Schedule 13481: a late word of a HostActor's death, which had been back, made rank 1 hear that its promise was broken."""
    driver = running(host_timeout_s=5.0)
    driver.hold(0, 7, promised=True)
    driver.word(1, 7, pending=(7,))
    driver.word(0, 8)
    driver.live(5.5, "b")
    driver.flush(1, driver.key(7))
    assert not driver.replies(FlushReply)
    driver.report("a")
    driver.hold(1, 7, promised=True)
    assert driver.replies(FlushReply)[-1].errors == ()


def test_a_word_that_is_gone_with_its_slots_does_not_take_back_what_was_said():
    driver = running(barrier_timeout_s=20.0)
    driver.word(0, 7)
    driver.word(1, 6)
    driver.seen["a"] = [TrainerWord(rank=0, world=2, lineage=driver.lineage, newest_step=-1)]  # as said at the door
    driver.report("a")
    driver.tick(21.0)
    failure = driver.advice().failure
    assert failure is not None
    assert (failure.details["missing_ranks"], failure.details["step"]) == ([1], 7)
