"""Promises that are lost, and whose trainers died before they could ask: who ends the run is told, once, and of nothing else."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from raystate.core.messages import (
    CommitsFound,
    Failure,
    FindCommits,
    FlushAsked,
    FlushReply,
    HostId,
    HostReported,
    Invalidate,
    Invalidated,
    LeaveReply,
    ReleaseAsked,
    RestoreChoice,
    SnapshotId,
    Staged,
    TrainerExited,
    Write,
    Written,
)
from raystate.core.own_promises import NAMED_BROKEN, OwnPromises
from raystate.core.trainer import Trainer
from raystate.core.untold import EXPLAINED, REMEMBERED, Untold
from raystate.core.words import trainer_word_from_json, trainer_word_to_json
from tests.core.driver import AB, Driver, history, running

NO_SLOT = "no slot became free"


def dies(driver: Driver, rank: int, **last_words: Any) -> None:
    driver.send(
        TrainerExited(host=HostId(driver.place[rank]), lineage=driver.lineage, rank=rank, clean=False, reason="died", **last_words)
    )


def breaks_two() -> Driver:
    """Step 2 came to nothing on rank 0; step 4 is complete, and waits for storage."""
    driver = running(keep_last=None)
    driver.auto = False
    driver.stage(4, promised=True)
    return driver


def goes_on(driver: Driver) -> None:
    """The next group restores what there is."""
    driver.auto = True
    driver.join(AB, "next")
    driver.restore()


def closes(driver: Driver, *asked: SnapshotId) -> list[str]:
    """It saves one more step: what close() says."""
    driver.stage(9, promised=True)
    for _ in range(20):
        driver.tick(3.0)
        for host in AB:
            driver.report(host)
    driver.leave(driver.key(9), *asked, driver.key(9))
    for _ in range(20):
        driver.tick(3.0)
        for host in AB:
            driver.report(host)
    reply = driver.replies(LeaveReply)[0]
    return [*reply.untold, *reply.errors]


def ends(driver: Driver) -> list[str]:
    goes_on(driver)
    return closes(driver)


def test_last_words():
    """Nobody has seen a report of it."""
    driver = breaks_two()
    dies(driver, 0, broken=((driver.key(2), NO_SLOT),))
    assert ends(driver) == [f"step 2, saved before a restart: {NO_SLOT}"]


def test_what_is_beyond_the_restored_step_is_made_again():
    driver = breaks_two()
    dies(driver, 0, broken=((driver.key(5), NO_SLOT),), promised=driver.key(5))
    assert ends(driver) == []


def test_late_news():
    """The next group has restored when the HostActor tells of the end."""
    driver = breaks_two()
    old, two, five = driver.lineage, driver.key(2), driver.key(5)
    dies(driver, 0)
    goes_on(driver)
    driver.send(
        TrainerExited(host=HostId("b"), lineage=old, rank=1, clean=False, reason="died", broken=((two, NO_SLOT), (five, NO_SLOT)))
    )
    assert closes(driver) == [f"step 2, saved before a restart: {NO_SLOT}"]


def test_a_step_that_was_saved_again_by_force_and_never_copied():
    """The run goes on from the first save of that step, and never makes it again."""
    driver = running(keep_last=None)
    driver.stage(4)
    dies(driver, 0, promised=SnapshotId(driver.lineage, 4, 1))
    assert ends(driver) == ["step 4, saved before a restart: the trainers ended before all ranks had copied it"]


def test_the_promise_that_was_restored_is_not_lost():
    driver = running(keep_last=None)
    driver.stage(4, promised=True)
    dies(driver, 0, promised=driver.key(4))
    assert ends(driver) == []


def test_who_waits_when_its_group_dies_has_heard_nothing():
    driver = breaks_two()
    two, four = driver.key(2), driver.key(4)
    word = driver.numbers[0]
    driver.send(FlushAsked(ask=driver.ask(), lineage=driver.lineage, rank=0, promised=(four,), broken=((two, NO_SLOT),), word=word))
    driver.flush(1, two, four)
    assert driver.replies(FlushReply) == []
    dies(driver, 0)
    assert len(driver.replies(FlushReply)) == 2, "nobody is there to read it"
    (error,) = ends(driver)
    assert error.startswith("step 2, saved before a restart: ")


def test_retention_has_retired_it():
    """Copies to peers are slow: a step that is durable and gone again loses its copy in memory."""
    driver = running(keep_last=1, replicas=1)
    for step in (1, 2):
        driver.stage(step, promised=True)
        for _ in range(3):
            driver.tick(1.0)
            for host in AB:
                driver.report(host)
    driver.staged["b"] = [one for one in driver.staged["b"] if one.step != 1]
    driver.report("b")
    assert driver.core.saves.untold.texts("another", (), lambda _: False) == ()


def test_a_step_that_nobody_will_make_again_as_the_run_is_released():
    """The function has returned without close(), and Ray ended its processes while one was still copying."""
    driver = running(keep_last=None)
    driver.stage(2, promised=True)
    driver.hold(0, 3, promised=True)
    driver.word(1, 3, pending=(3,))
    for rank in range(2):
        dies(driver, rank, promised=driver.key(3))
    for host in AB:
        driver.seen[host] = []
        driver.report(host)
    driver.send(ReleaseAsked(ask=driver.ask(), reason="finished"))
    for _ in range(10):
        driver.tick(3.0)
        for host in AB:
            driver.report(host)
    (reply,) = driver.replies(LeaveReply)
    assert (reply.step, reply.untold) == (2, ("step 3: the trainers ended before all ranks had copied it",))


def test_a_new_coordinator_hears_of_a_group_that_died_with_the_one_before():
    driver = Driver(tail=history(1), dead=(1,), hosts=("a", "b"))
    driver.world, driver.lineage, driver.place = 2, "1.2.g0", {0: "a", 1: "b"}
    for host in AB:
        driver.report(host)
    before = SnapshotId("1.1.x", 7)  # of a group that was restored since, at a step before it
    driver.send(
        TrainerExited(
            host=HostId("a"), lineage="1.1.x", rank=0, clean=False, reason="died", broken=((before, NO_SLOT),), promised=before
        )
    )
    dies(driver, 0, broken=((SnapshotId("1.2.g0", 1), NO_SLOT),))
    driver.send(ReleaseAsked(ask=driver.ask(), reason="gave up"))
    driver.tick(60.0)
    for host in AB:
        driver.report(host)
    assert driver.replies(LeaveReply)[0].untold == (f"step 1: {NO_SLOT}",)


def test_one_loss_is_told_once():
    """The next group goes on from a step whose save is under way: it is promised anew, fails, and its ranks ask about it themselves."""
    driver = breaks_two()
    four = driver.key(4)
    dies(driver, 0)
    driver.join(AB, "next")

    def turn() -> None:
        for one in driver.take(Invalidate):
            held = driver.staged.get(one.host, [])
            driver.staged[one.host] = [piece for piece in held if (piece.lineage, piece.step) == (one.lineage, one.step)]
            driver.send(Invalidated(host=one.host, step=one.step, attempt=one.attempt, seq=one.seq))
        for host in AB:
            driver.report(host)

    for rank in range(2):
        driver.ask_restore(rank)
    turn()
    turn()
    driver.tried(driver.replies(RestoreChoice)[-1])
    turn()
    driver.goes_on(driver.replies(RestoreChoice)[-1])
    for _ in range(4):
        for order in driver.take(Write):
            driver.send(Written(host=order.host, save=order.save, error="notes.txt is in the way"))
        driver.tick(40.0)
    driver.auto = True
    (error,) = closes(driver, four)
    assert error.startswith("step 4: save ")


def test_many_are_named_and_few_explained():
    untold = Untold()
    for step in range(1, 31):
        untold.lost(SnapshotId("1.1.g", step), "why")
    untold.told([SnapshotId("1.1.g", 30)])
    untold.saved(SnapshotId("1.1.g", 29))
    first, *others = untold.texts("next", (), lambda _: False)
    assert first == f"steps {', '.join(str(step) for step in range(1, 29 - EXPLAINED))}, saved before a restart: the log says why"
    assert others == [f"step {step}, saved before a restart: why" for step in range(29 - EXPLAINED, 29)]


def test_a_word_has_the_newest_of_what_is_broken():
    own = OwnPromises()
    for step in range(1, 100):
        own.make(SnapshotId("1.1.x", step))
        own.broke(SnapshotId("1.1.x", step), "w" * 1000)
    assert [step for _, step, _, _ in own.broken_in_word] == [*range(100 - NAMED_BROKEN, 100)]
    assert own.newest_in_word("1.1.x") == (99, 0)
    assert own.newest_in_word("1.2.x") is None
    own.told(own.made[:-1])
    assert own.broken_in_word == (("1.1.x", 99, 0, own.broken[0][1][:120]),)


def test_a_word_tells_also_what_a_restore_of_a_living_trainer_gave_up():
    """It can't ask about it any more if it dies in the next lineage: the newest word is what its HostActor knows of it."""
    trainer = Trainer(0, 1, "1.1.x")
    trainer.begin("1.2.x", None)
    trainer.on_save(4, force=True, host_word=None)
    trainer.promises.broke(SnapshotId("1.2.x", 4), NO_SLOT)
    trainer.begin("1.3.x", SnapshotId("1.1.x", 3))
    word = trainer_word_from_json(trainer_word_to_json(trainer.word()))
    assert (word.lineage, word.promised, word.broken) == ("1.3.x", None, (("1.2.x", 4, 0, NO_SLOT),))


