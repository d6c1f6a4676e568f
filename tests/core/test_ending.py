"""Flush, delete, close, release."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from raystate.core.formats.entries import DELETE, Fact
from raystate.core.formats.messages import (
    Answer,
    Ask,
    BuildPackage,
    DeleteAsked,
    Failure,
    Finish,
    FlushReply,
    HostId,
    Joined,
    LeaveAsked,
    LeaveReply,
    Packaged,
    SnapshotId,
    Staged,
    Tick,
)
from raystate.waits import HEARD_S
from tests.core.driver import Driver, adopted, history, running


def test_flush_waits_for_what_was_promised():
    driver = running()
    driver.auto = False
    driver.stage(2, promised=True)
    driver.flush(0, driver.key(2))
    assert driver.replies(FlushReply) == []
    driver.auto = True
    driver.write()
    assert driver.replies(FlushReply) == [FlushReply(durable_step=2)]


def test_a_new_coordinator_hears_all_hosts_before_it_ends_a_run():
    """The model's seed 12677: after a restore from memory the trainers had said nothing yet that could be missing."""
    driver = adopted(3)
    driver.hold(0, 5)
    mine = replace(driver.staged["a"][0], rank=1)
    driver.numbers.clear()
    driver.leave(driver.key(5))
    assert driver.replies(LeaveReply) == []
    driver.staged["b"] = [mine]
    driver.word(1, 5)
    assert driver.replies(LeaveReply) == [LeaveReply(step=5), LeaveReply(step=5)]


def test_delete_keeps_the_newest():
    driver = running(keep_last=None)
    driver.stage(1, promised=True)
    driver.stage(2, promised=True)
    driver.delete(2)
    assert driver.replies(Failure)[-1].error == "StorageError"
    driver.delete(9)
    assert driver.replies(Failure)[-1].error == "StepNotFoundError"
    driver.delete(1)
    driver.delete(1)
    assert driver.replies(FlushReply) == [FlushReply(durable_step=2)] * 2
    assert [one.step for one in driver.orders("retire")] == [1]


def deleting(driver: Driver, step: int) -> str:
    """What delete() of a step says at once: "done", an error's name, or "" if it waits."""
    ask = driver.ask()
    driver.send(DeleteAsked(ask=ask, step=step))
    [reply] = [one.reply for one in driver.out if isinstance(one, Answer) and one.ask == ask] or [None]
    return "done" if isinstance(reply, FlushReply) else reply.error if isinstance(reply, Failure) else ""


def four_durable_of_which_one_was_deleted() -> Driver:
    driver = running(keep_last=None)
    for step in (1, 2, 3, 4):
        driver.stage(step, promised=True)
    assert deleting(driver, 3) == deleting(driver, 3) == "done", "every process of a loop asks"
    return driver


def test_a_number_that_is_saved_again_after_a_rollback_is_not_deleted_any_more():
    """delete() said that it had removed a step that was promised, and became durable later."""
    driver = four_durable_of_which_one_was_deleted()
    driver.restore()
    assert deleting(driver, 3) == "done", "it lies behind: nobody saves it again"
    driver.restore(step=2, rollback=True)
    assert deleting(driver, 4) == deleting(driver, 3) == "StepNotFoundError", "both were rolled back"
    driver.auto = False
    driver.stage(3, promised=True)
    assert deleting(driver, 3) == "StepNotFoundError", "it is promised, and not durable yet"


def test_a_deleted_number_that_was_committed_again_has_to_be_deleted_again():
    driver = four_durable_of_which_one_was_deleted()
    driver.restore(step=2)
    driver.stage(3, promised=True)
    assert {3, 4} <= driver.core.journal.live.keys()
    assert deleting(driver, 3) == "done"
    driver.restore(step=2, rollback=True)
    driver.stage(3, promised=True)
    driver.restore(step=2, rollback=True)
    assert deleting(driver, 3) == "StepNotFoundError"


