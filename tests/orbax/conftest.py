"""What tests of saves to one path share."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from raystate.reader import turns
from tests.processes import run_python


def run_stock(program: str, asked: dict[str, Any]) -> dict[str, Any]:
    """What a program of this folder says, which knows nothing of raystate."""
    path = Path(__file__).with_name(program)
    return json.loads(run_python(path, json.dumps(asked)).stdout.splitlines()[-1])


@pytest.fixture
def waited_for(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set when a save waits for another one."""
    event, real = threading.Event(), turns._rest

    def rest(*args: Any) -> None:
        event.set()
        real(*args)

    monkeypatch.setattr(turns, "_rest", rest)
    return event
