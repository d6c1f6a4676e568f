"""From a complete snapshot to its commit, and retention."""

from __future__ import annotations

import pytest

from raystate.core.formats.messages import (
    Advice,
    Append,
    Appended,
    Ask,
    BuildPackage,
    CarriedOut,
    Discard,
    Failure,
    Finish,
    FlushAsked,
    FlushReply,
    GivenUp,
    HostId,
    Intent,
    LiveStep,
    LogEntry,
    Packaged,
    RestoreAsked,
    Tick,
    Write,
    Written,
)
from tests.core.driver import AB, Driver, history, running


def test_a_durable_step_goes_all_the_way():
    driver = running()
    driver.stage(1)
    assert driver.take(Write) == []
    driver.auto = False
    driver.stage(2, promised=True)
    writes = driver.take(Write)
    assert [(one.host, one.step, one.ranks) for one in writes] == [("a", 2, (0,)), ("b", 2, (1,))]
    assert driver.key(2) in driver.core.snapshots.keep()
    save = writes[0].save
    driver.send(Written(host=HostId("a"), save=save))
    assert driver.take(BuildPackage) == []
    driver.send(Written(host=HostId("a"), save=save))
    assert driver.take(BuildPackage) == []
    driver.send(Written(host=HostId("b"), save=save))
    assert [one.hosts for one in driver.take(BuildPackage)] == [("a", "b")]
    driver.send(Packaged(save=save, metrics={"loss": 1.0}, time_s=5.0))
    [entry] = [one.entry for one in driver.take(Append)]
    assert entry.kind == "commit"
    assert entry.live == (LiveStep(step=2, save=save, metrics={"loss": 1.0}, time_s=5.0, lineage=driver.lineage),)
    assert driver.orders("commit") == []
    driver.send(Appended(seq=entry.seq, outcome="ok"))
    [publish] = driver.orders("commit")
    assert publish.step == 2
    assert driver.core.journal.durable_step == -1
    driver.send(CarriedOut(intent=publish))
    assert driver.advice().durable_step == 2


def test_failed_write_is_discarded_and_tried_again_three_times():
    driver = running()
    driver.auto = False
    driver.stage(2, promised=True)
    for _ in range(3):
        write = driver.take(Write)[0]
        driver.send(Written(host=HostId("a"), save=write.save, error="disk full"))
        assert [one.save for one in driver.take(Discard)] == [write.save]
        driver.tick(9.0)
        assert driver.advice().storage_fails
    assert driver.take(Write) == []
    assert "disk full" in driver.core.journal.troubles[-1]
    driver.auto = True
    driver.stage(4, promised=True)
    assert not driver.advice().storage_fails, "a step is durable"


def test_a_mistake_of_the_caller_ends_the_training_at_its_next_save():
    driver = running()
    driver.auto = False
    driver.stage(2, promised=True)
    driver.write()
    build = driver.take(BuildPackage)[0]
    driver.send(Packaged(save=build.save, error="state/w differs between ranks", hopeless=True))
    assert driver.take(Discard)
    driver.tick(10.0)
    assert driver.take(Write) == [], "no try can package these bytes"
    assert driver.advice().failure == Failure(error="ConfigError", message="state/w differs between ranks", details={"step": 2})
    driver.auto = True
    driver.join(AB, group="g2")  # started again, from memory
    assert driver.advice().failure is None


def test_an_unanswered_append_is_repeated_and_never_discarded():
    driver = running()
    driver.auto = False
    driver.stage(2, promised=True)
    driver.write()
    driver.send(driver.packaged(driver.take(BuildPackage)[0]))
    [first] = driver.take(Append)
    driver.send(Appended(seq=first.entry.seq, outcome="failed", error="reset"))
    driver.tick(5.0)
    assert driver.take(Append) == [first]
    assert driver.take(Discard) == []
    # It was there all the time: found under our own name.
    driver.send(Appended(seq=first.entry.seq, outcome="taken", tail=first.entry))
    assert [one.step for one in driver.orders("commit")] == [2]


