"""No silent wait: each deadline of the Coordinator, driven to its end. What is said names rank, node, phase and seconds."""

from __future__ import annotations

import re

import pytest

from raystate.core.formats.messages import (
    Append,
    Appended,
    Ask,
    CarriedOut,
    DeleteAsked,
    Failure,
    Finish,
    FlushReply,
    HostId,
    Joined,
    LeaveReply,
    RestoreChoice,
    StopAsked,
    TrainerExited,
    Write,
    Written,
)
from tests.core.driver import AB, Driver, running, training

LIMIT_S = 20.0


def failure(driver: Driver, phase: str, ranks: list[int] | None = None) -> str:
    """The message of the newest failure, whose facts are checked."""
    found = driver.replies(Failure)[-1]
    assert found.details["phase"] == phase
    assert found.details["waited_s"] >= LIMIT_S
    if ranks is not None:
        assert found.error == "BarrierTimeoutError"
        assert found.details["missing_ranks"] == ranks
    return found.message


def test_start():
    driver = Driver(start_timeout_s=LIMIT_S)
    driver.host_up("a")
    driver.send(Joined(ask=Ask("q"), group="g", rank=1, world=3, host=HostId("a")))
    driver.tick(21.0)
    message = failure(driver, "start", [0, 2])
    assert message == "of 3 ranks, rank 0, rank 2 did not construct a StateManager within 21.0 s; rank 1 (host a) did"


def test_a_rank_that_has_returned_is_waited_for_no_more():
    """Its launcher says so: at the start, and where it has not come to a restore or a close."""
    driver = Driver()
    driver.host_up("a")
    for rank, group in ((0, "g"), (1, "h")):  # the second is of a group that is none of this one
        driver.send(TrainerExited(host=HostId("b"), lineage=f"0.0.{group}", rank=rank, clean=True, reason="", returned=True))
    driver.send(Joined(ask=Ask("q"), group="g", rank=1, world=2, host=HostId("a")))
    driver.tick(1.0)
    assert driver.replies(Failure) == [], "it is said again"
    returns(driver, 0)
    [found] = driver.replies(Failure)
    assert (found.error, found.details["missing_ranks"], found.details["phase"]) == ("BarrierTimeoutError", [0], "start")
    assert "rank 0 did not construct a StateManager: its training function has returned" in found.message
    for ask in (lambda driver: driver.ask_restore(0), lambda driver: driver.leave(None, ranks=[0])):
        driver = running()
        returns(driver, 1)
        assert driver.replies(Failure) == []
        ask(driver)
        driver.tick(0.1)
        assert "rank 1 (host b) did not call" in driver.replies(Failure)[-1].message


def returns(driver: Driver, rank: int) -> None:
    driver.send(TrainerExited(host=HostId("b"), lineage="0.0.g", rank=rank, clean=True, reason="", returned=True))


def test_save():
    driver = running(barrier_timeout_s=LIMIT_S)
    driver.stage(1)
    for step in range(2, 6):
        driver.hold(0, step)
        driver.tick(10.0)
    driver.tick(25.0)
    found = driver.advice().failure
    assert found is not None
    assert found.details["phase"] == "save"
    assert re.fullmatch(
        r"save\(\) of step 4 was not called in time by rank 1 \(host b\), still at step 1 when others had been ahead for \d+\.\d s; "
        r"every process must call save\(\) for the same steps; if one may take longer, raise barrier_timeout_s",
        found.message,
    )


@pytest.mark.parametrize(("levels", "where"), [((2, 3), "steps 2 to 3"), ((-1, -1), "no step")])
def test_ranks_that_are_late_read_where_they_stood(levels: tuple[int, int], where: str):
    """One that came late read that it had not called save(), in the very call."""
    driver = Driver(barrier_timeout_s=LIMIT_S)
    driver.join(["a", "b", "c"])
    driver.restore()
    for rank, step in enumerate((5, *levels)):
        driver.word(rank, step)
    driver.tick(25.0)
    found = driver.advice().failure
    assert found is not None
    assert f"by rank 1 (host b), rank 2 (host c), still at {where} when others" in found.message


def test_restore_that_some_do_not_call():
    driver = running(barrier_timeout_s=LIMIT_S)
    driver.join(AB, "h")
    driver.ask_restore(1)
    driver.tick(21.0)
    assert failure(driver, "restore", [0]) == "rank 0 (host a) did not call restore within 21.0 s"


