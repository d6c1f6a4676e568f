"""What a user's type checker sees of raystate: everything public has a type, and no argument is an `Any`."""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import raystate
from tests.processes import run_python

REPO = Path(__file__).parents[2]

# What is incomplete through no fault of ours.
NOT_OURS = {
    "raystate.train.callback.RayTrainCallback",  # Ray ships no types, so its base classes count as unknown
}

# Arguments that are an `Any` all the same: "public name(argument)".
ANY = {
    "fit(train_loop_config)",  # a dict of anything, handed to the user's own function
    "rehearse(train_loop_config)",  # the same
}

PROGRAM = """
from pathlib import Path

import jax
from orbax.checkpoint import checkpoint_managers
from ray.train import RunConfig, ScalingConfig
from typing_extensions import assert_type

import raystate

config = raystate.StateConfig(
    storage=Path("runs") / "lm", run="lm", save_every_steps=100, keep_last=None, keep_policy=checkpoint_managers.LatestN(3)
)
assert_type(config.storage, str)
config = raystate.StateConfig.from_file(Path("lm.yaml"), run="other").replace(keep_best=1, best_metric="loss")


def train() -> None:
    with raystate.StateManager() as manager:
        restored = manager.restore_or_init(lambda: {"w": jax.numpy.zeros(4)})
        saved = manager.save(restored.step + 1, restored.state, metrics={"loss": 0.5})
        assert_type(saved, bool)


result = raystate.fit(train, config, num_workers=(1, 2), scaling_config=ScalingConfig(num_workers=2))
assert_type(result.step, int)
assert_type(result.recoveries[0].cause, str)
RunConfig(callbacks=[raystate.RayTrainCallback(config)])

for one in raystate.Reader(Path("runs/lm")).follow({"w": ...}, timeout_s=3.0, partial=True):
    assert_type(one.step, int)
restored = raystate.Reader("gs://bucket/lm").restore(items={"data": iter([1])}, transforms=lambda tree: tree["w"])
assert_type(restored, raystate.Restored)
raystate.save(Path("one"), {"w": 1})
raystate.load(Path("one"), {"w": ...})
print(raystate.metadata("one").trees)

raystate.StateConfig(storage=3, run="lm")  # wrong
raystate.StateConfig(storage="x", run="lm", save_evry_steps=3)  # wrong
raystate.Reader(None)  # wrong
raystate.fit(train, {"storage": "x"})  # wrong
"""


def pyright(*arguments: str, cwd: Path) -> dict[str, Any]:
    """What pyright finds with this interpreter's packages and the raystate of this checkout."""
    environment = {**os.environ, "PYTHONPATH": str(REPO), "TMPDIR": str(cwd)}  # it leaves a folder in TMPDIR
    given = ("--pythonpath", sys.executable, "--outputjson", *arguments)
    done = run_python("-m", "pyright", *given, code=None, cwd=cwd, env=environment)
    assert done.stdout.lstrip().startswith("{"), done.stdout + done.stderr
    return json.loads(done.stdout)


def test_everything_public_has_a_type(tmp_path: Path):
    found = pyright("--verifytypes", "raystate", "--ignoreexternal", cwd=tmp_path)["typeCompleteness"]
    assert Path(found["packageRootDirectory"]) == REPO / "raystate"
    symbols = found["symbols"]
    homes = {
        name: symbol["name"]
        for symbol in symbols
        for name in [symbol["name"], *symbol.get("alternateNames", ())]
        if name.removeprefix("raystate.") in raystate.__all__
    }
    assert homes.keys() == {f"raystate.{name}" for name in raystate.__all__} - {"raystate.__version__"}
    incomplete = {
        symbol["name"]: [one["message"] for one in symbol["diagnostics"]]
        for symbol in symbols
        if (not symbol["isTypeKnown"] or symbol["isTypeAmbiguous"])
        and any(f"{symbol['name']}.".startswith(f"{home}.") for home in homes.values())
    }
    assert incomplete.keys() <= NOT_OURS, incomplete  # once in many runs pyright does know Ray's classes


def test_a_users_program_is_checked(tmp_path: Path):
    """What is right passes, what is wrong is found: with an `Any` in its place it wouldn't be."""
    (tmp_path / "program.py").write_text(PROGRAM)
    errors = pyright("program.py", cwd=tmp_path)["generalDiagnostics"]
    found = sorted({error["range"]["start"]["line"] for error in errors if error["severity"] == "error"})
    wrong = [number for number, line in enumerate(PROGRAM.splitlines()) if line.endswith("# wrong")]
    assert found == wrong, "\n".join(f"{error['range']['start']['line']}: {error['message']}" for error in errors)


def arguments_with_any() -> Iterator[str]:
    for name in sorted({*raystate.__all__} - {"__version__", "Rehearsal", "Restored", "RunResult"}):  # they are made by us alone
        public = getattr(raystate, name)
        if isinstance(public, type) and issubclass(public, BaseException):
            continue
        calls = {name: public}
        if isinstance(public, type) and name != "RayTrainCallback":  # whose methods Ray Train calls
            calls |= {f"{name}.{member}": getattr(public, member) for member in vars(public) if not member.startswith("_")}
        for called, call in calls.items():
            for parameter in inspect.signature(call).parameters.values() if callable(call) else ():
                if parameter.name == "self":
                    continue
                # What a user's own function takes and gives is his.
                text = re.sub(r"Callable\[\[.*?\], \w+\]", "", str(parameter.annotation))
                if re.search(r"\bAny\b", text) or parameter.annotation is Any or parameter.annotation is parameter.empty:
                    yield f"{called}({parameter.name})"


def test_no_argument_is_an_any():
    assert set(arguments_with_any()) <= ANY


@pytest.mark.parametrize("name", sorted(set(raystate.__all__) - {"__version__"}))
def test_everything_public_says_what_it_is(name: str):
    assert inspect.getdoc(getattr(raystate, name))
