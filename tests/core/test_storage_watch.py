"""While storage makes progress, no step that is due gives way; where it fails, stands still or is too slow, all but one may."""

from __future__ import annotations

import pytest

from raystate.core.formats.messages import (
    Appended,
    CarriedOut,
    Log,
    Progress,
    SaveId,
    SnapshotId,
    Write,
    Written,
)
from raystate.observe.pace import Pace
from raystate.observe.status import status_of
from tests.core.driver import Driver, running


def settled(**settings: float) -> Driver:
    """A step is durable, and everybody has been there for a while."""
    driver = running(**settings)
    driver.stage(1, promised=True)
    driver.live(10.0)
    driver.take(Write)
    driver.auto = False
    return driver


def due(driver: Driver) -> tuple[SnapshotId, ...]:
    """Three steps are due, and the first is being written."""
    for step in (2, 4, 6):
        driver.stage(step, promised=True)
    return tuple(driver.key(step) for step in (2, 4, 6))


def is_all_kept(driver: Driver) -> bool:
    """Nothing gives way; and trainers are told the same."""
    kept = driver.core.snapshots.keep()
    assert len(kept) in (1, 3)
    driver.tick(0.1)
    assert driver.advice().storage_fails == (len(kept) == 1)
    return len(kept) == 3


def come_back(driver: Driver, host: str, incarnation: str) -> None:
    driver.host_up(host, incarnation)
    driver.report(host, incarnation)


def test_storage_that_stands_still_is_waited_for_until_ten_seconds_after_the_last_progress():
    driver = settled()
    kept = due(driver)
    driver.live(7.0)
    save = driver.core.saves.running
    assert save is not None
    driver.send(Progress(of=save.save, who="a", done_bytes=1, total_bytes=9))
    for done in (1, 0):  # said once more, and late
        driver.live(3.0)
        driver.send(Progress(of=save.save, who="a", done_bytes=done, total_bytes=9))
    driver.send(Progress(of=SaveId("another"), who="a", done_bytes=5, total_bytes=9))
    driver.live(3.0)
    assert is_all_kept(driver)
    driver.live(1.0)
    assert not is_all_kept(driver)
    assert driver.core.snapshots.keep() == kept[:1], "it is being written"
    assert driver.core.journal.troubles == [], "no error of its own: what is lost is told when it is"
    entry = driver.commit()
    driver.send(Appended(seq=entry.seq, outcome="ok"))
    driver.send(CarriedOut(intent=driver.orders("commit")[-1]))
    assert not driver.core.journal.fails, "a step is durable"


def test_what_storage_answers_is_told_of_what_gives_way_and_at_once_in_status():
    """A write is tried for a minute before its host says that it failed: other requests hear of it at once."""
    driver = settled()
    due(driver)
    driver.storage_error = "503 Service Unavailable"
    driver.tick()
    assert status_of(driver.core, driver.now_s, Pace()).storage_problem == "503 Service Unavailable"
    assert not driver.core.journal.fails, "it may pass"
    driver.live(12.0)
    driver.said(r"storage stands still \(503 Service Unavailable\): until a step is durable")
    for host, held in driver.staged.items():
        driver.staged[host] = [one for one in held if one.step != 4]
    driver.report_both()
    driver.said("step 4 gave way to newer ones while storage fails: 503 Service Unavailable")
    driver.storage_error = ""
    driver.tick()
    assert status_of(driver.core, driver.now_s, Pace()).storage_problem == "it stands still", "a request works, and no save does"
    driver.auto = True
    driver.write()
    driver.tick()
    assert status_of(driver.core, driver.now_s, Pace()).storage_problem == ""


@pytest.mark.parametrize("first", [True, False])
def test_the_first_package_may_take_as_long_as_its_builder_needs_to_load(first: bool):
    driver = running() if first else settled()
    driver.live(10.0)
    driver.auto = False
    due(driver)
    driver.write()
    driver.live(20.0)
    assert is_all_kept(driver) is first
    driver.live(10.0)
    assert not is_all_kept(driver), "others wait for those who wait"


def test_a_host_that_is_away_is_not_storages_doing():
    driver = settled()
    due(driver)
    driver.live(3.0)
    for _ in range(5):
        driver.live(2.0, "a")
        assert is_all_kept(driver), "what it holds may be back with it"
    come_back(driver, "b", "i2")
    driver.live(9.0)
    assert is_all_kept(driver)
    driver.live(1.0)
    assert not is_all_kept(driver)


@pytest.mark.parametrize("host", ["b", "c"])
def test_a_host_that_comes_and_goes_does_not_hold_up_snapshots_without_end(host: str):
    """c has no rank: it holds up nothing."""
    driver = settled(host_timeout_s=2.0)
    if host == "c":
        come_back(driver, "c", "i1")
    due(driver)
    held_s = 0.0
    for number in range(40):
        driver.live(2.0, *({"a", "b"} - {host}))
        come_back(driver, host, f"i{number + 2}")
        driver.live(2.0, "a", "b", *((host,) if host == "c" else ()))
        held_s += 4.1 * is_all_kept(driver)
    assert held_s <= (40.0 if host == "b" else 13.0)


def test_a_write_of_an_absent_host_is_no_failure_of_storage():
    driver = settled()
    driver.stage(2, promised=True)
    for _ in range(5):
        write = driver.take(Write)[0]
        driver.send(Written(host=write.host, save=write.save, error="no HostActor", away=True))
        driver.live(2.0)
    assert not driver.advice().storage_fails
    assert driver.take(Write), "no try has been used up"


def test_a_snapshot_stays_until_its_commit_is_in_the_log():
    """A Coordinator that dies before that leaves it to the next one."""
    driver = settled()
    kept = due(driver)
    driver.commit()
    driver.live(20.0)
    assert driver.core.snapshots.keep() == kept[:1]


def test_the_log_says_when_snapshots_are_held_up():
    driver = settled()

    def lines() -> list[str]:
        return [one.text for one in driver.take(Log) if "held up" in one.text]

    driver.stage(2, promised=True)
    driver.stage(4, promised=True)
    driver.stage(5)
    assert lines() == [
        "snapshots are held up after step 5: step 2, step 4 wait for storage in all other slots; save less often, or set more "
        "snapshot_slots"
    ]
    driver.report("a")
    driver.live(5.0)
    assert lines() == [], "once"
