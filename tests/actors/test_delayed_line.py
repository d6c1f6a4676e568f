"""The line that is told where something takes long."""

from __future__ import annotations

import logging
import pickle
import threading

import pytest

from raystate.observe import delayed_line
from tests.patience import PATIENCE_S


def test_it_is_said_again_until_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delayed_line, "TOLD_AFTER_S", 0.0)
    monkeypatch.setattr(delayed_line, "SAID_AGAIN_S", 0.01)
    said, third = list[str](), threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            if len(said) == 3:
                third.set()

    listener = Listener()
    delayed_line.logger.addHandler(listener)
    before = set(threading.enumerate())
    try:
        with delayed_line.told_if_long("waits for the Coordinator"):
            assert third.wait(PATIENCE_S)
            (teller,) = [one for one in set(threading.enumerate()) - before if one.name == "raystate-delayed-line"]
        teller.join(PATIENCE_S)
        assert not teller.is_alive()
    finally:
        delayed_line.logger.removeHandler(listener)
    assert said[0] == "waits for the Coordinator"
    assert all(line.startswith("waits for the Coordinator (for ") for line in said[1:])


def test_what_ends_soon_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    line = delayed_line.DelayedLine()
    line.begin("waits")
    line.end()
    assert caplog.text == ""
    pickle.dumps(line)
