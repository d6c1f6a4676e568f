"""What a trainer is told that has waited for seconds, and how long due saves may hold up snapshots, while something starts again."""

from __future__ import annotations

import pytest

from raystate.core.messages import BuildPackage, Failure, HostDown, HostId, PaceAsked, PaceReply, SnapshotId, Write, Written
from tests.core.driver import Driver, running


def obstacle(driver: Driver) -> str:
    driver.send(PaceAsked(ask=driver.ask(), lineage=driver.lineage, rank=0))
    return driver.replies(PaceReply)[-1].obstacle


def settled() -> Driver:
    """A step is durable, and everybody has been there for a while."""
    driver = running()
    driver.stage(1, promised=True)
    driver.live(10.0)
    driver.take(Write)
    driver.auto = False
    return driver


def test_storage_is_to_blame_for_a_write_that_takes_long():
    driver = settled()
    driver.stage(2, promised=True)
    assert driver.take(Write)
    assert obstacle(driver) == ""


def test_a_host_that_is_away_is_an_obstacle_and_has_just_started_when_it_is_back():
    driver = settled()
    driver.stage(2, promised=True)
    driver.send(HostDown(host=HostId("b"), reason="killed"))
    assert obstacle(driver) == "host b away"
    driver.host_up("b", "i2")
    driver.report("b", "i2")
    assert "just started" in obstacle(driver)
    driver.live(4.0)
    assert obstacle(driver) == ""


def test_a_host_that_is_back_before_anybody_took_it_for_down_has_just_started():
    driver = settled()
    driver.stage(2, promised=True)
    driver.host_up("b", "i2")
    driver.report("b", "i2")
    assert "just started" in obstacle(driver)


def test_storage_that_fails_is_to_blame_whatever_else_there_is():
    driver = settled()
    driver.stage(2, promised=True)
    write = driver.take(Write)[0]
    driver.send(Written(host=HostId("a"), save=write.save, error="disk full"))
    driver.send(HostDown(host=HostId("b"), reason="killed"))
    assert obstacle(driver) == ""


@pytest.mark.parametrize("first", [True, False])
def test_the_first_package_may_take_as_long_as_its_builder_needs_to_load(first: bool):
    driver = settled() if not first else running()
    driver.live(10.0)
    driver.auto = False
    driver.stage(2, promised=True)
    driver.write()
    assert driver.take(BuildPackage)
    driver.live(10.0)
    assert ("first package" in obstacle(driver)) is first
    driver.live(20.0)
    assert obstacle(driver) == ""


def due(driver: Driver) -> tuple[SnapshotId, ...]:
    """Three steps are due, and storage takes none."""
    for step in (2, 4, 6):
        driver.stage(step, promised=True)
    return tuple(driver.key(step) for step in (2, 4, 6))


def come_back(driver: Driver, host: str, incarnation: str) -> None:
    driver.host_up(host, incarnation)
    driver.report(host, incarnation)


def test_due_saves_do_not_give_way_because_a_host_is_away():
    driver = settled()
    kept = due(driver)
    driver.live(3.0)
    driver.send(HostDown(host=HostId("b"), reason="killed"))
    for _ in range(5):
        driver.live(2.0, "a")
        assert driver.core.snapshots.keep() == kept, "what it holds may be back with it"
    come_back(driver, "b", "i2")
    driver.live(3.0)
    assert driver.core.snapshots.keep() == kept, "their time begins again"
    driver.live(1.0)
    assert driver.core.snapshots.keep() == kept[:1]


def test_a_host_that_is_silent_is_away_long_before_it_counts_as_down():
    driver = settled()
    kept = due(driver)
    driver.live(6.0, "a")
    assert driver.core.memory.hosts[HostId("b")].up
    assert obstacle(driver) == "host b away"
    assert driver.core.snapshots.keep() == kept


@pytest.mark.parametrize("host", ["b", "c"])
def test_a_host_that_comes_and_goes_does_not_hold_up_snapshots_without_end(host: str):
    """c has no rank: it holds up nothing."""
    driver = settled()
    if host == "c":
        come_back(driver, "c", "i1")
    kept = due(driver)
    held_s = 0.0
    for number in range(40):
        driver.send(HostDown(host=HostId(host), reason="killed"))
        driver.tick(0.5)
        come_back(driver, host, f"i{number + 2}")
        driver.live(2.0)
        if driver.core.snapshots.keep() == kept:
            held_s += 2.5
    assert held_s <= (40.0 if host == "b" else 5.0)


def test_a_write_that_nobody_was_there_to_do_is_not_a_failure_of_storage():
    driver = settled()
    driver.stage(2, promised=True)
    for _ in range(5):
        write = driver.take(Write)[0]
        driver.send(Written(host=write.host, save=write.save, error="no HostActor", away=True))
        assert obstacle(driver) == f"host {write.host} away"
        driver.live(2.0)
    assert not driver.advice().storage_fails
    assert driver.take(Write), "no try has been used up"


def test_a_snapshot_stays_until_its_commit_is_in_the_log():
    """A Coordinator that dies before that leaves it to the next one."""
    driver = settled()
    kept = due(driver)
    driver.commit()
    driver.live(10.0)
    assert kept[0] in driver.core.snapshots.keep()


def test_a_question_of_an_earlier_lineage_is_refused():
    driver = settled()
    driver.send(PaceAsked(ask=driver.ask(), lineage="1.1.other", rank=0))
    assert driver.replies(PaceReply) == []
    assert driver.replies(Failure)
