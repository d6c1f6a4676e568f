"""Which lines people see, from level "info" on: each thing once."""

from __future__ import annotations

import pytest

from raystate.core.formats.commands import Log
from raystate.core.formats.messages import Failure
from tests.core.driver import AB, Driver, running


def seen(driver: Driver) -> list[str]:
    return [f"{one.level}: {one.text}" for one in driver.take(Log) if one.level != "debug"]


@pytest.mark.parametrize("hosts", [AB, AB[:1]])
def test_a_start_is_one_line(hosts: list[str]) -> None:
    driver = Driver(replicas=1)
    driver.join(hosts)
    driver.restore()
    assert seen(driver) == ["info: begins without a step: the run has no step yet"]


def test_a_durable_step_is_one_line_and_the_one_that_goes_for_it_none() -> None:
    driver = running(keep_last=1)
    driver.take(Log)
    for step in (1, 2):
        driver.stage(step, promised=True)
        driver.commit()
    assert seen(driver) == ["info: step 1 is durable", "info: step 2 is durable"]


@pytest.mark.parametrize(
    ("hosts", "launched", "told"),
    [
        (AB, True, []),  # its launcher tells it, with what comes next
        (AB, False, ["warning: lineage 1.2.g has ended: rank 1 on host b exited: killed"]),
        (AB[:1], False, []),  # the only rank is the script
    ],
)
def test_a_death_is_told_to_those_who_would_not_know(hosts: list[str], launched: bool, told: list[str]) -> None:
    driver = Driver(launched=launched)
    driver.join(hosts)
    driver.goes_on(driver.restore())
    driver.take(Log)
    driver.exits(len(hosts) - 1, reason="killed")
    assert seen(driver) == told
    driver.join(hosts, "h")
    driver.restore()
    assert seen(driver) == [], "the ledger has a line for all of it, once the next group has gone on"


def test_what_the_asking_ranks_raise_is_not_said_beside_it() -> None:
    driver = Driver()
    driver.join(AB[:1])
    driver.ask_all(step=7)
    assert driver.replies(Failure)
    assert [line for line in seen(driver) if line.startswith("error")] == []