def committed(driver: Driver, *steps: int) -> list[Intent]:
    """Each is in the log; the orders to publish them, which nobody has carried out."""
    publications: list[Intent] = []
    for step in steps:
        driver.stage(step, promised=True)
        driver.send(Appended(seq=driver.commit().seq, outcome="ok"))
        publications += driver.orders("commit")
    return publications


def test_a_commit_whose_package_is_gone_is_tried_again():
    """The folder was away when it was written."""
    driver = running()
    driver.auto = False
    driver.stage(2, promised=True)
    entry = driver.commit()
    driver.send(Appended(seq=entry.seq, outcome="refused", error="the package is gone"))
    assert [one.save for one in driver.take(Discard)] == [entry.live[-1].save]
    assert not driver.core.journal.live
    assert "the package is gone" in driver.core.journal.troubles[-1]
    driver.tick(5.0)
    second = driver.commit()
    assert (second.seq, second.live[-1].step) == (entry.seq, 2)
    assert second.live[-1].save != entry.live[-1].save
    driver.send(Appended(seq=second.seq, outcome="ok"))
    assert [one.step for one in driver.orders("commit")] == [2]


def test_nothing_goes_for_a_step_that_has_not_come():
    """Step 1 could not be retired yet when step 3 was to be committed, and was not."""
    driver = running(keep_last=2)
    driver.auto = False
    first, second = committed(driver, 1, 2)
    driver.send(CarriedOut(intent=second))
    driver.stage(3, promised=True)
    entry = driver.commit()
    assert [one.kind for one in entry.intents if one.step == 1] == ["commit"]
    driver.send(Appended(seq=entry.seq, outcome="refused", error="the package is gone"))
    driver.send(CarriedOut(intent=first))
    assert driver.take(Append) == []
    assert driver.core.journal.live.keys() == {1, 2}


def test_superseded_is_final():
    driver = running()
    driver.auto = False
    driver.flush(0, driver.key(2))
    driver.stage(2, promised=True)
    entry = driver.commit()
    other = LogEntry(seq=entry.seq, attempt=2, writer="other", kind="claim", run="r")
    driver.send(Appended(seq=entry.seq, outcome="taken", tail=other))
    assert [one.by_attempt for one in driver.take(Finish)] == [2]
    assert driver.replies(Failure) == [], "this run's next Coordinator answers"
    assert driver.send(Tick()) == []
    assert driver.send(RestoreAsked(ask=Ask("x"), lineage=driver.lineage, rank=0)) == []


def test_trainers_hear_of_another_cluster_that_has_taken_their_run():
    driver = running()
    driver.auto = False
    driver.flush(0, driver.key(2))
    driver.stage(2, promised=True)
    entry = driver.commit()
    other = LogEntry(seq=entry.seq, attempt=2, writer="elsewhere.run.1", kind="claim", run="r")
    driver.send(Appended(seq=entry.seq, outcome="taken", tail=other))
    assert [one.by_stranger for one in driver.take(Finish)] == [True]
    assert driver.replies(Failure)[-1].error == "StaleAttemptError"
    assert driver.replies(Failure)[-1].details["by_attempt"] == 2
    told = [one.failure for one in driver.take(Advice)]
    assert {failure.error for failure in told if failure is not None} == {"StaleAttemptError"}


def test_trainers_hear_that_their_run_is_given_up():
    driver = running()
    driver.flush(0, driver.key(2))
    driver.send(GivenUp(reason="its folder is gone"))
    assert driver.take(Finish)[0].by_stranger
    assert driver.replies(Failure)[-1].message == "its folder is gone"
    told = [one.failure for one in driver.take(Advice)]
    assert {failure.error for failure in told if failure is not None} == {"StaleAttemptError"}


