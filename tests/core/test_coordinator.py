"""The Coordinator's decisions, one by one."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from raystate.core.messages import (
    Append,
    Appended,
    Ask,
    BuildPackage,
    DeleteAsked,
    Discard,
    EndTrainers,
    Failure,
    Finish,
    FlushAsked,
    FlushReply,
    HostDown,
    HostId,
    HostUp,
    Intent,
    Invalidate,
    Joined,
    JoinReply,
    LeaveAsked,
    LeaveReply,
    LiveStep,
    LogEntry,
    Packaged,
    Publish,
    PublishDone,
    ReleaseAsked,
    RestoreAsked,
    RestoreChoice,
    RestoreSettled,
    RestoreTried,
    Retire,
    RetireDone,
    StopAsked,
    Superseded,
    Tick,
    TrainerExited,
    Write,
    Written,
)
from tests.core.driver import Driver

AB = ["a", "b"]


def running(**settings: Any) -> Driver:
    """Two ranks on two hosts that have restored nothing."""
    driver = Driver(**settings)
    driver.join(AB)
    assert driver.restore().tier == "none"
    driver.out.clear()
    return driver


def history(*steps: int, intents: tuple[Intent, ...] = (), attempt: int = 1) -> LogEntry:
    live = tuple(LiveStep(step=step, save=f"a{attempt}k{step}") for step in steps)
    return LogEntry(seq=10, attempt=attempt, writer="old", kind="close", run="r", live=live, intents=intents)


def test_core_loads_no_framework():
    code = "import sys, raystate.core.coordinator; print([m for m in ('ray', 'jax', 'numpy') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


# ---------------------------------------------------------------- joins


def test_join_answers_all_with_one_lineage():
    driver = Driver()
    driver.join(AB)
    replies = driver.replies(JoinReply)
    assert len(replies) == 2
    assert len({reply.lineage for reply in replies}) == 1
    assert replies[0].hosts == ((0, "a"), (1, "b"))


def test_asks_before_the_claim_wait_for_it():
    from raystate.core.coordinator import Coordinator
    from raystate.core.log import claim_entry
    from raystate.core.messages import Answer, Claimed, Settings

    core = Coordinator(Settings(run="r", storage="s"))
    join = Joined(ask=Ask("q"), group="g", rank=0, world=1, host=HostId("a"), nonce="n")
    assert core.handle(join, 0.0) == []
    out = core.handle(Claimed(entry=claim_entry(None, "w", "r")), 1.0)
    assert [one.reply.attempt for one in out if isinstance(one, Answer) and isinstance(one.reply, JoinReply)] == [1]


def test_repeated_join_gets_the_same_reply():
    driver = Driver()
    driver.join(AB)
    driver.send(Joined(ask=Ask("again"), group="g", rank=1, world=2, host=HostId("b"), nonce="x"))
    assert len({reply.lineage for reply in driver.replies(JoinReply)}) == 1
    assert len(driver.replies(JoinReply)) == 3


def test_join_deadline_names_missing_ranks():
    driver = Driver(start_timeout_s=30.0)
    driver.host_up("a")
    driver.send(Joined(ask=Ask("q"), group="g", rank=1, world=3, host=HostId("a"), nonce="n"))
    driver.tick(31.0)
    [failure] = driver.replies(Failure)
    assert failure.error == "BarrierTimeoutError"
    assert failure.details["missing_ranks"] == [0, 2]
    assert failure.details["waited_s"] >= 30.0


@pytest.mark.parametrize(("world", "host"), [(3, "a"), (2, "b")])
def test_contradicting_joins_are_refused(world: int, host: str):
    driver = Driver()
    driver.send(Joined(ask=Ask("1"), group="g", rank=0, world=2, host=HostId("a"), nonce="n"))
    driver.send(Joined(ask=Ask("2"), group="g", rank=0, world=world, host=HostId(host), nonce="n"))
    assert [one.error for one in driver.replies(Failure)] == ["ConfigError", "ConfigError"]


def test_new_group_ends_the_old_one_when_all_its_ranks_have_joined():
    driver = running()
    old = driver.lineage
    driver.send(Joined(ask=Ask("n"), group="h", rank=0, world=2, host=HostId("a"), nonce="n"))
    # Schedule 89953: one late message of a group that an earlier Coordinator knew ended the living one while it closed.
    assert driver.take(EndTrainers) == []
    assert driver.core.in_use
    driver.send(Joined(ask=Ask("m"), group="h", rank=1, world=2, host=HostId("b"), nonce="m"))
    ended = driver.take(EndTrainers)
    assert {(one.host, one.lineage) for one in ended} == {("a", old), ("b", old)}
    driver.send(RestoreAsked(ask=Ask("z"), lineage=old, rank=0))
    assert driver.replies(Failure)[-1].error == "StaleAttemptError"
    # A late message of the old group changes nothing.
    driver.send(Joined(ask=Ask("late"), group="g", rank=0, world=2, host=HostId("a"), nonce="n"))
    assert driver.replies(Failure)[-1].error == "StaleAttemptError"


def test_unclean_exit_ends_the_group_everywhere():
    driver = running()
    driver.send(TrainerExited(host=HostId("a"), lineage=driver.lineage, rank=0, clean=True, reason="left"))
    assert driver.take(EndTrainers) == []
    driver.send(TrainerExited(host=HostId("a"), lineage=driver.lineage, rank=0, clean=False, reason="killed"))
    assert [one.host for one in driver.take(EndTrainers)] == ["b"]


# ---------------------------------------------------------------- snapshots


def test_stable_when_all_ranks_hold_it():
    driver = running()
    driver.hold(0, 1)
    assert driver.core.snapshots.stable == -1
    driver.hold(1, 1)
    assert driver.advice().stable == 1


def test_other_layout_is_not_complete():
    driver = running()
    driver.hold(0, 1)
    driver.hold(1, 1, layout="M")
    assert driver.core.snapshots.stable == -1


def test_skipped_step_is_dead_and_the_interval_grows_and_shrinks():
    driver = running()
    driver.hold(0, 1)
    driver.word(1, 1, pending=(1,))
    assert driver.core.snapshots.dead == set()
    driver.word(1, 1)
    assert driver.advice().dead == (1,)
    assert driver.advice().interval == 1, "one skip is a hiccup"
    driver.stage(2)
    driver.hold(0, 3)
    driver.word(1, 3)
    assert driver.advice().dead == (3,)
    assert driver.advice().interval == 2
    for step in range(4, 40, 2):
        driver.stage(step)
    assert driver.advice().interval == 1


def test_what_a_dead_host_actor_said_of_trainers_goes_with_it():
    """Schedule 126309: a restarted HostActor that had not reported yet made its trainers look as if they had skipped steps."""
    driver = running()
    driver.stage(1)
    driver.hold(0, 2)
    driver.auto = False
    driver.send(HostUp(host=HostId("a"), incarnation="i2"))
    driver.hold(1, 2)
    assert driver.core.snapshots.dead == set()
    driver.auto = True
    driver.report("a", "i2")
    assert driver.core.snapshots.stable == 2


def test_newer_reports_only():
    driver = running()
    driver.hold(0, 1)
    driver.seq["a"] = 1
    driver.staged["a"] = []
    driver.report("a")  # an old number: a late message
    driver.seq["a"] = 1000
    driver.staged["b"] = []
    driver.hold(1, 1)
    assert driver.core.snapshots.stable == 1


def test_unequal_saves_are_reported_with_names():
    driver = running(barrier_timeout_s=20.0)
    driver.stage(1)
    for step in range(2, 6):
        driver.hold(0, step)
        driver.tick(10.0)
    driver.tick(25.0)
    failure = driver.advice().failure
    assert failure is not None
    assert failure.error == "BarrierTimeoutError"
    assert failure.details["missing_ranks"] == [1]
    assert failure.details["hosts"] == ["b"]
    assert failure.details["phase"] == "save"


def test_silent_host_is_down():
    driver = running(host_timeout_s=5.0)
    driver.stage(1)
    driver.tick(6.0)
    assert not driver.core.memory.hosts[HostId("a")].up
    assert driver.core.memory.candidates() == []
    driver.report("a")
    driver.report("b")
    assert [snap.step for snap in driver.core.memory.candidates()] == [1]


# ---------------------------------------------------------------- saves


def test_a_durable_step_goes_all_the_way():
    driver = running()
    driver.stage(1)
    assert driver.take(Write) == []
    driver.auto = False
    driver.stage(2, durable=True)
    writes = driver.take(Write)
    assert [(one.host, one.step, one.ranks) for one in writes] == [("a", 2, (0,)), ("b", 2, (1,))]
    assert (driver.lineage, 2) in driver.core.snapshots.keep()
    save = writes[0].save
    driver.send(Written(host=HostId("a"), save=save))
    assert driver.take(BuildPackage) == []
    driver.send(Written(host=HostId("a"), save=save))
    assert driver.take(BuildPackage) == []
    driver.send(Written(host=HostId("b"), save=save))
    assert [one.hosts for one in driver.take(BuildPackage)] == [("a", "b")]
    driver.send(Packaged(save=save, metrics={"loss": 1.0}, time_s=5.0))
    [append] = driver.take(Append)
    assert append.entry.kind == "commit"
    assert append.entry.live == (LiveStep(step=2, save=save, metrics={"loss": 1.0}, time_s=5.0),)
    assert driver.take(Publish) == []
    driver.send(Appended(seq=append.entry.seq, outcome="ok"))
    assert [one.step for one in driver.take(Publish)] == [2]
    assert driver.core.journal.durable_step == -1
    driver.send(PublishDone(step=2, save=save))
    assert driver.advice().durable_step == 2


def test_failed_write_is_discarded_and_tried_again_three_times():
    driver = running()
    driver.auto = False
    driver.stage(2, durable=True)
    for _ in range(3):
        write = driver.take(Write)[0]
        driver.send(Written(host=HostId("a"), save=write.save, error="disk full"))
        assert [one.save for one in driver.take(Discard)] == [write.save]
        driver.tick(10.0)
    assert driver.take(Write) == []
    assert "disk full" in driver.core.journal.troubles[-1]


def test_an_unanswered_append_is_repeated_and_never_discarded():
    driver = running()
    driver.auto = False
    driver.stage(2, durable=True)
    for write in driver.take(Write):
        driver.send(Written(host=write.host, save=write.save))
    driver.send(Packaged(save=driver.take(BuildPackage)[0].save))
    [first] = driver.take(Append)
    driver.send(Appended(seq=first.entry.seq, outcome="failed", error="reset"))
    driver.tick(5.0)
    assert driver.take(Append) == [first]
    assert driver.take(Discard) == []
    # It was there all the time: found under our own name.
    driver.send(Appended(seq=first.entry.seq, outcome="taken", tail=first.entry))
    assert [one.step for one in driver.take(Publish)] == [2]


def test_superseded_is_final():
    driver = running()
    driver.auto = False
    driver.send(FlushAsked(ask=Ask("f"), lineage=driver.lineage, rank=0, step=2))
    driver.stage(2, durable=True)
    for write in driver.take(Write):
        driver.send(Written(host=write.host, save=write.save))
    driver.send(Packaged(save=driver.take(BuildPackage)[0].save))
    [append] = driver.take(Append)
    other = LogEntry(seq=append.entry.seq, attempt=2, writer="other", kind="claim", run="r")
    driver.send(Appended(seq=append.entry.seq, outcome="taken", tail=other))
    assert [one.by_attempt for one in driver.take(Superseded)] == [2]
    assert driver.replies(Failure)[-1].error == "StaleAttemptError"
    assert driver.send(Tick()) == []
    [answer] = driver.send(RestoreAsked(ask=Ask("x"), lineage=driver.lineage, rank=0))
    assert answer.reply.details["by_attempt"] == 2


def test_one_save_at_a_time_and_in_order():
    driver = running()
    driver.auto = False
    driver.stage(2, durable=True)
    driver.stage(4, durable=True)
    assert {one.step for one in driver.take(Write)} == {2}
    assert driver.core.snapshots.keep() == ((driver.lineage, 2), (driver.lineage, 4))


def test_a_lost_host_fails_the_save_at_once():
    driver = running()
    driver.auto = False
    driver.stage(2, durable=True)
    [save] = {one.save for one in driver.take(Write)}
    driver.send(HostDown(host=HostId("b"), reason="gone"))
    assert [one.save for one in driver.take(Discard)] == [save]


def test_a_due_save_gives_way_to_new_snapshots_while_storage_is_slow():
    driver = running()
    driver.auto = False
    for step in (2, 4, 6):
        driver.stage(step, durable=True)
    assert {one.step for one in driver.take(Write)} == {2}
    assert driver.core.snapshots.keep() == tuple((driver.lineage, step) for step in (2, 4, 6))
    driver.tick(4.0)
    assert driver.core.snapshots.keep() == ((driver.lineage, 2),), "of three slots one is filled and one holds the newest"
    for rank in (0, 1):  # the slot of step 4 is used again
        driver.staged[driver.place[rank]] = [one for one in driver.staged[driver.place[rank]] if one.step != 4]
        driver.report(driver.place[rank])
    assert "step 4 gave way to newer ones: storage is slower" in driver.core.journal.troubles[-1]
    driver.word(0, 6, durable_due=(2, 4, 6))
    driver.send(FlushAsked(ask=Ask("f"), lineage=driver.lineage, rank=0, step=6))
    driver.auto = True
    for host in driver.place.values():
        driver.send(Written(host=HostId(host), save=driver.core.saves.running.save))  # pyright: ignore[reportOptionalMemberAccess]
    [reply] = driver.replies(FlushReply)
    assert reply.durable_step == 6
    assert "step 4" in reply.errors[0], "what was promised and is not kept is named"


def test_a_due_save_that_gave_way_to_another_lineage_holds_up_nobody():
    """The group died while saves were waiting; the next one fills the slots, and its end must not wait for what is gone."""
    driver = running()
    driver.auto = False
    for step in (2, 4):
        driver.stage(step, durable=True)
    assert {one.step for one in driver.take(Write)} == {2}
    driver.tick(4.0)
    old = driver.lineage
    driver.auto = True
    driver.join(AB, "h")
    driver.restore()
    for rank in (0, 1):  # its slots are used again
        driver.staged[driver.place[rank]] = [one for one in driver.staged[driver.place[rank]] if one.lineage != old]
    driver.stage(5)
    assert (old, 4) in driver.core.saves.failed or (old, 4) not in driver.core.saves.jobs
    assert not [key for key in driver.core.saves.jobs if key[0] == old and driver.core.saves.jobs[key].phase == "queued"]


def test_retention_retires_after_the_newer_one_is_visible():
    driver = running(keep_last=2)
    for step in (1, 2):
        driver.stage(step, durable=True)
    driver.auto = False
    driver.stage(3, durable=True)
    for write in driver.take(Write):
        driver.send(Written(host=write.host, save=write.save))
    driver.take(Publish)
    driver.send(Packaged(save=driver.take(BuildPackage)[-1].save))
    entry = driver.take(Append)[-1].entry
    assert [(one.kind, one.step) for one in entry.intents] == [("retire", 1), ("commit", 3)]
    driver.send(Appended(seq=entry.seq, outcome="ok"))
    assert driver.take(Retire) == []
    [publish] = driver.take(Publish)
    driver.send(PublishDone(step=3, save=publish.save))
    assert [one.step for one in driver.take(Retire)] == [1]


def test_retention_does_not_wait_for_a_next_commit():
    """The commit of step 2 could not retire step 1, which was not visible yet; and no other commit follows."""
    driver = running(keep_last=1)
    driver.auto = False
    publications = []
    for step in (1, 2):
        driver.stage(step, durable=True)
        for write in driver.take(Write):
            driver.send(Written(host=write.host, save=write.save))
        driver.send(Packaged(save=driver.take(BuildPackage)[-1].save))
        driver.send(Appended(seq=driver.take(Append)[-1].entry.seq, outcome="ok"))
        publications += driver.take(Publish)
    for one in publications:
        assert driver.take(Append) == []
        driver.send(PublishDone(step=one.step, save=one.save))
    [entry] = [one.entry for one in driver.take(Append)]
    assert [(one.step, one.kind) for one in entry.intents if one.kind == "retire"] == [(1, "retire")]
    driver.send(Appended(seq=entry.seq, outcome="ok"))
    assert [one.step for one in driver.take(Retire)] == [1]


def test_a_failed_publication_is_repeated():
    driver = running()
    driver.auto = False
    driver.stage(2, durable=True)
    for write in driver.take(Write):
        driver.send(Written(host=write.host, save=write.save))
    driver.send(Packaged(save=driver.take(BuildPackage)[0].save))
    driver.send(Appended(seq=driver.take(Append)[0].entry.seq, outcome="ok"))
    [publish] = driver.take(Publish)
    driver.send(PublishDone(step=2, save=publish.save, error="503"))
    assert driver.take(Discard) == []
    driver.tick(5.0)
    assert driver.take(Publish) == [publish]


def test_takeover_finishes_open_intents_publication_first():
    intents = (
        Intent(kind="retire", step=1, save="a1k1", attempt=1, seq=9),
        Intent(kind="commit", step=5, save="a1k5", attempt=1, seq=10),
    )
    driver = Driver(tail=history(3, 5, intents=intents), dead=(1,))
    order = [one for one in driver.out if isinstance(one, Publish | Retire)]
    assert [type(one).__name__ for one in order] == ["Publish", "Retire"]
    driver.join(AB)
    assert driver.restore().step == 5


def test_hold_rule_refuses_a_step_with_a_strangers_open_retire():
    from raystate.core.messages import AttemptDead

    intents = (Intent(kind="retire", step=4, save="a1k4", attempt=1, seq=9),)
    driver = Driver(tail=history(3, intents=intents))
    driver.join(AB)
    driver.restore()
    driver.stage(4, durable=True)
    assert driver.take(Write) == []
    assert "attempt 1" in driver.core.journal.troubles[-1]
    driver.send(AttemptDead(attempt=1))
    assert {one.step for one in driver.take(Write)} == {4}


def test_flush_waits_for_what_was_promised():
    driver = running()
    driver.auto = False
    driver.stage(2, durable=True)
    driver.send(FlushAsked(ask=Ask("f"), lineage=driver.lineage, rank=0, step=2))
    assert driver.replies(FlushReply) == []
    driver.auto = True
    for write in driver.take(Write):
        driver.send(Written(host=write.host, save=write.save))
    assert driver.replies(FlushReply) == [FlushReply(durable_step=2)]


def test_flush_names_a_step_that_was_skipped():
    driver = running()
    driver.hold(0, 2, durable=True)
    driver.word(1, 2, durable_due=(2,))
    driver.send(FlushAsked(ask=Ask("f"), lineage=driver.lineage, rank=0, step=2))
    [reply] = driver.replies(FlushReply)
    assert "rank 1 (host b) skipped step 2" in reply.errors[0]


def test_flush_has_a_deadline():
    driver = running(save_timeout_s=20.0)
    driver.send(FlushAsked(ask=Ask("f"), lineage=driver.lineage, rank=0, step=2))
    driver.tick(21.0)
    assert "step 2" in driver.replies(FlushReply)[0].errors[0]


def test_delete_keeps_the_newest():
    driver = running(keep_last=None)
    driver.stage(1, durable=True)
    driver.stage(2, durable=True)
    driver.send(DeleteAsked(ask=Ask("d2"), step=2))
    assert driver.replies(Failure)[-1].error == "StorageError"
    driver.send(DeleteAsked(ask=Ask("d9"), step=9))
    assert driver.replies(Failure)[-1].error == "StepNotFoundError"
    driver.send(DeleteAsked(ask=Ask("d1"), step=1))
    driver.send(DeleteAsked(ask=Ask("d1 of another rank"), step=1))
    assert driver.replies(FlushReply) == [FlushReply(durable_step=2)] * 2
    assert [one.step for one in driver.take(Retire)] == [1]


def test_a_pinned_step_is_removed_when_its_pin_is_gone():
    driver = running(keep_last=1)
    driver.auto = False
    for step in (1, 2):
        driver.stage(step, durable=True)
        for write in driver.take(Write):
            driver.send(Written(host=write.host, save=write.save))
        driver.send(Packaged(save=driver.take(BuildPackage)[-1].save))
        driver.send(Appended(seq=driver.take(Append)[-1].entry.seq, outcome="ok"))
        [publish] = driver.take(Publish)
        driver.send(PublishDone(step=step, save=publish.save))
    assert [one.step for one in driver.take(Retire)] == [1]
    driver.send(RetireDone(step=1, pinned="an evaluation on h"))
    assert driver.core.journal.troubles == [], "nothing has failed"
    assert driver.core.journal.tail is not None
    assert [one.step for one in driver.core.journal.tail.live] == [2], "it is decided, only not carried out"
    assert not driver.core.journal.working, "the end of the run does not wait for it"
    driver.send(DeleteAsked(ask=Ask("d1"), step=1))
    assert driver.replies(Failure)[-1].error == "StepNotFoundError"
    driver.tick(10.0)
    assert driver.take(Retire) == []
    driver.tick(25.0)
    assert [one.step for one in driver.take(Retire)] == [1]
    driver.send(RetireDone(step=1))
    assert driver.core.journal.pinned == {}


def test_an_attempt_that_stays_away_for_very_long_is_dead():
    intents = (Intent(kind="retire", step=4, save="a1k4", attempt=1, seq=9),)
    driver = Driver(tail=history(3, intents=intents), assume_dead_after_s=3600.0, idle_timeout_s=1e9)
    assert driver.core.held_by == {1}
    driver.tick(3599.0)
    assert driver.core.held_by == {1}
    driver.tick(2.0)
    assert driver.core.held_by == set()


# ---------------------------------------------------------------- recovery


def test_memory_is_chosen_when_it_is_newer_or_equal():
    driver = running()
    driver.stage(2, durable=True)
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
    driver.world, driver.lineage, driver.place = 2, "1.1.x", {0: "a", 1: "b"}
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
    driver.stage(1, durable=True)
    driver.stage(7)
    old = {host: list(staged) for host, staged in driver.staged.items()}
    for host in AB:
        driver.send(HostDown(host=HostId(host), reason="cut", gone=True))
    driver.join(["c"], "h")
    assert (driver.restore().tier, driver.lineage[:3]) == ("storage", "1.2")
    driver.staged.update(old)
    driver.auto = False
    driver.report("a")
    driver.report("b")
    assert driver.core.memory.candidates() == []
    assert {one.host for one in driver.take(Invalidate)} >= {"a", "b"}


def test_discarding_comes_before_the_choice_is_told():
    driver = running()
    driver.stage(2)
    driver.hold(0, 3)
    driver.join(AB, "h")
    driver.out.clear()
    driver.auto = False
    for rank in range(2):
        driver.send(RestoreAsked(ask=driver.ask(), lineage=driver.lineage, rank=rank))
    assert driver.replies(RestoreChoice) == []
    for host in AB:
        driver.report(host)
    orders = driver.take(Invalidate)
    assert {(one.host, one.step) for one in orders} == {("a", 2), ("b", 2)}
    assert driver.replies(RestoreChoice) == []
    driver.auto = True
    for order in orders:
        driver._obey(order)
    assert [one.step for one in driver.replies(RestoreChoice)] == [2, 2]


def test_restore_barrier_names_missing_ranks():
    driver = running(barrier_timeout_s=20.0)
    driver.join(AB, "h")
    driver.send(RestoreAsked(ask=Ask("q"), lineage=driver.lineage, rank=1))
    driver.tick(21.0)
    failure = driver.replies(Failure)[-1]
    assert failure.error == "BarrierTimeoutError"
    assert failure.details["missing_ranks"] == [0]
    assert "host a" in failure.message


def test_missing_step_is_named_with_the_available_ones():
    driver = running()
    driver.stage(2, durable=True)
    driver.join(AB, "h")
    for rank in range(2):
        driver.send(RestoreAsked(ask=driver.ask(), lineage=driver.lineage, rank=rank, step=9))
    failure = driver.replies(Failure)[-1]
    assert (failure.error, failure.details["available"]) == ("StepNotFoundError", [2])


def test_rollback_retires_the_newer_steps_first():
    driver = running()
    driver.stage(2, durable=True)
    driver.stage(4, durable=True)
    driver.join(AB, "h")
    driver.out.clear()
    choice = driver.restore(step=2, rollback=True)
    assert choice.step == 2
    assert [one.step for one in driver.take(Retire)] == [4]
    assert driver.core.journal.published == (2,)
    driver.stage(4, durable=True)
    assert driver.core.journal.published == (2, 4)


def test_damaged_memory_falls_to_storage_and_damaged_storage_is_set_aside():
    driver = running()
    driver.stage(2, durable=True)
    driver.stage(4, durable=True)
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
    assert [(one.step, one.aside) for one in driver.take(Retire)] == [(4, True)]
    driver.tried(choice)
    assert driver.replies(RestoreSettled)[-1].step == 2


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
    assert driver.take(Retire) == []


def test_recovery_waits_for_a_host_that_restarts():
    driver = running(host_timeout_s=5.0)
    driver.stage(3)
    driver.send(HostDown(host=HostId("b"), reason="actor died"))
    place = driver.place
    driver.send(Joined(ask=Ask("j"), group="h", rank=0, world=1, host=HostId("a"), nonce="n"))
    driver.lineage = driver.replies(JoinReply)[-1].lineage
    driver.world, driver.seen = 1, {"a": [], "b": []}
    driver.word(0, -1)
    driver.send(RestoreAsked(ask=Ask("q"), lineage=driver.lineage, rank=0))
    assert driver.replies(RestoreChoice)[2:] == []
    driver.place = place
    driver.host_up("b", "i2")
    assert [(one.tier, one.step) for one in driver.replies(RestoreChoice)][-1] == ("memory", 3)


def test_dead_ranks_are_not_needed_for_a_save():
    driver = running()
    driver.auto = False
    driver.stage(2, durable=True)
    driver.send(TrainerExited(host=HostId("a"), lineage=driver.lineage, rank=0, clean=False, reason="killed"))
    driver.auto = True
    for write in driver.take(Write):
        driver.send(Written(host=write.host, save=write.save))
    assert driver.core.journal.published == (2,)


def test_a_group_of_an_earlier_attempt_is_adopted():
    driver = Driver(tail=history(3), dead=(1,), hosts=("a", "b"))
    driver.world, driver.lineage, driver.place = 2, "1.1.x", {0: "a", 1: "b"}
    driver.stage(5)
    assert driver.core.snapshots.stable == 5
    driver.stage(6, durable=True)
    assert driver.core.journal.published == (3, 6)


def test_a_restore_begun_under_an_earlier_attempt_goes_on():
    driver = Driver(tail=history(3, 5), dead=(1,), hosts=("a", "b"))
    driver.world, driver.lineage, driver.place = 2, "1.1.x", {0: "a", 1: "b"}
    for rank in range(2):
        driver.word(rank, 3)
    for rank in range(2):
        driver.send(RestoreTried(ask=driver.ask(), lineage="1.1.x", rank=rank, step=3, ok=True))
    assert driver.replies(RestoreChoice)[-1].step == 3


# ---------------------------------------------------------------- the end


def leave(driver: Driver, step: int) -> None:
    for rank in range(driver.world):
        driver.send(LeaveAsked(ask=driver.ask(), lineage=driver.lineage, rank=rank, step=step))


def test_leaving_makes_the_newest_step_durable_and_closes_the_log():
    driver = running()
    driver.stage(3)
    leave(driver, 3)
    assert driver.replies(LeaveReply) == [LeaveReply(step=3), LeaveReply(step=3)]
    assert driver.take(Finish)
    assert driver.core.tail is not None
    assert driver.core.tail.intents == ()


def test_leaving_without_any_step():
    driver = running()
    leave(driver, -1)
    assert driver.replies(LeaveReply)[-1].step == -1


def test_leave_barrier_names_missing_ranks():
    driver = running(barrier_timeout_s=20.0)
    driver.send(LeaveAsked(ask=Ask("l"), lineage=driver.lineage, rank=0, step=-1))
    driver.tick(21.0)
    assert driver.replies(Failure)[-1].details["missing_ranks"] == [1]


def test_leaving_fails_with_a_promised_step_that_cannot_be_durable():
    driver = running()
    driver.hold(0, 3, durable=True)
    driver.word(1, 3, durable_due=(3,))
    leave(driver, 3)
    failure = driver.replies(Failure)[-1]
    assert (failure.error, failure.details["step"]) == ("StorageError", 3)
    assert driver.take(Finish) == []


def test_leaving_falls_back_when_nothing_was_promised():
    driver = running()
    driver.stage(2)
    driver.hold(0, 3)
    driver.word(1, 3)
    leave(driver, 3)
    assert driver.replies(LeaveReply)[-1].step == 2


def test_release_saves_the_newest_complete_snapshot():
    driver = running()
    driver.stage(3)
    driver.hold(0, 4)
    driver.send(TrainerExited(host=HostId("a"), lineage=driver.lineage, rank=0, clean=False, reason="killed"))
    driver.send(ReleaseAsked(ask=Ask("r"), reason="gave up"))
    assert driver.replies(LeaveReply)[-1].step == 3
    assert driver.take(Finish)


def test_idle_run_is_released():
    driver = running(idle_timeout_s=60.0)
    driver.stage(3)
    driver.seen = {"a": [], "b": []}
    for _ in range(7):
        driver.tick(10.0)
        driver.report("a")
        driver.report("b")
    assert driver.take(Finish)
    assert driver.core.journal.published == (3,)


# ---------------------------------------------------------------- stopping together


def test_stop_is_confirmed_when_all_have_agreed():
    driver = running()
    driver.stage(4)
    driver.send(StopAsked(reason="preemption", within_s=30.0))
    proposal = driver.advice().proposal
    assert proposal is not None
    assert (proposal.state, proposal.step) == ("proposed", 6)
    driver.word(0, 5, ack_id=proposal.id, ack_ok=True, ack_step=5)
    assert driver.advice().proposal == proposal
    driver.word(1, 5, ack_id=proposal.id, ack_ok=True, ack_step=5)
    confirmed = driver.advice().proposal
    assert confirmed is not None
    assert (confirmed.id, confirmed.state) == (proposal.id, "confirmed")


def test_refusal_brings_a_later_step_and_the_deadline_withdraws():
    driver = running()
    driver.stage(4)
    driver.send(StopAsked(reason="preemption", within_s=30.0))
    first = driver.advice().proposal
    assert first is not None
    driver.word(0, 9, ack_id=first.id, ack_ok=False, ack_step=9)
    second = driver.advice().proposal
    assert second is not None
    assert second.id > first.id
    assert second.step > 9
    driver.stage(9)
    driver.tick(31.0)
    withdrawn = driver.advice().proposal
    assert withdrawn is not None
    assert withdrawn.state == "withdrawn"
    # Too late for a common step: what all have is made durable.
    assert driver.core.journal.published == (9,)


def test_time_based_saves_are_proposed():
    driver = running(save_every_s=50.0)
    driver.stage(1)
    driver.tick(51.0)
    proposal = driver.advice().proposal
    assert proposal is not None
    assert (proposal.kind, proposal.step) == ("save", 3)


# ---------------------------------------------------------------- in use


def test_in_use_while_trainers_of_the_group_are_alive_on_hosts_that_are_up():
    driver = running(host_timeout_s=5.0)
    assert driver.core.in_use
    driver.send(TrainerExited(host=HostId("a"), lineage=driver.lineage, rank=0, clean=False, reason="killed"))
    assert not driver.core.in_use
    driver.join(AB, "h")
    assert driver.core.in_use
    driver.tick(6.0)  # both nodes have vanished, and nobody is left to say that the trainers have
    assert not driver.core.in_use