def test_a_promise_of_a_line_that_had_gone_back_is_lost_where_the_older_line_goes_on():
    """Seed 9379: a rank had restored step 12 of 15 and saved 14 when the group died; the next one went on from 15, and nobody named 14."""
    old, back = "1.2.x", "1.3.x"
    untold = Untold()
    untold.restored(old, SnapshotId("", -1))
    untold.restored(back, SnapshotId(old, 12))
    untold.exited(TrainerExited(host=HostId("a"), lineage=back, rank=1, clean=False, reason="died", promised=SnapshotId(back, 14)))
    assert list(untold.restored("1.4.y", SnapshotId(old, 15))) == [SnapshotId(back, 14)]


def test_a_promise_of_the_line_that_goes_on_is_not():
    """Older ones are known to the Coordinator, and newer ones are made again."""
    line = "1.2.x"
    for step in (14, 15, 16):
        untold = Untold()
        untold.restored(line, SnapshotId("", -1))
        untold.exited(
            TrainerExited(host=HostId("a"), lineage=line, rank=1, clean=False, reason="died", promised=SnapshotId(line, step))
        )
        assert untold.restored("1.3.y", SnapshotId(line, 15)) == {}


def test_what_is_forgotten_is_counted():
    untold = Untold()
    for step in range(REMEMBERED + 3):
        untold.lost(SnapshotId("1.1.g", step), "why")
    first, *_ = untold.texts("next", (), lambda _: False)
    assert first == "3 earlier steps, saved before a restart: the log names them"
    first, *_ = untold.texts("g", (), lambda _: False) or [""]
    assert first == "", "it knows of its own"
    untold.told([SnapshotId("1.1.g", REMEMBERED)])
    assert "earlier" not in untold.texts("next", (), lambda _: False)[0]