def test_a_new_coordinator_tells_a_deleted_step_from_a_promise_of_that_number():
    """The log has the delete, and nothing yet of the step that was saved with this number again."""

    def inherits(lineage: str) -> Driver:
        tail = replace(history(1, 2), retired=(Fact(SnapshotId(lineage, 3), DELETE),))
        driver = adopted(tail=tail)
        driver.auto = False
        driver.stage(3, promised=True)
        return driver

    assert deleting(inherits("1.0.x"), 3) == "StepNotFoundError"
    assert deleting(inherits("1.1.x"), 3) == "done", "it still lies in memory, from before the delete"


def test_leaving_makes_the_newest_step_durable_and_closes_the_log():
    driver = running()
    driver.stage(3)
    driver.leave(driver.key(3))
    assert driver.replies(LeaveReply) == [LeaveReply(step=3), LeaveReply(step=3)]
    assert driver.take(Finish)
    assert driver.core.tail is not None
    assert driver.core.tail.intents == ()


def test_a_close_that_fails_names_every_promise():
    """Whoever takes the error for the end must not miss what else was lost."""
    driver = running()
    driver.auto = False
    for step in (1, 3):
        driver.hold(0, step, promised=True)
    driver.stage(2, promised=True)
    driver.say(3)
    driver.leave(driver.key(3), *(driver.key(step) for step in (1, 2, 3)))
    failure = driver.replies(Failure)[-1]
    assert failure.details["step"] == 3
    assert re.findall(r"(?:^|; )step (\d)\b", failure.message) == ["3", "1", "2"], failure.message


def mistaken(driver: Driver) -> None:
    """The step that is being written differs between ranks."""
    driver.write()
    driver.send(Packaged(save=driver.take(BuildPackage)[0].save, error="state/w differs between ranks", hopeless=True))


def test_a_mistake_of_the_caller_is_what_flush_and_close_fail_with():
    driver = running()
    driver.auto = False
    driver.stage(2, promised=True)
    mistaken(driver)
    driver.flush(0, driver.key(2))
    assert driver.replies(Failure)[-1] == Failure(error="ConfigError", message="state/w differs between ranks", details={"step": 2})
    driver.stage(3)
    driver.leave(driver.key(3))
    mistaken(driver)
    failure = driver.replies(Failure)[-1]
    assert (failure.error, failure.details["step"]) == ("ConfigError", 3)
    assert driver.take(Finish) == []


def test_a_flush_that_fails_with_a_mistake_names_every_promise():
    """The others counted as told, and nobody named them ever after."""
    driver = running()
    driver.auto = False
    driver.hold(0, 1, promised=True)
    driver.word(1, 1)
    driver.stage(2, promised=True)
    mistaken(driver)
    driver.flush(0, driver.key(1), driver.key(2))
    (failure,) = driver.replies(Failure)
    assert failure.error == "ConfigError"
    assert failure.message == "state/w differs between ranks; step 1: rank 1 (host b) has no copy of it, and newer steps came"


def test_why_a_copy_is_gone_is_not_said():
    """An earlier Coordinator saw all copies of step 5, and let one of them give way: the new one said that the rank had skipped it."""
    driver = adopted(3)
    driver.hold(0, 5, promised=True)
    driver.stage(6)
    driver.leave(driver.key(6), driver.key(5))
    (reply, _) = driver.replies(LeaveReply)
    assert reply.errors == ("step 5: rank 1 (host b) has no copy of it, and newer steps came",)
    assert not reply.newest_lost


class Mistaken(Driver):
    """Its ranks hold different values of a leaf: no package can be built."""

    def packaged(self, command: BuildPackage, **more: Any) -> Packaged:
        return Packaged(save=command.save, error="state/w differs between ranks", hopeless=True)


def test_a_mistake_of_the_caller_is_not_what_the_next_start_goes_on_from():
    driver = Mistaken()
    driver.join(["a", "b"])
    driver.restore()
    driver.stage(3)
    driver.release("the script has failed")
    assert driver.replies(LeaveReply) == [LeaveReply(step=-1)]
    assert driver.take(Finish)


