"""The Makefile sets up once, and says clearly what is missing."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def make(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *arguments], cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def lay_out(target: Path) -> Path:
    """A folder with what decides the set-up, and no environment."""
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
