"""Plain scripts on Ray that can't come back hear so at their first save; what others keep comes back as it was."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.processes import REPO, job_environment, run_python
from tests.programs.running import Place
from tests.programs.small import BATCHES, EPOCHS

Start = Callable[..., tuple[int, str]]


@pytest.fixture
def start(ray_address: str, place: Callable[[str], Place]) -> Start:
    """(program, where, after how many steps it dies) -> its exit code, and what it has printed."""
    places: dict[str, Place] = {}

    def run(program: str, where: str, dies_after: int = 0) -> tuple[int, str]:
        at = places[where] = places.get(where) or place(where)
        environment = {**job_environment(1), "RAY_ADDRESS": ray_address}
        given = (program, at.storage, at.run, dies_after)
        done = run_python("-m", "tests.programs.small", *given, code=None, cwd=REPO, env=environment)
        return done.returncode, done.stdout + done.stderr

    return run


def test_epochs_and_random_numbers_go_on_where_they_were(start: Start):
    code, calm = start("epochs", "undisturbed")
    assert code == 0, calm
    for dies_after in (BATCHES + 2, 2 * BATCHES):  # in the midst of an epoch, and at the end of one
        code, told = start("epochs", "killed", dies_after)
        assert code == -signal.SIGKILL, told
    code, killed = start("epochs", "killed")
    assert code == 0, killed
    (end,) = [line for line in calm.splitlines() if line.startswith(f"ended with {EPOCHS * BATCHES} ")]
    assert end in killed.splitlines(), killed


def test_a_state_that_no_restart_takes_is_refused_at_its_first_save(start: Start):
    code, told = start("another_dtype", "another dtype", 3)
    assert code == 1
    assert "ReferenceMismatchError: save(step=1): a restart can't restore what is saved here" in told
    assert "n: expected dtype int32, the checkpoint has float32" in told


def test_a_script_that_restores_nothing_is_told_before_its_restart_is_refused(start: Start):
    code, told = start("no_restore", "no restore", 2)
    assert code == -signal.SIGKILL
    assert told.count("this StateManager has restored nothing") == 1 and "restore_or_init()" in told
    code, told = start("no_restore", "no restore", 2)
    assert code == 1 and "StepOrderError" in told, told
