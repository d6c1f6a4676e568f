"""The listeners of docs/howto/listen.md, each with events of all kinds."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from raystate.train import RunEvent
from tests.debian import REPO

EVENTS = (
    RunEvent(kind="durable", time_s=100.0, step=20, seconds=0.5),
    RunEvent(kind="recovery", time_s=110.0, step=21, seconds=2.5, cause="rank 1 died", tier="memory", steps_repeated=3),
    RunEvent(kind="notice", time_s=120.0, cause="the node goes away", seconds=30.0),
    RunEvent(kind="notice", time_s=130.0, cause="a stop was asked for"),
)


class Called:
    """A tiny stand-in for MLflow and W&B, which are too large to install for ten lines: takes any call, and keeps its arguments."""

    def __init__(self, calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]], name: str = ""):
        self._calls, self._name = calls, name

    def __getattr__(self, name: str) -> Called:
        return Called(self._calls, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Called:
        self._calls.append((self._name, args, kwargs))
        return self


def play(heading: str) -> dict[str, Any]:
    """Run the example below that heading, and tell its listener all events. Gives its names."""
    section = (REPO / "docs" / "howto" / "listen.md").read_text().partition(f"## {heading}\n")[2]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(code[1], names)
    for event in EVENTS:
        names["on_event"](event)
    return names


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    play("TensorBoard")["writer"].close()
    (written,) = (tmp_path / "logs" / "lm").iterdir()
    data = written.read_bytes()
    assert all(text in data for text in (b"raystate/save_seconds", b"raystate/recovery", b"rank 1 died", b"the node goes away"))


@pytest.mark.parametrize(("heading", "module", "call"), [("MLflow", "mlflow", "log_metric"), ("Weights & Biases", "wandb", "log")])
def test_a_tracking_server(heading: str, module: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    stand_in = types.ModuleType(module)
    monkeypatch.setattr(stand_in, "__getattr__", lambda name: Called(calls, name), raising=False)
    monkeypatch.setitem(sys.modules, module, stand_in)
    play(heading)
    assert sum(name == call for name, _, _ in calls) == len(EVENTS)
    assert any("rank 1 died" in str(one) for one in calls)
