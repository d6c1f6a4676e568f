"""The command's exit codes, with a stand-in for `raystate.fit`."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

import raystate
from jobs import train_lm

CONFIG = Path(__file__).parents[2] / "configs" / "lm_cpu.yaml"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)

    def run(ending: Any, *sets: str) -> tuple[int, dict[str, Any]]:
        seen: dict[str, Any] = {}

        def fit(train_fn: Any, config: Any, **options: Any) -> Any:
            seen.update(options, config=config)
            if isinstance(ending, BaseException):
                raise ending
            if callable(ending):
                ending()
            return SimpleNamespace(step=4, path="x/4", return_value=ending, recoveries=[])

        monkeypatch.setitem(vars(raystate), "fit", fit)
        arguments = ["--config", str(CONFIG), "--set", f"state.storage={tmp_path}"]
        for override in sets:
            arguments += ["--set", override]
        return train_lm.main(arguments), seen

    return run


def test_finished_is_0(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, seen = run({"step": 4, "loss": 1.5, "loss_hex": "0x1.8p+0"}, "train.steps=4", "ray.num_workers=[1, 2]")
    assert code == 0
    assert "final loss 0x1.8p+0" in capsys.readouterr().out
    assert (seen["num_workers"], seen["global_batch"]) == ((1, 2), 64)
    assert seen["config"].save_every_steps == 20
    assert seen["train_loop_config"]["config"]["train"]["steps"] == 4
    assert len(seen["train_loop_config"]["corpus"]) == 64
    env = seen["run_config"].worker_runtime_env["env_vars"]
    assert env["JAX_PLATFORMS"] == "cpu"
    assert env["XLA_FLAGS"].split().count("--xla_force_host_platform_device_count=2") == 1
    assert "device_count=8" not in env["XLA_FLAGS"]


@pytest.mark.parametrize(
    ("ending", "code", "line"),
    [
        ({"refused": "corpus a is not b"}, 1, "corpus a is not b"),
        (raystate.RunFailedError("gave up after 3 attempts\nat length"), 1, "RunFailedError: gave up after 3 attempts"),
        (raystate.StaleAttemptError("a newer attempt"), 1, "StaleAttemptError: a newer attempt"),
        (raystate.Interrupted("node drained"), 75, "interrupted: node drained; the run 'lm_cpu' in file:///"),
        (KeyboardInterrupt(), 75, "interrupted by Ctrl-C; the run 'lm_cpu' in "),
        (lambda: signal.raise_signal(signal.SIGTERM), 75, "interrupted by SIGTERM; the run 'lm_cpu' in "),
    ],
)
def test_other_endings_are_one_line(run: Any, capsys: pytest.CaptureFixture[str], ending: Any, code: int, line: str) -> None:
    assert run(ending)[0] == code
    error = capsys.readouterr().err
    assert error.startswith(f"train_lm: {line}")
    assert error.count("\n") == 1


def test_the_cause_of_a_failure_is_told(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    failed = raystate.RunFailedError("gave up")
    failed.__cause__ = ZeroDivisionError("division by zero")
    assert run(failed)[0] == 1
    assert "RunFailedError: gave up (cause: ZeroDivisionError: division by zero)" in capsys.readouterr().err


def test_what_ray_refuses_is_bad_usage(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, seen = run({}, "ray.scaling={topologie: 2x2}")
    assert (code, seen) == (2, {})
    assert "ray: " in capsys.readouterr().err
