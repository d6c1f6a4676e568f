"""What a trainer is told that has waited for seconds, and how long due saves may hold up snapshots, while something starts again."""

from __future__ import annotations

import pytest

from raystate.core.messages import BuildPackage, HostDown, HostId, PaceAsked, PaceReply, Write, Written
from tests.core.driver import AB, Driver, running


def obstacle(driver: Driver) -> str:
    driver.send(PaceAsked(ask=driver.ask(), lineage=driver.lineage, rank=0))
    return driver.replies(PaceReply)[-1].obstacle


def settled() -> Driver:
    """A step is durable, and everybody has been there for a while."""
    driver = running()
    driver.stage(1, promised=True)
    driver.tick(10.0)
    driver.take(Write)
    for host in AB:
        driver.report(host)
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
    driver.tick(4.0)
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
    driver.tick(10.0)
    driver.auto = False
    driver.stage(2, promised=True)
    driver.write()
    assert driver.take(BuildPackage)
    driver.tick(10.0)
    assert ("first package" in obstacle(driver)) is first
    driver.tick(20.0)
    assert obstacle(driver) == ""


def test_due_saves_do_not_give_way_because_a_host_was_away():
    driver = settled()
    for step in (2, 4, 6):
        driver.stage(step, promised=True)
    kept = tuple(driver.key(step) for step in (2, 4, 6))
    driver.tick(3.0)
    assert driver.core.snapshots.keep() == kept
    driver.send(HostDown(host=HostId("b"), reason="killed"))
    driver.tick(10.0)
    driver.host_up("b", "i2")
    driver.report("b", "i2")
    driver.tick(3.0)
    assert driver.core.snapshots.keep() == kept, "their time begins again"
    driver.tick(1.0)
    assert driver.core.snapshots.keep() == kept[:1]
