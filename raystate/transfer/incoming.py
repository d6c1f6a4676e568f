"""A step that comes from elsewhere, in any format: described in full, its arrays still to be
read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raystate.core.formats.texts import counted
from raystate.core.formats.tree import TreeSpec
from raystate.orbax.array_reads import Request
from raystate.orbax.item_kinds import METRICS
from raystate.orbax.step_reader import StepReader
from raystate.restored import STATE


@dataclass(frozen=True, kw_only=True)
class IncomingStep:
    """One step, to be written into a run.

    Attributes:
        step: number of completed steps.
        trees: item of arrays -> its leaves, numbers and texts with their values. The state is "state".
        read: item, boxes (leaf index, start, shape) -> arrays.
        iterators: item -> process -> its state, of all processes below `world`.
        world: how many processes saved the iterators.
        own_files: item -> what a user's checkpointable wrote: name -> bytes.
        json_items: item -> JSON value.
        metrics: as they were saved.
        custom: as it was saved.
        left_out: items of SRC that are not brought along, one sentence each.
    """

    step: int
    trees: Mapping[str, TreeSpec]
    read: Callable[[str, Sequence[Request]], list[np.ndarray]]
    iterators: Mapping[str, Mapping[int, bytes]] = field(default_factory=dict)
    world: int = 1
    own_files: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    json_items: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    custom: Any = None
    left_out: tuple[str, ...] = ()

    @classmethod
    def from_reader(cls, reader: StepReader, step: int) -> IncomingStep:
        """A step that a reader has opened, with all its items of arrays and JSON and its iterators.

        Args:
            reader: of the step.
            step: the number that it gets.

        Raises:
            ReferenceMismatchError: it has no state, and several other items of arrays. CorruptCheckpointError.
        """
        kinds = reader.items()
        state = reader.state_item()
        # Which item of the step each one here is.
        origin = {name: name for name, kind in kinds.items() if kind == "arrays" and name not in (STATE, state, METRICS)}
        origin[STATE] = state
        left_out: list[str] = []
        if METRICS in kinds and state != METRICS:
            left_out.append(f"item {METRICS!r}: it holds arrays, and so are a step's numbers called here")
        iterators, world = _iterators(reader, left_out)
        for name, kind in kinds.items():
            if kind == "other":
                left_out.append(f"item {name!r}: it is neither arrays nor JSON nor iterator states")

        def read(wanted: str, requests: Sequence[Request]) -> list[np.ndarray]:
            return reader.read(origin[wanted], requests)

        return cls(
            step=step,
            trees={name: dataclasses.replace(reader.tree(there), item=name) for name, there in origin.items()},
            read=read,
            iterators=iterators,
            world=world,
            own_files={name: reader.own_files(name) for name, kind in kinds.items() if kind == "files"},
            json_items={name: reader.json(name) for name, kind in kinds.items() if kind == "json"},
            metrics=reader.metrics(),
            custom=reader.custom(),
            left_out=tuple(left_out),
        )


def _iterators(reader: StepReader, left_out: list[str]) -> tuple[dict[str, dict[int, bytes]], int]:
    """The iterator items, and how many processes saved them: a step has one number, so those of other numbers are left out."""
    found = {name: reader.iterator_states(name) for name, kind in reader.items().items() if kind == "iterator"}
    world = max((count for _, count in found.values()), default=1)
    for name, (_, count) in found.items():
        if count != world:
            left_out.append(
                f"item {name!r}: its iterator states are of {counted(count, 'process', 'processes')}, others' of {world}"
            )
    return {name: states for name, (states, count) in found.items() if count == world}, world
