"""The end of a run whose Coordinator does not answer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError, RayActorError

import raystate
from raystate.actors import release as release_module
from raystate.actors.naming import coordinator_name
from raystate.observe.status import RunReport
from raystate.storage import run_hash

SAVE_S, HOST_S, BARRIER_S = 20.0, 10.0, 40.0


def ends(monkeypatch: pytest.MonkeyPatch, storage: Path, says: Exception, *, coordinators: int, alone: bool) -> list[float]:
    """Release a run whose Coordinator only raises, and is gone after so many questions. `alone`: HostActors end by themselves.

    Gives the seconds that each answer was waited for.
    """
    waited: list[float] = []

    def get(_: Any, *, timeout: float) -> Any:
        waited.append(timeout)
        raise says

    method = SimpleNamespace(remote=lambda *_: None)
    coordinator = SimpleNamespace(release=method, left=method)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(release_module, "find_actor", lambda _: coordinator if len(waited) < coordinators else None)
    monkeypatch.setattr(release_module, "_wait_or_kill", lambda *_: alone)
    config = raystate.StateConfig(
        storage=str(storage), run="silent", save_timeout_s=SAVE_S, host_timeout_s=HOST_S, barrier_timeout_s=BARRIER_S
    )
    assert release_module.release(config, "the test's end") is None
    return waited


def test_nobody_says_that_the_last_step_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's deadline was the Coordinator's own, so it came first: the actors were killed, and `fit` returned without a word."""
    with pytest.raises(raystate.StorageError, match="the Coordinator did not say within 100 s that the last step is durable"):
        ends(monkeypatch, tmp_path, GetTimeoutError(), coordinators=9, alone=False)
    assert release_module.answers_within_s(raystate.StateConfig(storage="s", run="r")) > 600 + 10 + 120, (
        "the Coordinator's deadlines come first"
    )


def test_the_coordinator_dies_as_it_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(raystate.StorageError, match="its Coordinator is gone"):
        ends(monkeypatch, tmp_path, RayActorError(), coordinators=2, alone=False)


def test_a_run_that_has_been_released_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Coordinator was about to end, and its HostActors end by themselves."""
    assert len(ends(monkeypatch, tmp_path, RayActorError(), coordinators=1, alone=True)) == 1


# ---------------------------------------------------------------- before something is deleted


def frees(monkeypatch: pytest.MonkeyPatch, report: RunReport, answers: list[Any]) -> None:
    """Free a storage whose cluster has this run, whose Coordinator answers so. Nothing may be ended by force."""

    def get(*_: Any, **__: Any) -> Any:
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    method = SimpleNamespace(remote=lambda *_: None)
    coordinator = SimpleNamespace(use=method, release=method, left=method)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(release_module, "run_reports", lambda: [report])
    monkeypatch.setattr(release_module, "find_actor", lambda _: coordinator)
    monkeypatch.setattr(release_module, "_wait_or_kill", lambda *_: pytest.fail("it was ended"))
    release_module.free_storage("file:///s", "r", keep=True)


@pytest.mark.parametrize("of", ["r", "another"])
def test_a_coordinator_that_does_not_answer_may_be_the_runs(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken for no run of that storage, so that a run which trained was deleted."""
    report = RunReport(name=coordinator_name(run_hash("file:///s", of)), problem="it is busy")
    if of == "another":
        frees(monkeypatch, report, [])
        return
    with pytest.raises(raystate.RunInUseError, match="it is busy: try again, or end its run first"):
        frees(monkeypatch, report, [])


def test_what_is_to_be_durable_first_is_not_ended_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had ten seconds, then its memory was ended, with the newest step in it."""
    report = RunReport(name=coordinator_name(run_hash("file:///s", "r")), run="r", storage="file:///s", release_s=770.0)
    free = ("free", SimpleNamespace(), 0.0)
    with pytest.raises(raystate.StorageError, match="within 770 s that the last step is durable"):
        frees(monkeypatch, report, [free, GetTimeoutError()])
    with pytest.raises(raystate.RunInUseError, match=r"does not answer \(GetTimeoutError\)"):
        frees(monkeypatch, report, [GetTimeoutError()])
