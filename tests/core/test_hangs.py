"""Trainers that make no step any more."""

from __future__ import annotations

import dataclasses

from raystate.core.formats.host_messages import Connected, Disconnected, Examined, Kill
from raystate.core.formats.messages import EndTrainers, FlushAsked, HostId, TrainerExited
from raystate.core.host.machine import Host
from tests.core.driver import Driver, running, training

LIMIT_S = 30.0


def ended(driver: Driver) -> list[EndTrainers]:
    found = [one for one in driver.out if isinstance(one, EndTrainers)]
    driver.out.clear()
    return found


def later(driver: Driver, seconds: float) -> None:
    """Time passes in which both hosts go on reporting."""
    driver.now_s += seconds
    driver.report_both()
    driver.tick()


def test_where_all_are_level_all_are_meant():
    driver = training(hang_timeout_s=LIMIT_S)
    later(driver, LIMIT_S + 1)
    assert {(one.host, one.hanging) for one in ended(driver)} == {("a", (0,)), ("b", (1,))}


def test_any_call_is_a_sign_of_life():
    """A loop that saves each hour, and asks at each step whether it is to stop."""
    driver = training(hang_timeout_s=LIMIT_S)
    for _ in range(4):
        driver.now_s += LIMIT_S / 2
        driver.say(4)
        later(driver, 0.1)
    assert not ended(driver)
    later(driver, LIMIT_S + 1)
    assert len(ended(driver)) == 2, "they say nothing any more"


def test_of_all_that_hang_the_stacks_are_told():
    driver = training(hang_timeout_s=LIMIT_S)
    later(driver, LIMIT_S + 1)
    for rank in (0, 1):
        driver.exits(rank, reason="hung", hung=True, stack=f"at {rank}")
    assert [one for one in driver.lines if " was at\n" in one] == ["rank 0 was at\nat 0", "rank 1 was at\nat 1"]


def test_without_a_limit_it_is_named_once():
    driver = training(barrier_timeout_s=20.0)
    driver.word(0, 5)
    for _ in range(3):
        later(driver, 21.0)
    assert [one for one in driver.lines if "made no step" in one] == [
        "rank 1 (host b) made no step for 21 s after step 4, and the others wait"
    ]
    driver.word(1, 5)
    driver.stage(6)
    later(driver, 0.1)
    driver.out.clear()
    later(driver, 200.0)
    assert any("made no step" in one for one in driver.lines), "another time"
    assert not ended(driver)


def test_a_script_that_pauses_as_long_as_before_is_nothing_new():
    driver = running(barrier_timeout_s=20.0)
    for step in (1, 2):
        driver.stage(step)
        later(driver, 0.1)
    later(driver, 50.0)  # it evaluates: the first such pause is told
    driver.stage(3)
    later(driver, 0.1)
    assert sum("made no step" in one for one in driver.lines) == 1
    later(driver, 100.0)
    assert sum("made no step" in one for one in driver.lines) == 1
    later(driver, 60.0)
    assert sum("made no step" in one for one in driver.lines) == 2


def test_a_section_has_its_own_time():
    """Rank 1 evaluates; rank 0 waits for it in its next step, as long as the section may take."""
    driver = training(hang_timeout_s=LIMIT_S)
    driver.word(1, 4, section="eval", section_s=10 * LIMIT_S)
    for _ in range(4):
        later(driver, 2 * LIMIT_S)
    assert not ended(driver)
    driver.word(1, 4)
    later(driver, 1.0)
    assert not ended(driver), "it has just come out of it"
    later(driver, LIMIT_S)
    assert {one.hanging for one in ended(driver)} == {(0,), (1,)}


def test_a_section_that_takes_too_long_hangs_and_is_named():
    """Its time-out is shorter than others may take, and those that wait are not meant."""
    driver = training(hang_timeout_s=LIMIT_S)
    driver.word(1, 4, section="data", section_s=10.0)
    later(driver, 9.0)
    assert not ended(driver)
    later(driver, 2.0)
    (order,) = ended(driver)
    assert order.hanging == (1,)
    assert order.reason == "rank 1 (host b) made no step for 11 s after step 4, in section 'data', and the others wait"


def test_a_rank_that_is_behind_one_in_a_section_waits_for_nothing():
    driver = training(hang_timeout_s=LIMIT_S)
    driver.word(1, 5, section="eval", section_s=10 * LIMIT_S)
    later(driver, LIMIT_S + 1)
    assert [one.hanging for one in ended(driver)] == [(0,)]


def test_others_may_be_ahead_of_a_rank_as_long_as_its_section_lasts():
    driver = training(barrier_timeout_s=20.0)
    driver.word(1, 4, section="eval", section_s=100.0)
    for step in (5, 6, 7, 8):
        driver.word(0, step)
        later(driver, 21.0)
        assert driver.core.snapshots.failure is None
    later(driver, 30.0)
    assert driver.core.snapshots.failure is not None
    assert "rank 1 (host b)" in driver.core.snapshots.failure.message


def test_nobody_hangs_while_storage_keeps_them_waiting():
    driver = running(hang_timeout_s=LIMIT_S)
    driver.auto = False
    driver.stage(4, promised=True)
    driver.send(FlushAsked(ask=driver.ask(), lineage=driver.lineage, rank=0, word=driver.numbers[0]))
    later(driver, LIMIT_S * 3)
    assert driver.core.saves.jobs
    assert not ended(driver)


def test_nobody_hangs_who_has_left():
    driver = training(hang_timeout_s=LIMIT_S)
    driver.exits(1, clean=True)
    later(driver, LIMIT_S * 2)
    assert not ended(driver)


def test_a_host_that_does_not_end_it_costs_the_whole_group():
    driver = training(hang_timeout_s=LIMIT_S)
    driver.word(0, 5)
    later(driver, LIMIT_S + 1)
    later(driver, 11.0)
    assert driver.core.joins.group is not None
    assert not driver.core.joins.group.alive


def test_the_host_finds_out_where_it_was_and_ends_it_then():
    host = Host(HostId("b"), "i")
    hello = Connected(connection=3, pid=77, rank=1, world=2, lineage="1.1.n", trainer="t")
    host.handle(hello, 0.0)
    order = EndTrainers(host=HostId("b"), lineage="1.1.n", reason="rank 1 made no step", attempt=1, hanging=(1,))
    commands = host.handle(order, 1.0)
    assert [(one.pid, one.examine) for one in commands if isinstance(one, Kill)] == [(77, 3)]
    assert not [one for one in host.handle(order, 2.0) if isinstance(one, Kill)], "it is being found out"
    others = dataclasses.replace(order, hanging=(), reason="rank 0 has ended")
    assert not [one for one in host.handle(others, 2.0) if isinstance(one, Kill)], "still"
    host.handle(Examined(connection=3, stack="train.py, line 7"), 2.0)
    (exited,) = [one for one in host.handle(Disconnected(connection=3), 3.0) if isinstance(one, TrainerExited)]
    assert (exited.hung, exited.ended, exited.clean) == (True, False, False)
    assert (exited.reason, exited.stack) == ("rank 1 made no step", "train.py, line 7")


def test_ranks_that_do_not_hang_are_left_alone():
    host = Host(HostId("b"), "i")
    host.handle(Connected(connection=3, pid=77, rank=0, world=2, lineage="1.1.n", trainer="t"), 0.0)
    order = EndTrainers(host=HostId("b"), lineage="1.1.n", reason="rank 1 made no step", attempt=1, hanging=(1,))
    assert not [one for one in host.handle(order, 1.0) if isinstance(one, Kill)]
