"""Hosts that are announced to go away."""

from __future__ import annotations

from raystate.core.formats.messages import HostId, StopAsked
from tests.core.driver import Driver, running, training


def leaving(driver: Driver, host: str, within_s: float | None = 30.0, reason: str = "drained by Ray") -> None:
    driver.send(StopAsked(host=HostId(host), within_s=within_s, reason=reason))


def test_all_ranks_stop_when_the_node_of_one_goes_away():
    driver = training()
    leaving(driver, "b")
    asked = driver.proposal
    assert (asked.kind, asked.state) == ("stop", "proposed")
    assert asked.reason == "the node of rank 1 (host b) goes away: drained by Ray"
    driver.agree(at=5)
    assert driver.core.notices.hosts == {"b"}


def test_the_group_after_is_not_stopped_because_of_the_group_before():
    """It was asked and died before it could agree; the next one runs elsewhere."""
    driver = running()
    driver.seen["b"] = []  # nothing can be proposed: its word is not known
    leaving(driver, "b")
    driver.join(["a", "c"], "h")
    driver.restore()
    driver.stage(9)
    driver.tick(1.0)
    assert driver.advice().proposal is None


def test_a_group_that_runs_there_all_the_same_is_asked_too():
    driver = running()
    leaving(driver, "b")
    driver.join(["a", "b"], "h")
    driver.restore()
    driver.stage(9)
    asked = driver.proposal
    assert asked.kind == "stop"


def late(*, within_s: float, writes: bool) -> Driver:
    """The notice of rank 1's node is half over, and then half of the rest, and nobody has agreed. `writes`: storage answers."""
    driver = training()
    driver.auto = writes
    leaving(driver, "b", within_s)
    driver.tick(within_s / 2 + 0.1)
    driver.tick(within_s / 4)
    return driver


def test_a_rank_that_hears_of_it_too_late_does_not_hold_up_the_others():
    """It has made the step before its HostActor told it. In its next step it waits for rank 0, which waits for its answer."""
    driver = training()
    leaving(driver, "b", 20.0)
    asked = driver.proposal
    driver.word(0, asked.step, ack_id=asked.id, ack_ok=True, ack_step=5)
    assert driver.proposal == asked
    driver.word(1, asked.step)
    again = driver.proposal
    assert again.id > asked.id
    assert (again.kind, again.state) == ("stop", "proposed")
    assert again.step > asked.step + 1
    driver.agree(at=asked.step)


def test_half_of_the_time_without_an_agreement_the_newest_in_memory_becomes_durable():
    """While there is still time to write it; and the ranks have half of the rest to agree."""
    driver = training()
    leaving(driver, "b", 20.0)
    driver.tick(10.1)
    assert driver.core.journal.published == (4,)
    asked = driver.proposal
    assert asked.state == "proposed"
    driver.tick(4.8)
    driver.agree(at=5)
    assert not driver.ended()


def test_who_has_not_agreed_in_time_is_not_ended_while_the_newest_in_memory_is_written():
    """The hosts need no trainer for it, but who is late with an answer may still come to stop at a common step."""
    driver = late(within_s=20.0, writes=False)
    assert not driver.ended()
    driver.auto = True
    driver.commit()
    driver.tick()
    assert driver.ended() == {"a", "b"}


def test_a_save_that_takes_too_long_does_not_keep_the_group_beyond_the_end_of_the_notice():
    driver = late(within_s=20.0, writes=False)
    driver.tick(4.8)
    assert not driver.ended()
    driver.tick(0.2)
    assert driver.ended() == {"a", "b"}


def test_a_group_that_still_restores_is_ended_too():
    """It would come to train on a node that goes away."""
    driver = training()
    driver.restore(ok=False)
    leaving(driver, "b", 20.0)
    assert driver.advice().proposal is None
    driver.tick(10.1)
    driver.tick(5.0)
    assert driver.ended() == {"a", "b"}
    driver.said(r"no step to stop at together, not all ranks train yet: the node of rank 1")


def test_agreed_and_too_slow_the_newest_in_memory_becomes_durable():
    driver = training()
    leaving(driver, "b", 20.0)
    driver.agree(at=5)
    driver.tick(10.1)
    assert driver.core.journal.published == (4,)
    confirmed = driver.proposal
    assert confirmed.state == "confirmed"  # who reaches it in time still stops there


def test_who_still_runs_when_the_node_has_to_be_gone_is_ended():
    driver = training()
    leaving(driver, "b", 20.0)
    asked = driver.agree(at=5)
    driver.stage(asked.step, promised=True)
    driver.out.clear()
    driver.tick(20.1)
    assert driver.ended() == {"a", "b"}
    driver.said(rf"should have stopped at step {asked.step}, and still runs")


def test_who_has_left_in_time_is_not_told_off():
    """They wait for another node, perhaps for long."""
    driver = training()
    leaving(driver, "b", 20.0)
    asked = driver.agree(at=5)
    driver.stage(asked.step, promised=True)
    driver.exits(0, 1, clean=True)
    driver.out.clear()
    driver.tick(20.1)
    assert not driver.ended()
    assert driver.core.joins.group is not None
    assert driver.core.joins.group.alive


def test_a_host_that_is_gone_is_not_to_go_away_any_more():
    driver = running()
    leaving(driver, "b")
    driver.lose("b", "its node is lost")
    assert driver.core.notices.hosts == frozenset()


def test_the_earliest_end_counts_also_for_those_who_were_asked_before():
    """Ray drains it without a deadline, then the cloud says when."""
    driver = training(barrier_timeout_s=600.0)
    leaving(driver, "b", None)
    driver.agree(at=5)
    driver.tick(1.0)
    leaving(driver, "b", 20.0, "its cloud preempts it")
    driver.said(r"stop asked, within 20\.0 s: .* its cloud preempts it")
    driver.out.clear()
    driver.tick(20.1)
    assert driver.ended() == {"a", "b"}


def test_the_same_end_told_a_little_earlier_is_no_news():
    driver = training()
    leaving(driver, "b", 30.0)
    driver.out.clear()
    driver.tick(1.0)
    leaving(driver, "b", 28.9)
    assert not [one for one in driver.out if getattr(one, "text", "").startswith("stop asked")]


def test_a_host_that_outlives_its_end_is_as_good_as_any_other():
    """Somebody has sent SIGTERM to one process, or a drain was called off."""
    driver = training()
    leaving(driver, "b", 20.0)
    driver.agree(at=5)
    driver.tick(30.0)
    driver.join(["a", "b"], "h")
    driver.restore()
    driver.stage(9)
    leaving(driver, "b", 0.0)
    asked = driver.advice().proposal
    assert asked is None or asked.state != "proposed", "nobody is asked to stop by an end that is past"
    driver.tick(60.0)
    driver.said("host b was to go away 60 s ago, and is still there: drained by Ray")
    assert driver.core.notices.hosts == frozenset()
    leaving(driver, "b", 20.0)
    asked = driver.proposal
    assert asked.kind == "stop", "the next notice counts"


def test_notices_of_hosts_of_others_are_forgotten():
    driver = running()
    for number in range(100):
        leaving(driver, f"other{number}", 30.0)
    driver.tick(91.0)
    assert driver.core.notices.hosts == frozenset()
