"""`fit` tells a listener each event once, and nothing that the listener does holds anything up."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from raystate.core.formats.errors import ConfigError
from raystate.observe.ledger.lines import AttemptBegan, Line, LoggedRecovery, LoggedSave, Noted, Noticed
from raystate.train.events import RunEvent, Telling, event_of, listener

SAVE = LoggedSave(attempt=1, step=20, save="a1kx", seconds=0.5)
BACK = LoggedRecovery(attempt=1, group="g", cause="rank 1 died", step=20, tier="memory", seconds=2.0, steps_repeated=3)


def noted(n: int, what: Line, *, attempt: int = 1, t: float = 100.0) -> Noted:
    return Noted(attempt, n, t, what)


def test_what_an_event_says() -> None:
    assert event_of(noted(1, SAVE)) == RunEvent(kind="durable", time_s=100.0, step=20, seconds=0.5)
    recovery = event_of(noted(2, BACK))
    assert recovery == RunEvent(
        kind="recovery", time_s=100.0, step=20, seconds=2.0, cause="rank 1 died", tier="memory", steps_repeated=3
    )
    leaves = event_of(noted(3, Noticed(host="h", reason="the node goes away", within_s=30.0)))
    assert leaves == RunEvent(kind="notice", time_s=100.0, seconds=30.0, cause="the node goes away")
    assert event_of(noted(4, Noticed(host="", reason="a stop was asked for"))) == RunEvent(
        kind="notice", time_s=100.0, cause="a stop was asked for"
    )
    assert event_of(noted(5, AttemptBegan(reason="begins"))) is None


def test_each_is_told_once_and_none_of_before() -> None:
    heard: list[RunEvent] = []
    told = Telling(heard.append, since_s=50.0)
    told.tell([noted(1, SAVE, t=49.0), noted(2, SAVE), noted(3, BACK)])
    assert told.newest == (1, 3)
    told.tell([noted(2, SAVE), noted(3, BACK), noted(1, SAVE, attempt=2)])  # as the whole ledger has them
    assert [one.kind for one in heard] == ["durable", "recovery", "durable"]


@pytest.mark.parametrize("failure", [ValueError, SystemExit])
def test_failures_of_the_listener_are_one_warning(failure: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    heard: list[RunEvent] = []

    def fails(event: RunEvent) -> None:
        heard.append(event)
        raise failure("the tracking server is away")

    told = Telling(fails, since_s=0.0)
    with caplog.at_level(logging.WARNING):
        told.tell([noted(1, SAVE), noted(2, SAVE)])
    assert (len(heard), len(caplog.records)) == (2, 1)
    assert "the tracking server is away" in caplog.text


def test_a_listener_by_name(tmp_path: Path) -> None:
    assert listener("json:dumps") is json.dumps
    assert listener(None) is None

    async def hears(event: RunEvent) -> None:
        """Never: `fit` has no loop that would run it."""

    class Hears:
        async def __call__(self, event: RunEvent) -> None:
            """The same, as an object."""

    for wrong in ("json:nothing", "no_such_module:f", "", 5, hears, Hears()):
        with pytest.raises(ConfigError, match="on_event"):
            listener(wrong)
