"""`raystate rm`: a run goes whole, or one step of it, and an interrupted removal is only repeated."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from raystate.core.formats.errors import StaleAttemptError, StepNotFoundError, StorageError
from raystate.core.formats.messages import LiveStep
from raystate.storage import LogReader, Storage, visible_steps
from raystate.storage.names import log_name
from raystate.testing.storage import DiedError, DyingAt
from raystate.testing.storage.contract import tree
from raystate.transfer.attempt import OutsideAttempt
from raystate.transfer.removing import remove_run, remove_step, steps_of_run
from tests.storage.backends import BACKENDS, a_package
from tests.storage.test_garbage import started

STEPS = (10, 20, 30)


def a_run(storage: Storage) -> OutsideAttempt:
    attempt = OutsideAttempt(storage, "import", "lm")
    for step in STEPS:
        save = f"a1k{step}"
        folder = started(storage, step, save)
        attempt.append("a save", commit=LiveStep(step=step, save=save))
        folder.publish(a_package(step, save)[0])
        attempt.carried_out("commit", step)
    attempt.append("done")
    return attempt


@pytest.mark.parametrize("step", STEPS)
def test_one_step_goes_and_the_run_is_the_others(storage: Storage, step: int):
    living = a_run(storage)
    remove_step(storage, step)
    left = tuple(one for one in STEPS if one != step)
    assert visible_steps(storage) == steps_of_run(storage) == left
    assert not [name for name in tree(storage) if f"a1k{step}" in name]
    tail = LogReader(storage).tail()
    assert tail is not None
    assert (tail.run, tail.intents) == ("lm", ())
    with pytest.raises(StaleAttemptError):
        living.append("whoever had the run before")


def test_what_is_all_that_there_is_stays(storage: Storage):
    a_run(storage)
    with pytest.raises(StepNotFoundError, match="no step 25; its steps: 10, 20, 30"):
        remove_step(storage, 25)
    assert visible_steps(storage) == STEPS
    remove_step(storage, 10)
    remove_step(storage, 20)
    with pytest.raises(StorageError, match=r"all that .* has: delete the run"):
        remove_step(storage, 30)


def test_a_run_goes_with_nothing_else(storage: Storage):
    a_run(storage)
    storage.create("notes.txt", b"mine")
    storage.create("40/state/mine", b"no step")
    assert remove_run(storage) == ("40/", "notes.txt")
    assert sorted(tree(storage)) == ["40/state/mine", "notes.txt"]
    with pytest.raises(StepNotFoundError, match=r"is no run: it has no \.raystate/"):
        remove_run(storage)


def test_a_log_with_nothing_of_raystates_is_no_run(storage: Storage):
    storage.create(".raystate/log/hello.txt", b"mine")
    with pytest.raises(StepNotFoundError, match=r"is no run: .*, but \.raystate/log/hello\.txt"):
        remove_run(storage)
    assert sorted(tree(storage)) == [".raystate/log/hello.txt"]


@pytest.mark.parametrize("backend", ["directory", "memory"])
def test_a_removal_that_is_interrupted_anywhere_is_repeated(backend: str, tmp_path: Path):
    with BACKENDS[backend](tmp_path) as storage:
        for number in itertools.count():
            a_run(storage)
            try:
                remove_run(DyingAt(storage, number, after=False))
                break
            except DiedError:
                pass
            if tree(storage):  # else it was all but its last look
                remove_run(storage)
            assert not tree(storage), number
    assert number > 10


def test_a_run_whose_log_is_damaged_goes_too(storage: Storage):
    a_run(storage)
    tail = LogReader(storage).tail()
    assert tail is not None
    storage.delete(log_name(tail.seq))
    storage.create(log_name(tail.seq), b"no entry")
    remove_run(storage)
    assert not tree(storage)
