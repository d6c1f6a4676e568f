"""What a run says of itself."""

from __future__ import annotations

from raystate.core.formats.messages import Appended, CarriedOut, HostId, SaveId, StopAsked, Tick, Written
from raystate.observe.long_waits import LongWaits
from raystate.observe.pace import Pace
from raystate.observe.status import UnderWay, status_of, under_way
from tests.core.driver import Driver


def test_a_run_without_trainers():
    status = status_of(Driver(hosts=("a",)).core, 100.0, Pace())
    assert (status.attempt, status.lineage, status.training, status.world) == (1, "", False, None)
    assert (status.newest_step, status.memory_step, status.durable_step) == (-1, -1, -1)
    assert (status.recovery, status.end, status.saves, status.hosts) == ("idle", "open", (), ())


def saving() -> Driver:
    """Step 5 is being written by two hosts, which don't say that they have."""
    driver = Driver()
    driver.join(["a", "b"])
    driver.restore()
    driver.auto = False
    driver.stage(5, promised=True)
    return driver


def test_a_run_that_saves_and_loses_a_host():
    driver = saving()
    driver.now_s += 3.0
    status = status_of(driver.core, driver.now_s, Pace())
    assert (status.training, status.world, status.lineage) == (True, 2, driver.lineage)
    assert (status.newest_step, status.memory_step, status.durable_step) == (5, 5, -1)
    assert [(save.step, save.phase, save.since_s) for save in status.saves] == [(5, "writing", 3.0)]
    assert [(host.host, host.ranks, host.steps, host.up) for host in status.hosts] == [
        ("a", (0,), (5,), True),
        ("b", (1,), (5,), True),
    ]
    assert [host.silent_s for host in status.hosts] == [3.0, 3.0]
    driver.lose("b", "its node is gone")
    status = status_of(driver.core, driver.now_s, Pace())
    assert [(host.up, host.why_down, host.steps) for host in status.hosts] == [
        (True, "", (5,)),
        (False, "down: its node is gone", ()),
    ]


def test_a_host_keeps_the_name_of_its_machine_when_it_is_down():
    driver = Driver()
    driver.join(["a", "b"])
    driver.lose("b")
    found = status_of(driver.core, driver.now_s, Pace()).hosts
    assert [(one.machine, one.up) for one in found] == [("machine-a", True), ("machine-b", False)]


def test_a_host_that_leaves_as_announced_is_not_down():
    """By Ray's word or only by its silence; it is there again as soon as it speaks."""
    for by_word in (True, False):
        driver = Driver(host_timeout_s=10.0)
        driver.join(["a", "b"])
        driver.send(StopAsked(host=HostId("b"), within_s=8.0, reason="drained by Ray"))
        found = status_of(driver.core, driver.now_s + 3.0, Pace()).hosts
        assert [(one.host, one.leaves_in_s, one.why_leaves) for one in found] == [("a", None, ""), ("b", 5.0, "drained by Ray")]
        if by_word:
            driver.lose("b")
        driver.live(30.0, "a")
        driver.said("host b is gone, as announced: drained by Ray")
        assert [host.host for host in status_of(driver.core, driver.now_s, Pace()).hosts] == ["a"]
        driver.live(100.0, "a")
        assert [host.host for host in status_of(driver.core, driver.now_s, Pace()).hosts] == ["a"], "for ever"
        driver.host_up("b", "i2")
        assert [(host.host, host.up) for host in status_of(driver.core, driver.now_s, Pace()).hosts] == [("a", True), ("b", True)]
        driver.lose("b")
        assert [host.up for host in status_of(driver.core, driver.now_s, Pace()).hosts] == [True, False], "that was not announced"


def test_what_was_restored_from_memory_is_in_memory():
    driver = Driver()
    driver.join(["a", "b"])
    driver.restore()
    driver.stage(5)
    driver.join(["a", "b"], group="again")
    assert driver.restore().tier == "memory"
    assert status_of(driver.core, driver.now_s, Pace()).memory_step == 5


def test_a_save_is_under_way_until_it_is_visible_and_a_restore_until_all_have_tried():
    driver = saving()
    assert under_way(driver.core) == [UnderWay(of="a1k1", step=5)]
    entry = driver.commit()
    driver.send(Appended(seq=entry.seq, outcome="ok"))
    assert under_way(driver.core) == [UnderWay(of="a1k1", step=5)], "it is in the log, and no reader finds it"
    [publish] = driver.orders("commit")
    driver.send(CarriedOut(intent=publish))
    assert under_way(driver.core) == []
    driver.auto = True
    driver.join(["a", "b"], group="again")
    choice = driver.restore(ok=False)  # no rank has tried it
    assert under_way(driver.core) == [UnderWay(of=choice.begins, step=5, tier="memory")]
    driver.tried(choice)
    assert under_way(driver.core) == []


def test_a_save_that_is_tried_again_is_under_way_since_its_first_order():
    driver = saving()
    first_s = driver.now_s
    driver.send(Written(host=HostId("a"), save=SaveId("a1k1"), error="StorageError: 503 Service Unavailable"))
    driver.tick(60.0)
    [again] = under_way(driver.core)
    assert (again.of, again.since_s) == ("a1k2", first_s), "from the first order to write it"
    waits = LongWaits()
    waits.look([again], Tick(), driver.now_s)
    assert waits.since_s("a1k2") == first_s