def test_restore_that_some_do_not_finish():
    driver = running(restore_timeout_s=LIMIT_S)
    driver.stage(2)
    driver.join(AB, "h")
    driver.ask_all()
    driver.send(driver.try_of(driver.replies(RestoreChoice)[-1], 0, ok=True, tier="memory"))
    driver.tick(21.0)
    assert failure(driver, "restore", [1]) == "rank 1 (host b) did not finish restoring within 21.0 s"
    assert driver.advice().failure is None, "nothing was given up"


def test_restore_that_waits_for_a_host():
    driver = Driver(hosts=("a",), restore_timeout_s=LIMIT_S)  # it was there before this Coordinator, and says nothing
    driver.join(["b"])
    driver.ask_restore(0)
    driver.tick(21.0)
    assert failure(driver, "restore") == "restore waited 21.0 s for reports of hosts a"


def test_a_host_that_does_not_discard():
    driver = running(host_timeout_s=5.0)
    driver.stage(2)
    driver.hold(0, 3)
    driver.join(AB, "h")
    driver.auto = False
    driver.ask_all()
    driver.report_both()
    driver.tried(driver.replies(RestoreChoice)[-1])
    driver.tick(3.0)
    driver.report_both()
    driver.tick(3.0)
    driver.said(r"host a is not waited for: it has not discarded what the restore gives up within 6\.0 s")


def test_a_silent_host():
    driver = running(host_timeout_s=5.0)
    driver.stage(1)
    driver.tick(6.0)
    driver.said(r"host b is silent for 6 s")
    assert driver.core.memory.candidates() == []
    driver.report_both()
    assert [snap.step for snap in driver.core.memory.candidates()] == [1], "it was only away"


def test_close_that_some_do_not_call():
    driver = running(barrier_timeout_s=LIMIT_S)
    driver.leave(None, ranks=[0])
    driver.tick(21.0)
    assert failure(driver, "close", [1]) == "rank 1 (host b) did not call close within 21.0 s"


def test_close_whose_last_step_is_not_written():
    driver = running(save_timeout_s=LIMIT_S)
    driver.auto = False
    driver.stage(2, promised=True)
    driver.stage(3)
    driver.leave(driver.key(3), driver.key(2))
    driver.tick(21.0)
    message = failure(driver, "close")
    assert message.startswith("step 3 is not durable after 21.0 s: ")
    assert "host a (rank 0), host b (rank 1) did not write within 21.0 s" in message
    assert message.endswith("; step 2 is not committed: all of step 2 is in host memory and waits for storage"), message


def test_close_with_an_older_promise_that_cannot_be_kept_any_more():
    """Schedule 107 of November: step 6 was durable, and close failed because "step 6 is not durable: no host holds a piece of step 5"."""
    driver = running(save_timeout_s=LIMIT_S)
    driver.auto = False
    driver.stage(4, promised=True)
    driver.stage(5, promised=True)
    for host in AB:
        driver.staged[host] = [one for one in driver.staged[host] if one.step != 5]
        driver.report(host)
    driver.stage(6, promised=True)
    driver.leave(driver.key(6), *(driver.key(step) for step in (4, 5, 6)))
    driver.auto = True
    driver.write()
    assert driver.replies(Failure) == []
    lost = "its snapshot of rank 0 (host a) is lost"
    for reply in driver.replies(LeaveReply):
        assert (reply.step, reply.newest_lost) == (6, False)
        assert reply.errors == (f"step 5: {lost}",), "nobody waits for it"
    assert driver.core.tail is not None
    assert {key.step: why for key, why in driver.core.tail.given_up} == {5: lost}


def test_close_with_an_older_promise_that_storage_never_takes():
    """The newest step is durable: it is the older one that is given up, not the end."""
    driver = running(save_timeout_s=LIMIT_S)
    driver.auto = False
    driver.stage(4, promised=True)
    driver.send(Written(host=HostId("a"), save=driver.take(Write)[-1].save, error="the disk is full"))
    driver.stage(6, promised=True)
    driver.leave(driver.key(6), driver.key(4), driver.key(6))
    driver.tick(0.5)
    driver.auto = True
    driver.write()  # step 6, while step 4 waits for its next try
    driver.auto = False
    driver.live(LIMIT_S + 1.0)
    assert driver.replies(Failure) == []
    driver.auto = True
    driver.send(Appended(seq=driver.take(Append)[-1].entry.seq, outcome="ok"))
    for reply in driver.replies(LeaveReply):
        assert (reply.step, reply.newest_lost, [text[:7] for text in reply.errors]) == (6, False, ["step 4:"])
    assert len(driver.replies(LeaveReply)) == 2