@pytest.mark.parametrize(
    ("writer", "who"),
    [
        ("w.another.1", "another run of this Ray cluster, which has its storage under another path or URL,"),
        ("elsewhere.run.1", "another Ray cluster, or another script with a Ray of its own,"),
    ],
)
def test_who_has_taken_the_run_is_told_also_under_another_name_of_the_folder(writer: str, who: str):
    """A bind mount gives one folder two names, and each its own Coordinator."""
    driver = running()
    driver.auto = False
    driver.flush(0, driver.key(2))
    driver.stage(2, promised=True)
    driver.core.journal.writer = "w.run.9"
    entry = driver.commit()
    other = LogEntry(seq=entry.seq, attempt=2, writer=writer, kind="claim", run="r")
    driver.send(Appended(seq=entry.seq, outcome="taken", tail=other))
    (end,) = driver.take(Finish)
    assert end.by_stranger and f": {who} has taken over the run" in end.reason


def test_a_step_that_gives_way_while_storage_fails_says_how():
    driver = running()
    driver.stage(1, promised=True)
    driver.auto = False
    driver.stage(2, promised=True)
    order = driver.take(Write)[-1]
    driver.send(Written(host=order.host, save=order.save, error="StorageError: the disk is full"))
    for step in (4, 6):
        driver.stage(step, promised=True)
    driver.core.snapshots.keep()
    for rank in (0, 1):
        driver.staged[driver.host_of[rank]] = [one for one in driver.staged[driver.host_of[rank]] if one.step != 2]
        driver.report(driver.host_of[rank])
    (why,) = [why for key, why in driver.core.saves.failed.items() if key.step == 2]
    assert "gave way to newer ones while storage fails: host b could not write: StorageError: the disk is full" in why


def test_a_due_save_gives_way_to_new_snapshots_while_storage_is_slow():
    driver = running()
    driver.stage(1, promised=True)
    driver.take(Write)
    driver.auto = False
    for step in (2, 4, 6):
        driver.stage(step, promised=True)
    assert {one.step for one in driver.take(Write)} == {2}
    assert driver.core.snapshots.keep() == tuple(driver.key(step) for step in (2, 4, 6))
    driver.live(11.0)
    assert driver.core.snapshots.keep() == (driver.key(2),), "of three slots one is filled and one holds the newest"
    for rank in (0, 1):  # the slot of step 4 is used again
        driver.staged[driver.host_of[rank]] = [one for one in driver.staged[driver.host_of[rank]] if one.step != 4]
        driver.report(driver.host_of[rank])
    assert "step 4 gave way to newer ones while storage fails: it stands still" in driver.core.journal.troubles[-1]
    assert driver.advice().storage_fails, "nobody waits for it until a step is durable"
    driver.flush(0, driver.key(2), driver.key(4), driver.key(6))
    driver.auto = True
    for host in driver.host_of.values():
        driver.send(Written(host=HostId(host), save=driver.core.saves.running.save))  # pyright: ignore[reportOptionalMemberAccess]
    [reply] = driver.replies(FlushReply)
    assert reply.durable_step == 6
    assert "step 4" in reply.errors[0], "what was promised and is not kept is named"
    assert reply.lost == (driver.key(4),)


def test_retention_retires_after_the_newer_one_is_visible():
    driver = running(keep_last=2)
    for step in (1, 2):
        driver.stage(step, promised=True)
    driver.auto = False
    driver.stage(3, promised=True)
    driver.write()
    driver.orders("commit")
    driver.send(driver.packaged(driver.take(BuildPackage)[-1]))
    entry = driver.take(Append)[-1].entry
    assert [(one.kind, one.step) for one in entry.intents] == [("retire", 1), ("commit", 3)]
    driver.send(Appended(seq=entry.seq, outcome="ok"))
    assert driver.orders("retire") == []
    [publish] = driver.orders("commit")
    driver.send(CarriedOut(intent=publish))
    assert [one.step for one in driver.orders("retire")] == [1]