def test_leaving_falls_back_when_nothing_was_promised():
    driver = running()
    driver.stage(2)
    driver.hold(0, 3)
    driver.word(1, 3)
    driver.leave(driver.key(3))
    assert driver.replies(LeaveReply)[-1].step == 2


def test_a_release_goes_on_when_the_failed_rank_has_said_its_last_word():
    """The rank's group has ended by then: its last word counts all the same, and is not waited for until the deadline."""
    driver = running()
    driver.hold(0, 3)
    driver.exits(0)
    last = driver.numbers.get(0, 0) + 1
    driver.release("failed", lineage=driver.lineage, rank=0, word=last)
    driver.hold(1, 3)
    assert driver.replies(LeaveReply) == []
    driver.word(0, 3)
    assert [reply.step for reply in driver.replies(LeaveReply)] == [3]


def half_away() -> Driver:
    """Step 2 is durable. The HostActor of rank 1 has the last step, and is away."""
    driver = running(host_timeout_s=10.0)
    driver.stage(2, promised=True)
    driver.hold(1, 3, promised=True)
    driver.word(1, 4)
    driver.auto = False  # nobody answers for the new one
    driver.live(12.0, "a")
    driver.auto = True
    return driver


def test_a_close_waits_for_the_host_that_has_the_rest_of_the_last_step():
    driver = half_away()
    driver.hold(0, 3, promised=True)
    driver.leave(driver.key(3), driver.key(3))
    driver.tick(0.1)
    assert driver.replies(Failure) == []
    driver.host_up("b", "i2")
    assert [(reply.step, reply.errors) for reply in driver.replies(LeaveReply)] == [(3, ())] * 2


@pytest.mark.parametrize("newest", [3, 5])
def test_a_close_is_judged_by_its_newest_step(newest: int):
    """No rank has a copy of step 4, which was promised: step 5 makes up for it, step 3 does not."""
    driver = running()
    driver.stage(newest, promised=True)
    driver.say(5)
    lost, last = driver.key(4), driver.key(max(newest, 4))
    for rank in (0, 1):
        promised, broken = (driver.key(newest),), ((lost, "no slot"),)
        asked = LeaveAsked(
            ask=driver.ask(),
            lineage=driver.lineage,
            rank=rank,
            last=last,
            promised=promised,
            broken=broken,
            word=driver.numbers[rank],
        )
        driver.send(asked)
    replies = driver.replies(LeaveReply)
    assert [(reply.step, reply.newest_lost) for reply in replies] == [(newest, newest < 4)] * 2
    assert all(text.startswith("step 4: ") for reply in replies for text in reply.errors)
    assert driver.core.tail is not None
    assert [key.step for key, _ in driver.core.tail.given_up] == [4]


def test_a_close_does_not_wait_for_a_host_without_end():
    driver = half_away()
    driver.hold(0, 3, promised=True)
    driver.leave(driver.key(3), driver.key(3))
    for _ in range(40):
        driver.tick(1.0)
        driver.report("a")
    assert {failure.error for failure in driver.replies(Failure)} == {"StorageError"}


@pytest.mark.parametrize("back", [True, False])
def test_a_release_waits_a_while_for_a_host_that_is_away(back: bool):
    driver = half_away()
    driver.hold(0, 3, promised=True)
    driver.all_die()
    driver.release()
    driver.report("a")
    assert driver.replies(LeaveReply) == []
    if back:
        driver.host_up("b", "i2")
    for _ in range(12):
        driver.tick(1.0)
        driver.report("a")
    (reply,) = driver.replies(LeaveReply)
    assert (reply.step, bool(reply.errors)) == ((3, False) if back else (2, True))


def test_a_close_does_not_overtake_a_release():
    """A new Coordinator that has heard of no trainer is asked for the release by one that has failed, and then for a close by another."""
    driver = adopted(3)
    driver.release("rank 1 failed")
    driver.leave(None, ranks=[0])
    [refused] = driver.replies(Failure)
    assert refused.error == "StaleAttemptError" and "rank 1 failed" in refused.message
    driver.report_both()
    assert driver.replies(LeaveReply) == [LeaveReply(step=3)]
    assert driver.take(Finish)


