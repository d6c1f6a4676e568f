"""What happens beside a Ray that raystate was not tested with."""

from __future__ import annotations

import ast
import importlib
import logging
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray._common.utils import get_default_ray_temp_dir

from raystate.actors import ray_version
from tests.processes import run_python

REPO = Path(__file__).parents[2]
SOURCES = {path: ast.parse(path.read_text()) for path in (REPO / "raystate").rglob("*.py")}
PRIVATE = re.compile(r"ray\.(.*\.)?_|ray\.train\.v2\._internal|ray\.experimental\.internal_kv")


def test_the_tested_version_is_the_pinned_one():
    dependencies = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["dependencies"]
    lower = next(one for one in dependencies if one.startswith("ray["))
    pinned = re.search(r"^ray(?:\[.*\])?==(\d+\.\d+)", (REPO / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert pinned[1] in ray_version.TESTED
    assert lower.endswith(f">={ray_version.TESTED[0]}.0")
    assert ray_version.is_tested()


def test_an_untested_version_is_named_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    import raystate

    config = raystate.StateConfig(storage="/nowhere", run="x")
    with caplog.at_level(logging.WARNING, "raystate"):
        raystate.RayTrainCallback(config)
        assert not caplog.records
        monkeypatch.setattr(ray_version, "_installed", lambda: "99.1.2")
        for _ in range(2):
            assert not raystate.RayTrainCallback(config)._wants_standby
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Ray 99.1.2 is installed; raystate was tested with 2.60.x" in caplog.text
    assert "pip install 'ray[default,train]==2.60.*'" in caplog.text


@pytest.mark.parametrize(
    ("lacks", "use"),
    [
        ("ray.train.v2._internal.execution.controller.state", "raystate.fit"),
        ("ray._private.state", "raystate.RayTrainCallback"),
        ("ray.experimental.internal_kv", "raystate.StateManager(raystate.StateConfig(storage='/x', run='r'))"),
    ],
)
def test_a_ray_without_what_we_import_is_an_error_that_says_so(lacks: str, use: str):
    program = f"import sys, ray; sys.modules[{lacks!r}] = None\nimport raystate\n{use}"
    done = run_python("-c", program, code=1)
    error = done.stderr.strip().splitlines()[-1]
    assert error.startswith("raystate.RaystateError: Ray 2.60"), done.stderr
    assert lacks in error
    assert "pip install 'ray[default,train]==2.60.*'" in error


def test_our_own_missing_module_is_not_blamed_on_ray():
    with pytest.raises(ModuleNotFoundError, match="no_such_module"), ray_version.ray_internals():
        import no_such_module  # noqa: F401  # pyright: ignore[reportMissingImports]


RAYS = {path: ast.parse((REPO / path).read_text()) for path in ("raystate/actors/rays.py", "raystate/train/rays.py")}
# Beside what each is for, and the test that notices when it changes.
JAX = {
    "raystate/arrays/placing.py",  # tests/model/test_weak_types.py
    "raystate/compat/flax_several.py",  # tests/compat/test_flax_several.py
    "raystate/compilation/jax_cache.py",  # tests/compilation/test_jax_internals.py
}


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(full name, name here) of each import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{one.name}", one.asname or one.name) for one in node.names)
        elif isinstance(node, ast.Import):
            yield from ((one.name, one.asname or one.name) for one in node.names)


def test_internals_are_imported_in_one_place_where_the_error_is_clear():
    """`raystate.train` is guarded as a whole; the other place is the one module of `raystate.actors`."""
    names = [(str(path.relative_to(REPO)), name) for path, tree in SOURCES.items() for name, _ in imported(tree)]
    assert {path for path, name in names if PRIVATE.match(name)} == set(RAYS)
    assert "with ray_internals()" in ast.unparse(RAYS["raystate/actors/rays.py"])
    assert {path for path, name in names if re.match(r"jax(lib)?\.(.*\.)?_", name)} == JAX


@pytest.mark.parametrize("place", RAYS)
def test_this_ray_has_all_that_is_used_of_its_internals(place: str):
    module = place.removesuffix(".py").replace("/", ".")
    used: set[str] = set()
    for tree in SOURCES.values():
        ours = {here for name, here in imported(tree) if name.rpartition(".")[0] == module}
        attributes = [ast.unparse(node).split(".") for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        used |= {f"{first}.{second}" for first, second, *_ in attributes if first in ours}
    assert len(used) > 5
    there = importlib.import_module(module)
    lacking = [one for one in sorted(used) if not hasattr(getattr(there, one.partition(".")[0]), one.partition(".")[2])]
    assert not lacking


def test_rays_settings_have_their_names():
    from ray.train.v2._internal import constants

    from raystate.actors.ray_discovery import ray_folder
    from raystate.train import bundles, callback

    assert callback.POLL_INTERVAL == constants.HEALTH_CHECK_INTERVAL_S_ENV_VAR
    assert bundles.START_TIMEOUT == constants.WORKER_GROUP_START_TIMEOUT_S_ENV_VAR
    assert bundles.STARTS_S == constants.DEFAULT_WORKER_GROUP_START_TIMEOUT_S
    assert str(ray_folder()) == get_default_ray_temp_dir()
