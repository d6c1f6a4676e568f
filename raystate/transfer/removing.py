"""A run, or one step of it, is deleted because the user says so: through the log, and behind its fence."""

from __future__ import annotations

import contextlib
import os

from raystate.core.formats.entries import DELETE
from raystate.core.formats.errors import ConfigError, CorruptCheckpointError, StepNotFoundError, StorageError
from raystate.core.formats.log import live_steps
from raystate.storage import LogReader, StepFolder, Storage, is_missing, visible_steps, why_empty
from raystate.storage.names import LOG, STATE, number_of
from raystate.transfer.attempt import OutsideAttempt


def steps_of_run(storage: Storage) -> tuple[int, ...]:
    """The steps of a run, ascending; of one whose log can't be read, those that are visible.

    Raises:
        StepNotFoundError: there is no run.
        StorageError: storage failed.
    """
    if is_missing(storage) or not storage.list(STATE, recursive=False):
        why = why_empty(storage) or f"it has no {STATE}/; what lies there is not raystate's to delete"
        raise StepNotFoundError(f"{storage.url} is no run: {why}", path=storage.url)
    log = storage.list(LOG)
    if log and not any(number_of(info.name) for info in log):  # an empty one is of a removal that was interrupted
        text = f"{storage.url} is no run: {LOG}/ has no entry of raystate's, but {log[0].name}: delete it by hand if you mean it"
        raise StepNotFoundError(text, path=storage.url)
    live: tuple[int, ...] = ()
    with contextlib.suppress(CorruptCheckpointError, ConfigError):
        live = live_steps(LogReader(storage).tail())
    return tuple(sorted({*live, *visible_steps(storage)}))


def name_of_run(storage: Storage) -> str | None:
    """As its log says; None: the log is empty, or can't be read."""
    with contextlib.suppress(CorruptCheckpointError, ConfigError):
        tail = LogReader(storage).tail()
        return (tail.run or None) if tail is not None else None
    return None


def remove_step(storage: Storage, step: int) -> None:
    """Delete one step. The run goes on from the newest that is left.

    Raises:
        StepNotFoundError: there is no such step.
        StorageError: it is the only one, an older attempt may still publish it, or storage failed.
        CorruptCheckpointError: the log can't be read.
        StaleAttemptError: somebody else has claimed the run meanwhile.
    """
    steps = steps_of_run(storage)
    if step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise StepNotFoundError(f"{storage.url} has no step {step}; its steps: {there}", step=step, available=list(steps))
    if len(steps) == 1:
        raise StorageError(f"step {step} is all that {storage.url} has: delete the run, without --step", step=step)
    attempt = OutsideAttempt(storage, "rm")
    attempt.finish_earlier()
    if (why := attempt.refuse_retire(step)) is not None:
        raise StorageError(why, step=step)
    saves = {one.step: one.save for one in attempt.tail.live}
    attempt.append(f"rm of step {step}", retires=[(step, False, DELETE)])
    StepFolder(storage, step, saves[step]).retire()
    attempt.carried_out("retire", step)
    attempt.append(f"rm: step {step} is gone")


def remove_run(storage: Storage) -> tuple[str, ...]:
    """Delete a run with all its steps. It may be called again where it was interrupted.

    Returns:
        What is not the run's and stays: names in the storage; a folder's ends in "/".

    Raises:
        StepNotFoundError: there is no run.
        StorageError: storage failed.
        StaleAttemptError: somebody else has claimed the run meanwhile.
    """
    steps_of_run(storage)  # or there is no run
    # A log that can't be read fences no process off, and lets none go on either.
    with contextlib.suppress(CorruptCheckpointError, ConfigError):
        attempt = OutsideAttempt(storage, "rm")
        doomed = {(one.step, one.save) for one in (*attempt.tail.live, *attempt.tail.intents)}
        if attempt.tail.live:
            attempt.append("rm of the run", retires=[(one.step, False, DELETE) for one in attempt.tail.live])
        for step, save in sorted(doomed, key=str):
            StepFolder(storage, step, save).retire()
    for step in visible_steps(storage):  # that no log knows any more
        StepFolder(storage, step, None).retire()
    storage.delete_tree(STATE)
    left = tuple(info.name for info in storage.list(recursive=False))
    if not left and storage.is_directory:
        with contextlib.suppress(OSError):  # somebody else uses it by now
            os.rmdir(storage.local_path(""))
    return left
