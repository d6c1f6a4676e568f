"""What became of a save is a fact of the log: a trainer that outlives a Coordinator is told by the next one."""

from __future__ import annotations

import re
from dataclasses import replace

from raystate.core.coordinator.facts import remember
from raystate.core.coordinator.leaving import UNFINISHED
from raystate.core.formats.entries import MOST_FACTS, Fact, lost_saves
from raystate.core.formats.log import next_entry
from raystate.core.formats.messages import (
    Failure,
    FlushAsked,
    FlushReply,
    HostId,
    HostReported,
    Invalidate,
    LeaveReply,
    LiveStep,
    SnapshotId,
    Write,
    Written,
)
from raystate.core.trainer.own_promises import REMEMBERED, OwnPromises
from tests.core.driver import AB, Driver, adopted, history, running

FULL = "the disk is full"
NO_SLOT = "no slot was free"


def fails(driver: Driver) -> None:
    """The writes of the save that is running, each time that it is tried."""
    for _ in range(3):
        driver.send(Written(host=HostId("a"), save=driver.take(Write)[-1].save, error=FULL))
        driver.tick(9.0)


def gives_up_step_4() -> Driver:
    """Storage works again."""
    driver = running()
    driver.auto = False
    driver.stage(4, promised=True)
    fails(driver)
    driver.auto = True
    return driver


def heir(driver: Driver) -> Driver:
    """The next Coordinator; the trainers go on."""
    assert driver.core.tail is not None
    return adopted(tail=driver.core.tail, lineage=driver.lineage)


def test_what_was_given_up_is_in_the_next_entry_and_its_reason_with_it():
    driver = gives_up_step_4()
    driver.stage(6, promised=True)
    tail = driver.core.tail
    assert tail is not None
    assert [(one.snapshot, FULL in one.why) for one in tail.given_up] == [(driver.key(4), True)]
    after = heir(driver)
    after.stage(8)
    after.flush(0, driver.key(4), driver.key(6))
    (reply,) = after.replies(FlushReply)
    assert (reply.lost, FULL in reply.errors[0]) == ((driver.key(4),), True)


def test_what_was_given_up_is_logged_where_nothing_else_is():
    driver = gives_up_step_4()
    for _ in range(20):
        driver.tick(3.0)
    tail = driver.core.tail
    assert tail is not None
    assert [one.snapshot for one in tail.given_up] == [driver.key(4)]
    assert not driver.core.journal.closable


def test_a_step_of_which_the_log_says_nothing_was_passed_over():
    tail = replace(history(3), retired=(Fact(SnapshotId("1.1.x", 2), "retention"),))
    driver = adopted(tail=tail)
    driver.word(0, 1)
    driver.flush(0, driver.key(1))
    assert not driver.replies(FlushReply), "a host that has not reported may hold it"
    driver.word(1, 1)
    driver.tick(1.0)
    (reply,) = driver.replies(FlushReply)
    assert (reply.lost, "a later step was made durable without it" in reply.errors[0]) == ((driver.key(1),), True)


def test_what_a_restore_gave_up_under_an_earlier_attempt_is_not_made_durable():
    driver = adopted(3, lineage="1.1.g")
    for host in AB:
        restore = Invalidate(host=HostId(host), lineage="1.1.g", step=4, by="1.3.h", attempt=1, seq=2)
        driver.send(HostReported(summary=replace(driver.summary(host), restore=restore)))
    driver.stage(5, promised=True)
    assert driver.take(Write) == []
    driver.stage(4, promised=True)
    assert {one.step for one in driver.take(Write)} == {4}


def test_a_restore_that_goes_back_gives_up_nothing_that_the_log_names():
    driver = running()
    driver.stage(2, promised=True)
    driver.auto = False
    driver.stage(4, promised=True)
    driver.auto = True
    driver.restore(step=2, rollback=True)
    driver.stage(3, promised=True)
    tail = driver.core.tail
    assert tail is not None
    assert tail.given_up == (), "the steps are made again"


def released(driver: Driver) -> tuple[str, ...]:
    driver.seen = {"a": [], "b": []}
    driver.release()
    driver.report_both()
    (reply,) = driver.replies(LeaveReply)
    return reply.errors


def test_a_release_that_fails_names_each_step_once():
    driver = running()
    driver.hold(0, 2, promised=True)
    driver.word(1, 3)
    driver.auto = False
    driver.stage(3, promised=True)
    driver.all_die()
    driver.release()
    for _ in range(400):
        for order in driver.take(Write):
            driver.send(Written(host=order.host, save=order.save, error=FULL))
        driver.live(3.0, *AB)
    (failure,) = driver.replies(Failure)
    assert re.findall(r"(?:^|; )step (\d)\b", failure.message) == ["3", "2"], failure.message


