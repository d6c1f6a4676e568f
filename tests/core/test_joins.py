"""How a worker group comes together and ends, and whether the run is in use."""

from __future__ import annotations

import pytest

from raystate.core.formats.commands import Log
from raystate.core.formats.errors import InvalidTransitionError
from raystate.core.formats.messages import (
    Ask,
    EndTrainers,
    Failure,
    HostId,
    Joined,
    JoinReply,
    RestoreAsked,
)
from tests.core.driver import AB, Driver, running


@pytest.mark.parametrize(("hosts", "who"), [(AB, "all 2 ranks have"), (AB[:1], "the only rank has")])
def test_the_log_says_who_has_joined(hosts: list[str], who: str):
    driver = Driver()
    driver.join(hosts)
    assert any(one.text.startswith(f"{who} joined: lineage ") for one in driver.out if isinstance(one, Log))


def test_asks_before_the_claim_wait_for_it():
    from raystate.core.coordinator.machine import Coordinator
    from raystate.core.formats.log import claim_entry
    from raystate.core.formats.messages import Answer, Claimed, Settings

    core = Coordinator(Settings(run="r", storage="s"))
    join = Joined(ask=Ask("q"), group="g", rank=0, world=1, host=HostId("a"))
    assert core.handle(join, 0.0) == []
    out = core.handle(Claimed(entry=claim_entry(None, "w", "r")), 1.0)
    assert [one.reply.attempt for one in out if isinstance(one, Answer) and isinstance(one.reply, JoinReply)] == [1]


def test_an_ask_that_waited_for_the_claim_hears_that_the_run_is_released():
    from raystate.core.coordinator.machine import Coordinator
    from raystate.core.formats.log import claim_entry
    from raystate.core.formats.messages import Answer, Claimed, Finish, FlushAsked, ReleaseAsked, Settings

    core = Coordinator(Settings(run="r", storage="s"))
    core.handle(ReleaseAsked(ask=Ask("r"), reason="gave up"), 0.0)
    core.handle(FlushAsked(ask=Ask("f"), lineage="1.1.g", rank=0), 0.0)
    out = core.handle(Claimed(entry=claim_entry(None, "w", "r")), 1.0)
    assert any(isinstance(one, Finish) for one in out)
    replies = {one.ask: one.reply for one in out if isinstance(one, Answer)}
    assert getattr(replies[Ask("f")], "error", "") == "StaleAttemptError"


def test_repeated_join_gets_the_same_reply():
    driver = Driver()
    driver.join(AB)
    driver.send(Joined(ask=Ask("again"), group="g", rank=1, world=2, host=HostId("b")))
    assert len({reply.lineage for reply in driver.replies(JoinReply)}) == 1
    assert len(driver.replies(JoinReply)) == 3


@pytest.mark.parametrize(("world", "host"), [(3, "a"), (2, "b")])
def test_contradicting_joins_are_refused(world: int, host: str):
    driver = Driver()
    driver.send(Joined(ask=Ask("1"), group="g", rank=0, world=2, host=HostId("a")))
    driver.send(Joined(ask=Ask("2"), group="g", rank=0, world=world, host=HostId(host)))
    assert [one.error for one in driver.replies(Failure)] == ["ConfigError", "ConfigError"]


def test_new_group_ends_the_old_one_when_all_its_ranks_have_joined():
    driver = running()
    old = driver.lineage
    driver.send(Joined(ask=Ask("n"), group="h", rank=0, world=2, host=HostId("a")))
    # Schedule 89953: one late message of a group that an earlier Coordinator knew ended the living one while it closed.
    assert driver.take(EndTrainers) == []
    driver.send(Joined(ask=Ask("m"), group="h", rank=1, world=2, host=HostId("b")))
    ended = driver.take(EndTrainers)
    assert {(one.host, one.lineage) for one in ended} == {("a", old), ("b", old)}
    driver.send(RestoreAsked(ask=Ask("z"), lineage=old, rank=0))
    assert driver.replies(Failure)[-1].error == "StaleAttemptError"
    # A late message of the old group changes nothing.
    driver.send(Joined(ask=Ask("late"), group="g", rank=0, world=2, host=HostId("a")))
    assert driver.replies(Failure)[-1].error == "StaleAttemptError"


def test_unclean_exit_ends_the_group_everywhere():
    driver = running()
    driver.exits(0, clean=True)
    assert driver.take(EndTrainers) == []
    driver.exits(0)
    assert [one.host for one in driver.take(EndTrainers)] == ["b"]


def test_an_event_that_does_not_fit_is_an_error_with_its_story():
    driver = running()
    with pytest.raises(
        InvalidTransitionError, match=r"cannot take 'nonsense' \(KeyError.*attempt 1; lineage 1\.2\.g; recovery idle"
    ) as caught:
        driver.send("nonsense")
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(InvalidTransitionError, match=r"a restore of 1\.2\.g goes from idle to trying"):
        driver.core.recovery._enter("trying")