def inherits(*, unread: int = 0) -> Driver:
    """A new Coordinator; trainers of the attempt before go on."""
    driver = Driver(tail=history(1), dead=(1,), hosts=("a", "b"), unread=unread)
    driver.world, driver.lineage, driver.place = 2, "1.1.x", {0: "a", 1: "b"}
    return driver


def test_the_log_is_asked_first_and_the_reason_is_kept():
    """A promise of the attempt before, whose entries were not all read back: its loss was looked for and forgotten."""
    for unread in (0, 9):
        driver = inherits(unread=unread)
        driver.stage(3)
        two = driver.key(2)
        for rank in (0, 1):
            dies(driver, rank, broken=((two, NO_SLOT),))
        driver.seen = {"a": [], "b": []}
        driver.numbers.clear()
        goes_on(driver)
        for asked in driver.take(FindCommits):
            driver.send(CommitsFound(snapshots=asked.snapshots, found=()))
        assert [NO_SLOT in error for error in closes(driver)] == [True]


def test_whoever_waits_for_a_broken_copy_is_told_once_the_log_is_read():
    """It waited until its deadline, of 600 s, although the reason was known."""
    driver = inherits(unread=9)
    driver.hold(0, 3, promised=True)
    driver.word(1, 3, broken=((driver.key(3), NO_SLOT),))
    driver.flush(0, driver.key(3))
    (asked,) = driver.take(FindCommits)
    driver.send(CommitsFound(snapshots=asked.snapshots, found=()))
    (reply,) = driver.replies(FlushReply)
    assert len(reply.errors) == 1 and NO_SLOT in reply.errors[0]


