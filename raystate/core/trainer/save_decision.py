"""What a trainer decides about one call of save()."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from raystate.core.formats.errors import StepOrderError
from raystate.core.formats.names import SnapshotId
from raystate.core.formats.reports import TrainerWord

Due = Callable[[int, bool], str]
"""A save policy: (completed steps, whether the run has no durable or promised step yet) -> why the step is due, "" if it isn't.
The same question must give the same answer on every rank."""

Action = Literal["none", "skip", "stage", "hold", "promise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveDecision:
    """What to do with the state that save() was given.

    Attributes:
        action: "stage" copies it into `slot`; "hold" keeps a copy on the device until `take_slot` gives a slot (it replaces the one
            held before, if any: see `dropped`); "promise": the step's capture, in `slot`, is to become durable with the metrics and the
            custom values of this call; "skip": a snapshot was due but has no slot; "none": nothing was due.
        promised: what save() returns.
        slot: index of the granted slot, with "stage"; of the capture's, with "promise".
        wait: an acknowledged proposal is undecided at its step: read the host's word again and call `on_save` again with the same
            arguments, until a deadline. Nothing else of the decision holds then, but `word` has to be written.
        stop: this is the step at which all ranks stop: once it is durable the training ends with `Interrupted(reason)`.
        dropped: a promised snapshot whose held copy is given up for this one; it is reported as not durable.
        ignored: the step is saved already; nothing of this call counts.
        word: to be written into the trainer's cell now.
    """

    action: Action
    promised: bool
    slot: int | None
    reason: str
    wait: bool
    stop: bool
    dropped: SnapshotId | None
    ignored: bool
    word: TrainerWord


_WAYS_OUT = (
    "restore(step=…, rollback=True) retires the newer steps, restore() goes on from the newest, and another `storage` begins a run of "
    "its own"
)


def refuse_other_pasts(step: int, *, rank: int, newest: int, stored: int, ahead: Collection[int]) -> None:
    """Refuse a step that is older than the newest one, or lies in storage from another past.

    Args:
        step, rank: of the save.
        newest: step of this training.
        stored: newest step in storage if this training has restored none of them; -1: it has, or there is none.
        ahead: steps in storage that are newer than what this training has restored.

    Raises:
        StepOrderError: names the ways out.
    """
    where = f"save of step {step} on rank {rank}"
    if step < newest:
        text = (
            f"{where}: the newest step is {newest}. Begin the loop at `restored.step`; to go back, restore(step=…, rollback=True)"
        )
        raise StepOrderError(text, step=step, newest=newest, rank=rank)
    if step <= stored:
        raise StepOrderError(
            f"{where}: storage holds steps up to {stored} of an earlier training, and this one has restored none of them: {_WAYS_OUT}",
            step=step,
            newest=stored,
            rank=rank,
        )
    if step in ahead:
        raise StepOrderError(
            f"{where}: storage holds that step of another past: {_WAYS_OUT}", step=step, newest=max(ahead), rank=rank
        )
