"""The end of a run whose Coordinator does not answer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError

import raystate
from raystate.actors import release as release_module

SAVE_S, HOST_S, BARRIER_S = 20.0, 10.0, 40.0


def test_nobody_says_that_the_last_step_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's deadline was the Coordinator's own, so it came first: the actors were killed, and `fit` returned without a word."""
    waited: list[float] = []
    ended: list[str] = []

    def get(_: Any, *, timeout: float) -> Any:
        waited.append(timeout)
        raise GetTimeoutError

    method = SimpleNamespace(remote=lambda *_: None)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(release_module, "find_actor", lambda _: SimpleNamespace(release=method, left=method))
    monkeypatch.setattr(release_module, "_wait_or_kill", lambda name, _: ended.append(name))
    config = raystate.StateConfig(
        storage=str(tmp_path), run="silent", save_timeout_s=SAVE_S, host_timeout_s=HOST_S, barrier_timeout_s=BARRIER_S
    )
    with pytest.raises(raystate.StorageError, match="nobody has said within 100 s that the last step is durable"):
        release_module.release(config, "the test's end")
    assert len(waited) == len(ended) == 1
    assert waited[0] > SAVE_S + HOST_S + BARRIER_S, "the Coordinator's deadlines come first"
