"""Programs that others wrote adopt raystate by the diffs of docs/howto/adopt.md, are killed, and end as they did without it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

import raystate
from jobs.striking import kill_all, kill_family
from raystate.observe.ledger.reader import read_ledger
from raystate.storage import open_storage
from tests.cluster.training import wait_for
from tests.diffs import apply_hunk, hunks_of
from tests.patience import PATIENCE_S
from tests.processes import REPO, job_environment

PAGE = REPO / "docs/howto/adopt.md"
ORIGINALS = Path(__file__).parent / "originals"
MOST_LINES = 10  # that a diff may add and remove
FIRST_TRY = 200  # steps
TRIES = 4  # with twice the steps each, where a program had ended before it could be killed


def hunks(program: str) -> list[list[str]]:
    return hunks_of(PAGE, after=f"`tests/programs/originals/{program}`")


def adopted(program: str) -> str:
    """The program with its diff."""
    source = (ORIGINALS / program).read_text()
    for hunk in hunks(program):
        source = apply_hunk(source, hunk)
    assert sum(line[0] in "+-" for hunk in hunks(program) for line in hunk) <= MOST_LINES
    return source


class Program:
    """One program in a folder of its own."""

    def __init__(self, text: str, folder: Path, address: str):
        folder.mkdir()
        (folder / "program.py").write_text(text)
        self.folder = folder
        self._environment = {**job_environment(1), "RAY_ADDRESS": address}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, steps: int) -> None:
        with open(self.folder / "log", "ab") as log:
            command = [sys.executable, "program.py", str(steps), "."]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder, env=self._environment)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    @property
    def error(self) -> str | None:
        return None if self.process.poll() in (None, 0) else (self.folder / "log").read_text()[-3000:]

    def finish(self) -> dict[str, list[np.ndarray]]:
        self.process.wait(PATIENCE_S)
        assert self.error is None, self.error
        return {path.name: list(np.load(path).values()) for path in sorted(self.folder.glob("end*.npz"))}

    def run(self, steps: int) -> dict[str, list[np.ndarray]]:
        self.start(steps)
        return self.finish()

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            kill_family(self._process.pid)
            self._process.wait()


def _script(program: Program) -> bool:
    """Kill the whole program; the same command is given again."""
    program.kill()
    return True


def _worker(program: Program) -> bool:
    """Kill one of Ray Train's workers: the rest is raystate's."""
    here = [one for one in psutil.Process().children(recursive=True) if "RayTrainWorker" in " ".join(_words(one))]
    assert here, "Ray Train has workers"
    kill_all(here[:1])
    return False


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.parametrize(
    ("name", "strike"),
    [
        pytest.param("flax_digits.py", _script, id="flax", marks=pytest.mark.long),
        pytest.param("equinox_spirals.py", _script, id="equinox"),
        pytest.param("ray_line.py", _worker, id="ray", marks=pytest.mark.long),
    ],
)
def test_ten_lines_are_enough(name: str, strike: Callable[[Program], bool], ray_address: str, tmp_path: Path) -> None:
    program = Program(adopted(name), tmp_path / "adopted", ray_address)
    storage = program.folder / "run"
    reader = raystate.Reader(storage)
    steps = FIRST_TRY
    try:
        for _ in range(TRIES):
            program.start(steps)
            wait_for(lambda: storage.exists() and reader.latest_step(), "a durable step", failed=lambda: program.error)
            struck = (reader.latest_step() or 0) < steps
            again = strike(program) if struck else False
            if again:
                program.start(steps)
            end = program.finish()
            if struck:
                break
            steps *= 2  # the steps that there are go on
        assert struck, f"the program ended before step {steps}"
    finally:
        program.kill()
    assert reader.latest_step() == steps
    if strike is _worker:
        assert read_ledger(open_storage(storage)).recoveries, "a worker was killed"
    else:
        begun = re.findall(r"^(?:epoch|step) 1, ", (program.folder / "log").read_text(), re.MULTILINE)
        assert len(begun) == 1, "the second start did not begin again"
        told = re.findall(r"raystate \S+: .*; step \d+ from \w+, ", (program.folder / "log").read_text())
        assert len(told) == 1, "the second start's log has the lines of the actors, too, which the first one's driver has made"
    original = Program((ORIGINALS / name).read_text(), tmp_path / "original", ray_address).run(steps)
    assert original and original.keys() == end.keys()
    for one in original:
        assert len(original[one]) == len(end[one])
        for theirs, ours in zip(original[one], end[one], strict=True):
            assert theirs.dtype == ours.dtype and theirs.tobytes() == ours.tobytes(), one


def test_the_originals_know_nothing_of_raystate() -> None:
    for path in ORIGINALS.glob("*.py"):
        assert "import raystate" not in path.read_text()
        assert hunks(path.name), path.name