def test_retention_does_not_wait_for_a_next_commit():
    """The commit of step 2 could not retire step 1, which was not visible yet; and no other commit follows."""
    driver = running(keep_last=1)
    driver.auto = False
    for one in committed(driver, 1, 2):
        assert driver.take(Append) == []
        driver.send(CarriedOut(intent=one))
    [entry] = [one.entry for one in driver.take(Append)]
    assert [(one.step, one.kind) for one in entry.intents if one.kind == "retire"] == [(1, "retire")]
    driver.send(Appended(seq=entry.seq, outcome="ok"))
    assert [one.step for one in driver.orders("retire")] == [1]


def test_a_failed_publication_is_repeated():
    driver = running()
    driver.auto = False
    driver.stage(2, promised=True)
    driver.send(Appended(seq=driver.commit().seq, outcome="ok"))
    [publish] = driver.orders("commit")
    driver.send(CarriedOut(intent=publish, error="503"))
    assert driver.take(Discard) == []
    driver.tick(5.0)
    assert driver.orders("commit") == [publish]


def test_hold_rule_refuses_a_step_with_a_strangers_open_retire():
    from raystate.core.formats.messages import AttemptDead

    intents = (Intent(kind="retire", step=4, save="a1k4", attempt=1, seq=9),)
    driver = Driver(tail=history(3, intents=intents))
    driver.join(AB)
    driver.restore()
    driver.stage(4, promised=True)
    assert driver.take(Write) == []
    assert "attempt 1" in driver.core.journal.troubles[-1]
    driver.send(AttemptDead(attempt=1))
    assert {one.step for one in driver.take(Write)} == {4}


def test_an_attempt_that_stays_away_for_very_long_is_dead():
    intents = (Intent(kind="retire", step=4, save="a1k4", attempt=1, seq=9),)
    driver = Driver(tail=history(3, intents=intents), assume_dead_after_s=3600.0, idle_timeout_s=1e9)
    assert driver.core.held_by == {1}
    driver.tick(3599.0)
    assert driver.core.held_by == {1}
    driver.tick(2.0)
    assert driver.core.held_by == set()


def test_the_first_snapshot_of_unequal_ranks_is_saved_to_find_out_what_differs():
    """Whoever packages it names the leaves and the ranks; nobody trains on for hours before that."""
    driver = running()
    driver.auto = False
    driver.hold(0, 1, local=7)
    driver.hold(1, 1, local=7)
    assert driver.take(Write) == []
    driver.hold(0, 2, local=7)
    driver.hold(1, 2, local=8)
    assert {one.step for one in driver.take(Write)} == {2}


def test_who_waits_again_waits_no_longer_and_is_told_of_each_step():
    """A trainer repeats its question every few seconds, because the answer may be lost."""
    driver = running(save_timeout_s=60.0)
    driver.stage(2, promised=True)
    driver.auto = False
    driver.stage(4, promised=True)
    asked = FlushAsked(
        ask=driver.ask(), lineage=driver.lineage, rank=0, promised=(driver.key(2), driver.key(4)), word=driver.numbers[0]
    )
    for _ in range(4):
        assert driver.replies(FlushReply) == []
        driver.send(asked)
        driver.tick(15.0)
    reply = driver.replies(FlushReply)[-1]
    assert (reply.durable_step, reply.lost, reply.undecided) == (2, (), (driver.key(4),))
    assert "step 4" in reply.errors[0]
    assert "after 60.0 s" in reply.errors[0]


def test_who_only_asks_is_answered_at_once():
    driver = running()
    driver.stage(2, promised=True)
    driver.auto = False
    driver.stage(4, promised=True)
    both = (driver.key(2), driver.key(4))
    driver.send(
        FlushAsked(ask=driver.ask(), lineage=driver.lineage, rank=0, promised=both, word=driver.numbers[0], wait=False),
    )
    [reply] = driver.replies(FlushReply)
    assert (reply.durable_step, reply.lost, reply.undecided) == (2, (), (driver.key(4),))
