"""What users install: a wheel and an sdist, built from this tree, and a wheel in an environment that has nothing of it.

Nothing is downloaded: the build backend comes with the development extras, and the empty environment finds raystate's dependencies in
the packages of this one (raystate itself only in its own: an editable install is a `.pth` file, and those count where they lie only).
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator, Sequence
from email.message import Message
from email.parser import Parser
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from jobs.striking import start_ray
from tests.cluster.training import wait_for
from tests.patience import PATIENCE_S

REPO = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]


def run(command: Sequence[str | os.PathLike[str]], cwd: Path) -> str:
    """The output of a command that must succeed, run without this session's import path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, source: Path, target: Path) -> Path:
    """Build "wheel" or "sdist" of the project in `source` into the folder `target`."""
    target.mkdir(exist_ok=True)
    program = f"import sys; from hatchling import build; print(build.build_{kind}(sys.argv[1]))"
    return target / run([sys.executable, "-c", program, target], source).splitlines()[-1]


def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


def read_metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distribution")


@pytest.fixture(scope="module")
def wheel(folder: Path) -> Path:
    return build("wheel", REPO, folder / "wheel")


@pytest.fixture(scope="module")
def sdist(folder: Path) -> Path:
    return build("sdist", REPO, folder / "sdist")


@pytest.fixture(scope="module")
def python(folder: Path, wheel: Path) -> Path:
    """The interpreter of an environment in which the wheel is installed, and nothing else."""
    home = folder / "empty"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    packages = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip())
    assert list(packages.iterdir()) == []
    installer = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel]
    run([*installer, "--disable-pip-version-check"], folder)
    (packages / "dependencies.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("-packages")))
    return python


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path):
    tracked = run(["git", "ls-files", "raystate"], REPO).split() if (REPO / ".git").exists() else []
    found = names(wheel)
    assert {name.partition("/")[0] for name in found} == {"raystate", f"{wheel.name.partition('-py3')[0]}.dist-info"}
    assert set(tracked) <= set(found) or not tracked
    assert {"raystate/py.typed", "raystate/__init__.py", "raystate/core/__init__.py"} <= set(found)
    assert [name for name in found if name.endswith(".dist-info/licenses/LICENSE")]


def test_the_metadata_says_what_the_project_says(wheel: Path):
    found = read_metadata(wheel)
    assert (found["Name"], found["License-Expression"], found["Author"]) == ("raystate", "Apache-2.0", "The raystate authors")
    assert found["Requires-Python"] == PROJECT["requires-python"]
    assert str(found.get_payload()).startswith("# raystate")
    required = {re.split(r"[<>=\[ ]", one)[0] for one in found.get_all("Requires-Dist", []) if "extra ==" not in one}
    assert required == {re.split(r"[<>=\[ ]", one)[0] for one in PROJECT["dependencies"]}


def test_the_sdist_builds_the_same_wheel(sdist: Path, wheel: Path, folder: Path):
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    source = folder / sdist.name.removesuffix(".tar.gz")
    assert {"CHANGELOG.md", "LICENSE", "README.md", "constraints.txt", "pyproject.toml"} <= {path.name for path in source.iterdir()}
    assert names(build("wheel", source, folder / "again")) == names(wheel)


def test_it_is_imported_from_there(python: Path, folder: Path):
    program = "import raystate; print(raystate.__file__, raystate.__version__); [getattr(raystate, n) for n in raystate.__all__]"
    place, version = run([python, "-c", program], folder).split()
    assert Path(place).is_relative_to(folder / "empty")
    assert f'__version__ = "{version}"\n' in (REPO / "raystate" / "__init__.py").read_text()


