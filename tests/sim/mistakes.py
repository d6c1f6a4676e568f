"""Calls that go wrong: nothing of them may stay."""

from __future__ import annotations

from raystate.core.formats.errors import RaystateError, StepOrderError
from raystate.core.formats.messages import HostWord
from raystate.core.trainer.machine import Trainer
from tests.sim.storage import Violation


def make(machine: Trainer, step: int, force: bool, host_word: HostWord | None, busy: bool) -> None:
    """The script saves a step that it may not save, and one whose copy then fails: neither leaves a trace."""
    before = machine.memento()
    if machine.newest > 0:
        try:
            machine.on_save(machine.newest - 1, force=True, host_word=host_word)
        except StepOrderError:
            pass
        except RaystateError:
            return  # the run has failed: so will the right call
        else:
            raise Violation(f"save: step {machine.newest - 1} was taken after step {machine.newest}")
    _compare(before, machine)
    try:
        machine.on_save(step, force=force, host_word=host_word, stager_busy=busy)
    except RaystateError:
        pass
    else:
        machine.put_back(before)
    _compare(before, machine)


def _compare(before: dict[str, object], machine: Trainer) -> None:
    after = machine.memento()
    changed = [name for name, value in before.items() if after[name] != value and name != "number"]
    if changed:
        raise Violation(f"save is all or nothing: a call that failed has changed {changed}")