def test_a_close_overtakes_the_release_of_a_run_that_seemed_idle():
    driver = adopted(3, idle_timeout_s=60.0)
    driver.tick(61.0)
    assert driver.core.leaving.is_settled
    driver.leave(SnapshotId("", 3))
    driver.say(3)
    assert driver.replies(LeaveReply) == [LeaveReply(step=3)] * 2


def test_a_close_of_a_lineage_that_was_replaced_is_answered():
    """It was interrupted in its wait; unanswered for ever, it would keep a rank that hangs from being seen."""
    driver = running()
    driver.stage(3, promised=True)
    driver.leave(driver.key(3), ranks=[0])
    driver.restore()
    driver.leave(driver.key(3), ranks=[0])
    [refused] = driver.replies(Failure)
    assert (refused.error, refused.details["replaced"]) == ("StaleAttemptError", True)
    driver.leave(driver.key(3), ranks=[1])
    assert len(driver.replies(LeaveReply)) == 2


def test_who_joins_while_the_run_ends_waits_for_the_next_coordinator():
    """Found by the model of the public API, seed 57: the run was released under a new worker group's feet."""
    driver = running()
    driver.stage(2, promised=True)
    driver.write()
    driver.auto = False
    driver.leave(driver.key(2), driver.key(2))
    assert driver.core.leaving.phase == "closing"
    driver.send(Joined(ask=Ask("new"), group="h", rank=0, world=2, host=HostId("a")))
    [refused] = driver.replies(Failure)
    assert (refused.error, refused.details) == ("StaleAttemptError", {"released": True})
    driver.auto = True
    driver.tick(1000.0)
    assert driver.core.finished
    driver.send(Joined(ask=Ask("again"), group="h", rank=0, world=2, host=HostId("a")))
    assert driver.replies(Failure)[-1].details == {"released": True}


def test_a_trainer_that_has_just_joined_is_a_sign_of_life():
    driver = running(idle_timeout_s=60.0)
    driver.tick(59.0)
    driver.auto = False  # no host reports for a while
    driver.send(Joined(ask=Ask("j"), group="h", rank=0, world=2, host=HostId("a")))
    driver.tick(100.0)
    assert driver.core.leaving.phase == "open"


def test_what_nobody_trains_any_more_becomes_durable_under_a_new_coordinator():
    """All trainers and their Coordinator were killed: the next one, which has never heard of a trainer, waited for answers to a question
    that it had not sent, took the hosts for dead, and released the run without the newest step."""
    driver = Driver(tail=history(3), dead=(1,), hosts=("a", "b"), idle_timeout_s=60.0, host_timeout_s=10.0)
    for rank, host in enumerate("ab"):
        driver.advised[host] = (1, 7)  # by the attempt before
        driver.staged[host] = [Staged(rank=rank, world=2, lineage="1.1.x", step=5, layout="L", promised=False)]
    for _ in range(70):
        driver.now_s += 1.0
        driver.report_both()
        driver.send(Tick())
    assert driver.core.journal.published == (3, 5)
    assert driver.take(Finish)


@pytest.mark.parametrize("held", ["nothing", "half a step", "a step"])
def test_a_run_without_a_step_lets_go_when_its_trainers_are_gone(held: str):
    """A script that is killed before its first step leaves two actors, and an hour of debugging as many as fill the machine."""
    driver = running()
    if held != "nothing":
        driver.hold(0, 1)
    if held == "a step":
        driver.hold(1, 1)
    driver.all_die()
    driver.live(HEARD_S - 2.0)
    assert driver.take(Finish) == [], "its launcher may start it again"
    driver.live(5.0)
    assert [one.reason for one in driver.take(Finish)] == (
        [] if held == "a step" else ["its trainers are gone, and it has no step"]
    )


def test_a_run_whose_trainers_have_not_come_yet_does_not_let_go():
    driver = Driver()
    driver.host_up("a")
    driver.live(3 * HEARD_S, "a")
    assert driver.take(Finish) == []