def test_last_words_that_a_new_coordinator_hears_after_the_next_group_has_joined():
    """HostActors tell them again when they first hear of it, and that may be by the advice that the join brings."""
    driver = inherits()
    old = driver.lineage
    for rank, host in enumerate(AB):
        driver.staged[host] = [Staged(rank=rank, world=2, lineage=old, step=3, layout="L", promised=False)]
        driver.report(host)
    driver.join(AB, group="h")
    for rank, host in enumerate(AB):
        driver.send(
            TrainerExited(
                host=HostId(host), lineage=old, rank=rank, clean=False, reason="died", broken=((SnapshotId(old, 2), NO_SLOT),)
            )
        )
    assert driver.restore().step == 3
    assert [NO_SLOT in error for error in closes(driver)] == [True]


def released(driver: Driver) -> tuple[str, ...]:
    """Nobody trains any more: what the end of the run says."""
    driver.seen = {"a": [], "b": []}
    driver.send(ReleaseAsked(ask=driver.ask(), reason="gave up"))
    for host in AB:
        driver.report(host)
    (reply,) = driver.replies(LeaveReply)
    return reply.untold


def test_a_release_names_every_promise_that_memory_has_in_part():
    """A dead trainer's last words have the newest one only."""
    driver = running()
    for step in (1, 2):
        driver.hold(0, step, promised=True)
        driver.word(1, step, pending=(*range(1, step + 1),))
    for rank in (0, 1):
        dies(driver, rank, promised=driver.key(2))
    assert [text.partition(":")[0] for text in released(driver)] == ["step 1", "step 2"]


def test_a_release_names_what_the_rank_that_fails_was_promised():
    driver = running()
    driver.stage(4, promised=True)
    driver.hold(0, 5, promised=True)
    driver.word(1, 5, pending=(5,))
    dies(driver, 0)
    assert [text.partition(":")[0] for text in released(driver)] == ["step 5"]


def test_a_release_does_not_name_a_step_that_was_made_again():
    driver = running()
    five = driver.key(5)
    driver.hold(0, 5, promised=True)
    driver.word(1, 5, broken=((five, NO_SLOT),))
    driver.stage(5, promised=True, again=1)
    for rank in (0, 1):
        dies(driver, rank, promised=driver.key(5, 1), broken=((five, NO_SLOT),) if rank else ())
    assert released(driver) == ()


def test_a_group_that_does_not_restore_is_told_of_the_one_before():
    driver = running()
    driver.stage(1, promised=True)
    driver.hold(0, 2, promised=True)
    driver.word(1, 2, pending=(2,))
    for rank in (0, 1):
        dies(driver, rank, promised=driver.key(2))
    driver.join(AB, "next")
    (text,) = closes(driver)
    assert text.startswith("step 2, saved before a restart: ")


def test_last_words_of_a_group_before_the_one_that_a_new_coordinator_finds():
    """The group that is there has restored since, and made those steps again: its Coordinator is gone, but hosts know."""
    driver = inherits()
    driver.lineage = "1.3.h"
    restored = Invalidate(host=HostId("a"), lineage="1.1.g", step=3, by="1.3.h", attempt=1, seq=2)
    for host in AB:
        driver.send(HostReported(summary=replace(driver.summary(host), base=restored)))
    for rank, host in enumerate(AB):
        driver.word(rank, 20)
        driver.send(
            TrainerExited(
                host=HostId(host), lineage="1.1.g", rank=rank, clean=False, reason="died", promised=SnapshotId("1.1.g", 7)
            )
        )
    driver.stage(25, promised=True)
    driver.leave(driver.key(25), driver.key(25))
    assert [(reply.step, reply.untold) for reply in driver.replies(LeaveReply)] == [(25, ())] * 2


def test_a_release_that_fails_names_each_step_once():
    driver = running()
    driver.hold(0, 2, promised=True)
    driver.word(1, 2, broken=((driver.key(2), NO_SLOT),))
    driver.auto = False
    driver.stage(3, promised=True)
    for rank in (0, 1):
        dies(driver, rank, promised=driver.key(3))
    driver.seen = {"a": [], "b": []}
    driver.send(ReleaseAsked(ask=driver.ask(), reason="gave up"))
    for _ in range(400):
        for order in driver.take(Write):
            driver.send(Written(host=order.host, save=order.save, error="the disk is full"))
        driver.live(3.0, *AB)
    (failure,) = driver.replies(Failure)
    assert re.findall(r"(?:^|; )step (\d)\b", failure.message) == ["3", "2"], failure.message
