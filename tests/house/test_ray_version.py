"""What happens beside a Ray that raystate was not tested with."""

from __future__ import annotations

import ast
import logging
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from raystate import ray_version
from tests.patience import PATIENCE_S

REPO = Path(__file__).parents[2]
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
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    error = done.stderr.strip().splitlines()[-1]
    assert error.startswith("raystate.core.formats.errors.RaystateError: Ray 2.60"), done.stderr
    assert lacks in error
    assert "pip install 'ray[default,train]==2.60.*'" in error


def test_our_own_missing_module_is_not_blamed_on_ray():
    with pytest.raises(ModuleNotFoundError, match="no_such_module"), ray_version.ray_internals():
        import no_such_module  # noqa: F401  # pyright: ignore[reportMissingImports]


def test_internals_are_imported_where_the_error_is_clear():
    """In raystate.train, whose __init__ is guarded as a whole, or inside `with ray_internals()`."""
    for path in (REPO / "raystate").rglob("*.py"):
        if path.parent.name == "train":
            continue
        tree = ast.parse(path.read_text())
        guards = [node for node in ast.walk(tree) if isinstance(node, ast.With) and "ray_internals" in ast.unparse(node.items[0])]
        guarded = {id(node) for guard in guards for node in ast.walk(guard)}
        for node in ast.walk(tree):
            names = [f"{node.module}.{one.name}" for one in node.names] if isinstance(node, ast.ImportFrom) else []
            names += [one.name for one in node.names] if isinstance(node, ast.Import) else []
            private = [name for name in names if PRIVATE.match(name)]
            assert not private or id(node) in guarded, f"{path.relative_to(REPO)}: {private}"
