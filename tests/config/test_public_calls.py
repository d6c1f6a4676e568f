"""What a user sees of an error: its public name, its text once, and none of the frames behind the call."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path

import pytest

import raystate
from raystate.core.formats.errors import ALL_ERRORS
from raystate.log_lines import SWITCH
from raystate.manager.spent import Spent
from raystate.public_calls import public
from tests.patience import PATIENCE_S
from tests.processes import run_python

CALLS = {
    "StateConfig": "raystate.StateConfig(storage='/nowhere', run='r', save_every_step=1)",
    "StateManager": "raystate.StateManager()",
    "fit": "raystate.fit(None, None)",
    "RayTrainCallback": "raystate.RayTrainCallback(raystate.StateConfig(storage='/nowhere', run='r'), max_failures=-2)",
    "load": "raystate.load('/nowhere')",
    "load_async": "raystate.load_async('/nowhere').result()",
    "save": "raystate.save(5, {})",
    "metadata": "raystate.metadata('/nowhere')",
    "Reader": "raystate.Reader('/nowhere').metadata()",
    "follow": "next(raystate.Reader('/nowhere').follow(timeout_s=-1))",
}


def complaint(program: str, **environment: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != SWITCH} | environment
    return run_python("-c", program, env=env, code=1).stderr


@pytest.mark.parametrize("call", CALLS)
def test_an_error_shows_the_call_and_its_text_once(call: str) -> None:
    said = complaint(f"import raystate\n{CALLS[call]}")
    shown, _, text = said.rpartition("\nraystate.")
    assert text and shown.count("Traceback") == 1 and "raystate.core" not in said, said
    assert said.count(text.partition(": ")[2].splitlines()[0]) == 1 + (call == "load_async"), "which is logged, too"
    ours = [line for line in shown.splitlines() if f"{Path(raystate.__file__).parent}/" in line]
    assert len(ours) <= 1, said


def test_a_setting_shows_all_frames() -> None:
    said = complaint(f"import raystate\n{CALLS['load']}", **{SWITCH: "debug"})
    assert said.count("/raystate/") > 2, said


@pytest.mark.parametrize("kind", ALL_ERRORS, ids=lambda kind: kind.__name__)
def test_errors_have_their_public_name_and_come_whole_to_other_processes(kind: type[raystate.RaystateError]) -> None:
    assert getattr(raystate, kind.__name__) is kind
    assert kind.__module__ == "raystate"
    error = kind("it is wrong", field="run")
    error.add_note("since noon")
    there = "import pickle, sys; e = pickle.load(sys.stdin.buffer); print(type(e), e, e.field, e.__notes__)"
    told = subprocess.run(
        [sys.executable, "-c", there], input=pickle.dumps(error), capture_output=True, timeout=PATIENCE_S, check=True
    )
    assert told.stdout.decode().strip() == f"<class 'raystate.{kind.__name__}'> it is wrong run ['since noon']"


def _of_a_user() -> None:
    raise ValueError("mine")


def _from_it() -> None:
    try:
        _of_a_user()
    except ValueError as error:
        raise raystate.StorageError("ours") from error


def _beside_it() -> None:
    try:
        _of_a_user()
    except ValueError:
        raise raystate.StorageError("ours")  # noqa: B904


@pytest.mark.parametrize("call", [_from_it, _beside_it])
def test_what_a_user_has_raised_stays(call: Callable[[], None]) -> None:
    with pytest.raises(raystate.StorageError) as found:
        public(call)()
    said = "".join(traceback.format_exception(found.value))
    assert "ValueError: mine" in said and "in _of_a_user" in said
    assert said.index("ValueError: mine") < said.index("raystate.StorageError: ours")


def test_a_folder_whose_name_begins_like_ours_is_not_ours() -> None:
    theirs: dict[str, Callable[[], None]] = {}
    source = "def fails():\n    raise ValueError('mine')\n"
    exec(compile(source, f"{Path(raystate.__file__).parent}_jobs/train.py", "exec"), theirs)

    def call() -> None:
        try:
            theirs["fails"]()
        except ValueError as error:
            raise raystate.StorageError("ours") from error

    with pytest.raises(raystate.StorageError) as found:
        public(call)()
    assert "raystate_jobs/train.py" in "".join(traceback.format_exception(found.value))


def test_the_same_text_behind_it_goes() -> None:
    def wraps() -> None:
        try:
            raise raystate.StorageError("it is full")
        except raystate.StorageError as error:
            raise raystate.StorageError("step 3: it is full") from error

    with pytest.raises(raystate.StorageError) as found:
        public(wraps)()
    assert "".join(traceback.format_exception(found.value)).count("it is full") == 1


def test_the_cause_of_a_run_that_failed_stays() -> None:
    cause = raystate.BarrierTimeoutError("rank 1 did not call save")

    def fails() -> None:
        raise raystate.RunFailedError("gave up: rank 1 did not call save") from cause

    with pytest.raises(raystate.RunFailedError) as found:
        public(fails)()
    assert found.value.__cause__ is cause


OPEN = types.SimpleNamespace(
    _session=types.SimpleNamespace(spent=Spent(time.monotonic))
)  # as much of a manager as its calls need first

MISSPELLED = {
    "raystate.fit(print, None, workers=2)": r"fit\(\) takes no argument 'workers'; did you mean 'num_workers'\?",
    "raystate.fit(print, keep_last=3)": r"into its config: raystate\.StateConfig\(keep_last=…\)",
    "raystate.StateManager(storage='runs/x')": r"StateManager\(\) takes .* 'storage'; there is config, takeover\. .*\(storage=…\)",
    "raystate.StateConfig(storage='runs/x', run='x', save_every_step=1)": r"did you mean 'save_every_steps'\?",
    "raystate.Reader('runs/x').restore(transform=1)": r"Reader\.restore\(\) takes no argument 'transform'; did you mean 'transforms'\?",
    "raystate.Reader('runs/x').follow(refrence=1)": r"did you mean 'reference'\?",
    "raystate.load('runs/x', refernce=1)": r"load\(\) takes no argument 'refernce'; did you mean 'reference'\?",
    "raystate.load_async('runs/x', refernce=1)": r"did you mean 'reference'\?",
    "raystate.save('runs/x', {}, item={})": r"did you mean 'items'\?",
    "raystate.Value(3)": r"Value\(\): missing a required argument: 'set'\. It takes \(get, set\)",
    "raystate.StateManager.save(OPEN, 1, {}, {'loss': 1.0})": r"too many positional .* \(step, state, \*, items=None, metrics=None",
    "raystate.rehearse(print, None, workers=2)": r"did you mean 'num_workers'\?",
    "raystate.RayTrainCallback(None, max_failure=1)": r"no argument 'max_failure'; did you mean 'max_failures'\?",
}


@pytest.mark.parametrize("call", MISSPELLED)
def test_a_misspelled_argument_is_told_with_the_one_that_is_meant(call: str) -> None:
    """It was a bare TypeError."""
    with pytest.raises(raystate.ConfigError, match=MISSPELLED[call]):
        eval(call)