def test_what_an_end_gives_up_is_logged_although_a_retirement_hangs():
    """Sequence 736 of the model: it waited for the retirement, and at the deadline the run ended without it."""
    driver = running(save_timeout_s=LIMIT_S, keep_last=1)
    driver.stage(2, promised=True)
    driver.auto = False
    driver.stage(4, promised=True)
    driver.send(Written(host=HostId("a"), save=driver.take(Write)[-1].save, error="the disk is full"))
    driver.stage(6, promised=True)
    driver.leave(driver.key(6), driver.key(4), driver.key(6))
    driver.tick(0.5)
    driver.send(Appended(seq=driver.commit().seq, outcome="ok"))
    driver.send(CarriedOut(intent=driver.orders("commit")[-1]))
    assert [one.step for one in driver.orders("retire")] == [2], "which is not carried out"
    driver.live(LIMIT_S + 1.0)
    assert {fact[0].step for fact in driver.take(Append)[-1].entry.given_up} == {4}


def test_flush_of_a_step_whose_host_is_down_does_not_call_it_unstaged():
    driver = running(save_timeout_s=LIMIT_S)
    driver.auto = False
    driver.stage(2, promised=True)
    driver.lose("b", "cut off")
    driver.flush(0, driver.key(2))
    driver.tick(21.0)
    [reply] = driver.replies(FlushReply)
    assert reply.errors[0].startswith("step 2 is out of reach: the host of rank 1 (host b) is down: cut off")


def test_flush_of_a_step_that_one_rank_never_stages():
    driver = running(save_timeout_s=LIMIT_S, barrier_timeout_s=1e6)
    driver.hold(0, 2, promised=True)
    driver.word(1, 2, pending=(2,))
    driver.flush(0, driver.key(2))
    driver.tick(21.0)
    [reply] = driver.replies(FlushReply)
    assert reply.errors == ("step 2 is not committed: step 2 was not staged by rank 1 (host b) (after 21.0 s)",)


def test_delete():
    driver = running(save_timeout_s=LIMIT_S, keep_last=None)
    driver.stage(1, promised=True)
    driver.stage(2, promised=True)
    driver.auto = False
    driver.delete(1)
    driver.tick(21.0)
    found = driver.replies(Failure)[-1]
    assert found.message.startswith("step 1 is not removed after 21.0 s")


def test_a_delete_that_is_asked_twice_is_answered_once():
    """The answer may have been lost: the question comes again while it waits."""
    driver = running(save_timeout_s=LIMIT_S, keep_last=None)
    driver.stage(1, promised=True)
    driver.stage(2, promised=True)
    driver.auto = False
    ask = driver.delete(1)
    driver.send(DeleteAsked(ask=ask, step=1))
    driver.auto = True
    driver.send(Appended(seq=driver.take(Append)[-1].entry.seq, outcome="ok"))
    driver.tick(21.0)
    assert driver.replies(FlushReply) == [FlushReply(durable_step=2)]
    assert driver.replies(Failure) == []


def test_release():
    driver = running(save_timeout_s=LIMIT_S)
    driver.auto = False
    driver.stage(3)
    driver.release()
    driver.report_both()
    driver.tick(21.0)
    assert re.match(r"step 3 is not durable after 21\.0 s: ", driver.replies(Failure)[-1].message)


def test_an_idle_run():
    driver = running(idle_timeout_s=60.0)
    driver.stage(3)
    driver.seen = {"a": [], "b": []}
    for _ in range(7):
        driver.tick(10.0)
        driver.report_both()
    driver.said(r"no trainer .*6\d s")
    assert driver.take(Finish) and driver.core.journal.published == (3,)


def test_a_stop_that_not_all_can_reach():
    driver = training()
    driver.send(StopAsked(reason="preemption", within_s=30.0))
    driver.tick(31.0)
    driver.said(
        r"the request to stop at step 6 is withdrawn: rank 0 \(host a\), rank 1 \(host b\) did not answer in time: preemption"
    )