ROUND_TRIP = """
import sys
import jax, numpy as np
import raystate

tree = {"w": jax.numpy.arange(6.0).reshape(2, 3), "layers": [{"b": np.full(3, 7, np.int32)}]}
raystate.save(sys.argv[1], tree)
back = raystate.load(sys.argv[1])
jax.tree.map(np.testing.assert_array_equal, tree, back)
placed = raystate.load(sys.argv[1], {"w": jax.ShapeDtypeStruct((2, 3), np.float32), "layers": [{"b": ...}]})
assert isinstance(placed["w"], jax.Array) and placed["w"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
print("equal", "ray" in sys.modules)
"""


def test_saves_and_loads(python: Path, folder: Path):
    assert run([python, "-c", ROUND_TRIP, folder / "checkpoint"], folder).split() == ["equal", "False"]


@pytest.mark.long
def test_the_first_script_of_readme_trains_and_goes_on_after_kill_9(python: Path, folder: Path):
    """In a plain folder, on a Ray that it starts by itself and that ends with it."""
    script = folder / "plain" / "train.py"
    script.parent.mkdir()
    script.write_bytes((REPO / "jobs" / "quickstart" / "train.py").read_bytes())
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"RAY_ADDRESS": "local", "JAX_PLATFORMS": "cpu"}

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen([python, script.name], cwd=script.parent, env=environment, stdout=subprocess.PIPE, text=True)

    first = start_ray(lambda: started(start()))
    assert first[1] == "at step 0, from init"
    with first[0] as process:
        durable = script.parent / "runs" / "spirals" / "200" / "commit_success.txt"
        wait_for(durable.exists, "step 200 is durable")
        process.kill()
    again = start_ray(lambda: started(start()))
    with again[0] as process:
        output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert again[1] == "at step 200, from storage"
    assert output.splitlines()[-1].startswith("step 300: loss 0.05")


def started(process: subprocess.Popen[str]) -> tuple[subprocess.Popen[str], str]:
    """The script and its first line. Raises what `start_ray` knows, if its Ray was too slow."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        process.wait(PATIENCE_S)
        raise RuntimeError("the script's Ray timed out during startup, perhaps")
    return process, line


def test_commands_are_there(python: Path, folder: Path):
    assert "verify" in run([python.parent / "raystate", "--help"], folder)
    assert "--port" in run([python, "-m", "raystate.testing.gcs", "--help"], folder)
    assert "StorageContract" in run([python, "-c", "from raystate.testing.storage import StorageContract as s; print(s)"], folder)


def imported(path: Path) -> Iterator[str]:
    """Top-level names of the packages that a file imports, type-checking only ones left out."""
    tree = ast.parse(path.read_text())
    for guard in [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]:
        guard.body = [ast.Pass()]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""


def test_everything_that_is_imported_is_declared():
    """Found in an environment that has more than raystate asks for, an undeclared dependency would not be missed."""
    owners = metadata.packages_distributions()

    def normal(name: str) -> str:
        return re.split(r"[<>=\[; ]", name)[0].lower().replace("_", "-")

    declared = {normal(one) for one in PROJECT["dependencies"]}
    of_tests = declared | {normal(one) for one in PROJECT["optional-dependencies"]["testing"]}
    of_tests |= {normal(one) for one in PROJECT["optional-dependencies"]["gcs-server"]}
    for path in sorted((REPO / "raystate").rglob("*.py")):
        allowed = of_tests if path.is_relative_to(REPO / "raystate" / "testing") else declared
        if path.is_relative_to(REPO / "raystate" / "compat"):
            allowed = {*declared, "flax"}  # whoever has its calls in his code has it installed
        if path == REPO / "raystate/cli/report_slide.py":
            allowed = declared | {normal(one) for one in PROJECT["optional-dependencies"]["png"]}  # it says how to get it
        for name in imported(path):
            top = name.partition(".")[0]
            if top in sys.stdlib_module_names or top == "raystate":
                continue
            owner = {normal(one) for one in owners.get(top, [])}
            assert owner & allowed, f"{path.relative_to(REPO)} imports {name}, which is of {owner or 'nobody'}"
