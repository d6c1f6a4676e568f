"""The Makefile sets up once, says clearly what is missing, and each of its targets runs what is there."""

import importlib.util
import itertools
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.processes import run_python

ROOT = Path(__file__).parents[2]


def make(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    # By itself, although this may run under `make check`: what that make hands down changes what this one prints.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "MFLAGS"}
    return subprocess.run(["make", *arguments], cwd=cwd, env=alone, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def lay_out(target: Path) -> Path:
    """A folder with what decides the set-up, and no environment."""
    target.mkdir(exist_ok=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (target / name).write_text((ROOT / name).read_text())
    return target


def stamp_of(folder: Path) -> str:
    """The stamp that make would create."""
    return make("-s", "--eval", "print-stamp: ; @echo $(STAMP)", "print-stamp", cwd=folder).stdout.strip()


def test_a_made_environment_is_not_made_again(tmp_path: Path):
    lay_out(tmp_path)
    stamp = tmp_path / stamp_of(tmp_path)
    stamp.parent.mkdir()
    stamp.touch()
    assert make("-q", "venv", cwd=tmp_path).returncode == 0


def test_a_changed_dependency_sets_up_again(tmp_path: Path):
    lay_out(tmp_path)
    before = stamp_of(tmp_path)
    (tmp_path / "constraints.txt").write_text("numpy==0\n")
    assert stamp_of(tmp_path) != before


def test_what_a_person_looks_at_first_installs_less_than_the_tests_do(tmp_path: Path):
    lay_out(tmp_path)
    installs = {target: make("-n", target, cwd=tmp_path).stdout for target in ("quickstart", "demo", "test-core")}
    extras = {target: re.findall(r"-e '\.\[(.*)\]'", said) for target, said in installs.items()}
    assert extras["quickstart"] == extras["demo"] == ["jobs,gcs-server"]
    assert extras["test-core"] == ["jobs,dev,gcs-server"]


def test_an_old_python_is_named(tmp_path: Path):
    lay_out(tmp_path)
    old = tmp_path / "python3.8"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo "Python 3.8.1" && exit 0\nexit 1\n')
    old.chmod(0o755)
    done = make("venv", f"PYTHON={old}", cwd=tmp_path)
    assert done.returncode != 0
    assert "Python 3.11 or newer" in done.stdout
    assert "Python 3.8.1" in done.stdout
    assert not (tmp_path / ".venv").exists()


# ---------------------------------------------------------------- what the targets run

MAKEFILE = (ROOT / "Makefile").read_text()
PHONY = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[0].split()
TESTED = ("clean", "venv", "test-versions")  # by being run, here and above
HELPFUL = ("benchmarks", "jobs.demo", "jobs.quickstart")  # modules that are the targets' own


def commands(target: str, folder: Path) -> list[list[str]]:
    """What a target would run, the set-up left out, as words: `[program, argument, …]`."""
    lay_out(folder)
    stamp = folder / stamp_of(folder)
    stamp.parent.mkdir()
    stamp.touch()
    lines = make("-n", target, cwd=folder).stdout.replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [[word for word in line if not re.match(r"[A-Z_]+=", word)] for line in words]


def test_every_rule_is_a_target_that_is_named():
    rules = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
    assert rules == set(PHONY)
    named = set(re.findall(r"make ([a-z-]+)", MAKEFILE.partition("PYTHON ?=")[0]))
    assert named == set(PHONY)
    told = [(ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md", ".ci/run")]
    assert {target for text in told for target in re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)} <= set(PHONY)


@pytest.mark.parametrize("target", [target for target in PHONY if target not in TESTED])
def test_what_a_target_runs_is_there(target: str, tmp_path: Path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    developing = {re.split(r"[<>=\[]", one)[0] for one in project["optional-dependencies"]["dev"]}
    run = commands(target, tmp_path)
    assert run
    for program, *arguments in run:
        if program == ".ci/debian":
            assert os.access(ROOT / program, os.X_OK) and len(arguments) == 1
            continue
        assert program.startswith(".venv/bin/"), program
        if program == ".venv/bin/python":
            assert arguments[0] == "-m"
            assert importlib.util.find_spec(arguments[1]) is not None, arguments[1]
            arguments = arguments[2:]
        else:
            assert {Path(program).name, "import-linter" if "lint-imports" in program else ""} & developing, program
        for before, argument in itertools.pairwise(["", *arguments]):
            path = argument.removeprefix("--ignore=")
            if before == "-p":
                assert importlib.util.find_spec(argument) is not None, argument
                continue
            assert not path.startswith(("tests", "jobs/", "benchmarks/")) or (ROOT / path).exists(), path


@pytest.mark.parametrize("module", HELPFUL)
def test_a_targets_module_helps(module: str):
    assert "usage:" in run_python("-m", module, "--help", cwd=ROOT).stdout


def test_no_test_is_left_out_of_ci(tmp_path: Path):
    """Each file of tests is run by one command of .ci/run, or by one with and one without what has the mark `more`."""
    targets = re.findall(r"^make (check|test\S*)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    lines = [line for target in targets for line in commands(target, tmp_path / target)]
    run = [line[line.index("pytest") + 1 :] for line in lines if "pytest" in line]
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]

    def within(file: str, place: str) -> bool:
        return file == place or file.startswith(f"{place}/")

    for file in files:
        taken = [
            words[words.index("-m") + 1] if "-m" in words else "all"
            for words in run
            if any(within(file, word) for word in words)
            and not any(within(file, word.removeprefix("--ignore=")) for word in words if word.startswith("--ignore="))
        ]
        assert sorted(taken) in (["all"], ["more", "not more"]), f"{file} is run by {taken}"


def test_the_files_that_the_order_and_the_marks_name_are_there():
    """One that has another name now would run in `make test`, and take its five minutes."""
    named = re.findall(r'^    "(\w+/test_\w+\.py)",$', (ROOT / "tests/conftest.py").read_text(), re.MULTILINE)
    assert named
    assert [name for name in named if not (ROOT / "tests" / name).exists()] == []


def test_versions_of_python_that_are_not_there_are_told_and_what_runs_with_the_others_is_there(tmp_path: Path):
    lay_out(tmp_path)
    done = make("test-versions", "VERSIONS=9.9-newest 9.8-pinned", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.count("not tested: 9.") == 2
    for few in ("FEW=", "FEW=1"):
        tests = re.findall(r" (tests/\S+)", make("-n", "test-versions", few, cwd=tmp_path).stdout)
        assert tests and all((ROOT / path).exists() for path in tests)


def test_clean_removes_what_was_made_and_nothing_else(tmp_path: Path):
    lay_out(tmp_path)
    for made in (".venv/bin/python", "dist/raystate.whl", "raystate/__pycache__/x.pyc", "raystate/kept.py"):
        (tmp_path / made).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / made).touch()
    assert make("clean", cwd=tmp_path).returncode == 0
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"Makefile", "pyproject.toml", "constraints.txt", "raystate/kept.py"}


# ---------------------------------------------------------------- benchmarks


def benchmarks(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "benchmarks", *arguments, code=None, cwd=ROOT, env={**os.environ, "XLA_FLAGS": ""})


def test_benchmarks_are_all_listed_and_help():
    listed = benchmarks("--list").stdout.splitlines()
    files = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "__main__")
    assert [line.split()[0] for line in listed] == files
    assert all(len(line.split()) > 3 for line in listed), "each says what it measures"
    for name in files:
        done = benchmarks(name, "--help")
        assert (done.returncode, "--" in done.stdout) == (0, True), done.stderr


def test_a_benchmark_runs_and_an_unknown_one_does_not():
    done = benchmarks("accelerator", "--quick", "--parts", "correct")  # most others start Ray; tests/timed runs some
    assert done.returncode == 0, done.stderr
    assert "equal bit for bit" in done.stdout
    assert benchmarks("recovery", "--no-such-option").returncode == 1
    assert benchmarks("no-such-benchmark").returncode == 2
