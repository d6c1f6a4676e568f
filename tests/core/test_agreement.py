"""All ranks act at the same step."""

from __future__ import annotations

from raystate.core.messages import (
    StopAsked,
)
from tests.core.driver import running


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


def test_time_based_saves_go_on_after_a_rollback():
    driver = running(save_every_s=50.0)
    driver.stage(10, promised=True)
    driver.commit()
    driver.stage(1000)
    driver.tick(51.0)
    before = driver.advice().proposal
    assert before is not None and before.step > 1000
    for rank in range(2):
        driver.word(rank, 1001, ack_id=before.id, ack_ok=True, ack_step=1001)
    driver.stage(before.step, promised=True)
    assert driver.restore(step=10, rollback=True).step == 10
    driver.stage(11)
    driver.tick(51.0)
    after = driver.advice().proposal
    assert after is not None and after.state == "proposed"
    assert 11 < after.step < 1000
