"""What tests of saves to one path share."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from raystate.reader import turns


@pytest.fixture
def waited_for(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set when a save waits for another one."""
    event, real = threading.Event(), turns._rest

    def rest(*args: Any) -> None:
        event.set()
        real(*args)

    monkeypatch.setattr(turns, "_rest", rest)
    return event