def test_a_trainer_remembers_its_newest_promises():
    promises = OwnPromises()
    for step in range(REMEMBERED + 3):
        promises.make(SnapshotId("1.1.x", step))
    assert [promises.made[0].step, len(promises.made)] == [3, REMEMBERED]


def test_another_reason_for_a_known_key_forgets_no_other():
    memory = {1: "a", 2: "b"}
    remember(memory, 2, "c", most=2)
    assert memory == {1: "a", 2: "c"}
    remember(memory, 3, "d", most=2)
    assert memory == {2: "c", 3: "d"}


def test_what_a_release_gives_up_is_a_fact_of_the_log():
    """`RunFailedError` named it, and `raystate ls` did not."""
    driver = running()
    driver.stage(2, promised=True)
    driver.hold(0, 3, promised=True)
    driver.all_die()
    driver.release("gave up")
    (reply,) = driver.replies(LeaveReply)
    assert reply == LeaveReply(step=2, errors=(f"step 3: {UNFINISHED}",))
    assert driver.core.journal.tail is not None
    assert [(key.step, why) for key, why in driver.core.journal.tail.given_up] == [(3, UNFINISHED)]


# ---------------------------------------------------------------- one step in two lineages


def flush(driver: Driver, rank: int, *promised: SnapshotId, broken: SnapshotId | None = None) -> None:
    lost = () if broken is None else ((broken, NO_SLOT),)
    driver.send(
        FlushAsked(ask=driver.ask(), lineage=driver.lineage, rank=rank, promised=promised, broken=lost, word=driver.numbers[rank])
    )


def inherits() -> Driver:
    """A new Coordinator: the trainers go on from step 4 in memory, in a lineage of their own."""
    driver = adopted(3, lineage="1.3.h")
    for host in AB:
        restore = Invalidate(host=HostId(host), lineage="1.1.g", step=4, by="1.3.h", attempt=1, seq=2)
        driver.send(HostReported(summary=replace(driver.summary(host), restore=restore)))
    return driver


def test_what_a_lineage_began_with_counts_while_it_is_being_written():
    driver = inherits()
    driver.auto = False
    for lineage in ("1.1.g", "1.3.h"):
        driver.lineage = lineage
        driver.hold(0, 4, promised=True)
        if lineage == "1.1.g":
            driver.hold(1, 4, promised=True)
    driver.word(0, 4)
    driver.word(1, 4)
    driver.flush(0, driver.key(4))
    assert not driver.replies(FlushReply)
    driver.auto = True
    driver.tick(20.0)
    assert [reply.errors for reply in driver.replies(FlushReply)] == [()]


def test_the_reason_of_a_broken_copy_replaces_what_a_report_has_said():
    driver = running()
    driver.hold(0, 4, promised=True)
    driver.word(1, 5)
    driver.hold(0, 5)
    flush(driver, 1, broken=driver.key(4))
    driver.stage(6, promised=True)
    tail = driver.core.tail
    assert tail is not None
    assert [(one.snapshot, NO_SLOT in one.why) for one in tail.given_up] == [(driver.key(4), True)]


def test_a_step_that_is_made_after_all_is_not_named_ever_again():
    tail = replace(history(), given_up=(Fact(SnapshotId("1.1.x", 4), FULL),))
    made = LiveStep(step=4, save="a2k1", lineage="2.1.y")
    entry = next_entry(tail, attempt=1, writer="w", carried=(), dead=(), commit=made, reason="due")
    assert entry.given_up == (Fact(SnapshotId("1.1.x", 4), ""),)
    assert lost_saves(replace(entry, live=())) == ()


def test_a_base_whose_pieces_are_gone_with_its_coordinator_is_passed_over():
    driver = inherits()
    driver.stage(6, promised=True)
    driver.flush(0, SnapshotId("1.1.g", 4), driver.key(6))
    driver.tick(1.0)
    (reply,) = driver.replies(FlushReply)
    assert reply.lost == (SnapshotId("1.1.g", 4),)


def test_every_rank_may_delete_an_old_step():
    """Its fact is not among the newest that an entry keeps."""
    retired = tuple(Fact(SnapshotId("1.1.x", step), "retention") for step in range(2000, 2000 + MOST_FACTS))
    driver = Driver(tail=replace(history(1000, 3000), retired=retired), dead=(1,))
    for _ in AB:
        driver.delete(1000)
        driver.tick(1.0)
    assert len(driver.replies(FlushReply)) == 2
