"""The trainer's side of Ray, as far as it needs none."""

from __future__ import annotations

import logging
import threading

import pytest

from raystate.actors import link
from tests.patience import PATIENCE_S


def test_a_turn_that_fails_does_not_end_the_background(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(link, "RETRY_FIRST_S", 0.01)
    went_on = threading.Event()
    turns = iter([True, OSError("no descriptor is left"), True])

    def turn() -> bool:
        now = next(turns, None)
        if isinstance(now, OSError):
            raise now
        if now is None:
            went_on.set()
        return bool(now)

    with caplog.at_level(logging.ERROR, logger="raystate"):
        end = link.RayLink.spawn(link.RayLink.__new__(link.RayLink), turn, threading.Condition(), "stager")
        assert went_on.wait(PATIENCE_S)
        end()
    assert [record.getMessage() for record in caplog.records] == ["stager: a turn failed; the next one is in 0.01 s"]
