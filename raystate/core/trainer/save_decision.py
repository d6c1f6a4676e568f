"""What a trainer decides about one call of save()."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

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

    action: Action = "none"
    promised: bool = False
    slot: int | None = None
    reason: str
    wait: bool = False
    stop: bool = False
    dropped: SnapshotId | None = None
    ignored: bool = False
    word: TrainerWord
