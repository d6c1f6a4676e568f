"""All ranks act at the same step."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest

from raystate.core.formats.messages import (
    Appended,
    CarriedOut,
    HostReported,
    Log,
    Proposal,
    StopAsked,
    Tick,
)
from tests.core.driver import AB, Driver, adopted, running, training


def test_stop_is_confirmed_when_all_have_agreed():
    driver = training()
    driver.send(StopAsked(reason="preemption", within_s=30.0))
    proposal = driver.proposal
    assert (proposal.state, proposal.step) == ("proposed", 6)
    driver.word(0, 5, ack_id=proposal.id, ack_ok=True, ack_step=5)
    assert driver.advice().proposal == proposal
    driver.word(1, 5, ack_id=proposal.id, ack_ok=True, ack_step=5)
    confirmed = driver.proposal
    assert (confirmed.id, confirmed.state) == (proposal.id, "confirmed")
    driver.said("^asks all 2 ranks to stop at step 6: preemption$")
    driver.said("^all 2 ranks stop at step 6: preemption$")
    assert not any(str(proposal.id) in line for line in driver.lines), "a number that says nothing to people"


def test_refusal_brings_a_later_step_and_the_deadline_withdraws():
    driver = training()
    driver.send(StopAsked(reason="preemption", within_s=30.0))
    first = driver.proposal
    driver.word(0, 9, ack_id=first.id, ack_ok=False, ack_step=9)
    second = driver.proposal
    assert second.id > first.id
    assert second.step > 9
    driver.stage(9)
    driver.tick(31.0)
    withdrawn = driver.proposal
    assert withdrawn.state == "withdrawn"
    # Too late for a common step: what all have is made durable.
    assert driver.core.journal.published == (9,)


@pytest.mark.parametrize("state", ["proposed", "withdrawn"])
def test_a_new_coordinator_goes_on_with_the_newest_proposal_that_a_host_shows(state: Literal["proposed", "withdrawn"]):
    """Schedule 3193: rank 0 was shown a newer one than both had agreed to, and made the step at which rank 1 then stopped."""
    driver = adopted(1)
    older = Proposal(id=1_000_001, kind="stop", step=2, state="proposed", reason="preemption")
    newer = Proposal(id=1_000_002, kind="stop", step=3, state=state, reason="preemption")
    for rank, shown in enumerate((newer, older)):
        driver.word(rank, 1, ack_id=older.id, ack_ok=True, ack_step=1, report=False)
        driver.send(HostReported(summary=dataclasses.replace(driver.summary(driver.host_of[rank]), proposal=shown)))
    assert driver.advice().proposal == newer
    outcome = "not all have answered" if state == "proposed" else "it was withdrawn"
    driver.said(f"^an earlier attempt had asked all 2 ranks to stop at step 3, and {outcome}$")


def test_time_based_saves_go_on_after_a_rollback():
    driver = running(save_every_s=50.0)
    driver.stage(10, promised=True)
    driver.commit()
    driver.stage(1000)
    driver.tick(51.0)
    before = driver.proposal
    assert before.step > 1000
    for rank in range(2):
        driver.word(rank, 1001, ack_id=before.id, ack_ok=True, ack_step=1001)
    driver.stage(before.step, promised=True)
    assert driver.restore(step=10, rollback=True).step == 10
    driver.stage(11)
    driver.tick(51.0)
    after = driver.proposal
    assert after.state == "proposed"
    assert 11 < after.step < 1000


def save_together(driver: Driver, cadence: int) -> int:
    """A save is due: it is proposed, all ranks agree, and act at the next step for which they call save()."""
    driver.tick(6.0)
    proposal = driver.proposal
    assert (proposal.kind, proposal.state) == ("save", "proposed")
    driver.say(proposal.step - 1, ack_id=proposal.id, ack_ok=True, ack_step=proposal.step - 1)
    step = -(-proposal.step // cadence) * cadence
    driver.stage(step, promised=True)
    return step


def test_the_step_at_which_all_have_stopped_is_a_save_by_time_too():
    """After a preemption the group starts again from it: two seconds later nothing is worth another save."""
    driver = training(save_every_s=15.0)
    driver.live(14.0)
    driver.send(StopAsked(reason="preemption", within_s=20.0))
    stop = driver.agree(at=5)
    driver.stage(stop.step, promised=True)
    driver.exits(0, 1)
    driver.join(AB, "h")
    driver.restore()
    driver.stage(stop.step + 1)
    driver.live(14.0)
    assert driver.advice().proposal is None
    driver.stage(stop.step + 2)
    driver.live(2.0)
    assert driver.proposal.kind == "save"


def test_a_save_by_time_says_one_line_to_people():
    driver = training(save_every_s=15.0)
    driver.out.clear()
    driver.live(15.0)
    asked = driver.agree(at=5)
    driver.stage(asked.step, promised=True)
    lines = [(one.level, one.text) for one in driver.out if isinstance(one, Log) and one.level != "debug"]
    assert lines == [("info", f"step {asked.step} is durable")]


def test_a_save_when_idle_waits_until_the_one_before_is_visible():
    driver = running(save_every_s=5.0, save_when_idle=True)
    driver.stage(10)
    driver.auto = False
    step = save_together(driver, cadence=10)

    def is_next_proposed() -> bool:
        driver.stage(driver.core.joins.group.newest + 10)  # pyright: ignore[reportOptionalMemberAccess]
        driver.tick(6.0)
        return driver.advice().proposal is not None

    assert not is_next_proposed(), "it is being written"
    entry = driver.commit()
    assert not is_next_proposed(), "it is being committed"
    driver.send(Appended(seq=entry.seq, outcome="ok"))
    (publish,) = driver.orders("commit")
    assert not is_next_proposed(), "it is being published"
    driver.send(CarriedOut(intent=publish))
    assert driver.core.journal.durable_step == step
    assert is_next_proposed()


def test_a_save_when_idle_waits_until_the_one_before_is_staged():
    driver = running(save_every_s=5.0, save_when_idle=True)
    driver.stage(1)
    driver.tick(6.0)
    proposal = driver.proposal
    assert proposal.step == 3
    driver.say(proposal.step - 1, ack_id=proposal.id, ack_ok=True, ack_step=proposal.step - 1)
    driver.hold(0, proposal.step, promised=True)
    driver.word(1, proposal.step, pending=(proposal.step,))
    driver.word(0, proposal.step + 1)
    driver.word(1, proposal.step + 1, pending=(proposal.step,))
    driver.tick(6.0)
    assert driver.advice().proposal is None
    driver.hold(1, proposal.step, promised=True)
    assert driver.core.journal.durable_step == proposal.step
    driver.word(1, proposal.step + 1)
    driver.tick(6.0)
    assert driver.advice().proposal is not None


def test_answers_that_wait_beside_the_deadline_count():
    """They were taken before the Tick that is too late for others, and no part has looked at them yet."""
    driver = running()
    driver.stage(3)
    driver.send(StopAsked(reason="grow", within_s=None))
    proposal = driver.core.snapshots.proposal
    assert proposal is not None
    driver.now_s += driver.core.settings.barrier_timeout_s - 0.01
    driver.say(3, report=False, ack_id=proposal.id, ack_ok=True, ack_step=3)
    for host in AB:
        driver.core.handle(HostReported(summary=driver.summary(host)), driver.now_s, more=True)
    driver.now_s += 0.02
    driver.send(Tick())
    assert driver.core.snapshots.proposal == dataclasses.replace(proposal, state="confirmed")
