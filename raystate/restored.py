"""What a restore gives back, and how a step's bytes are read, whichever tier holds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from raystate.arrays import (
    PieceSource,
    ReadRequest,
    array_leaves,
    describe,
    is_iterator,
    match_reference,
    restore_tree,
    set_iterators,
)
from raystate.core.errors import ReferenceMismatchError
from raystate.core.tree import TreeSpec
from raystate.orbax.state_item import STATE_ITEMS
from raystate.orbax.step_reader import StepReader

STATE = "state"


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A restored step.

    Attributes:
        step: completed steps; 0 when fresh.
        state: the state, in the reference's structure and shardings.
        items: by name: iterators (set in place), trees, JSON values.
        metrics: what was saved with the step.
        custom: what was saved with the step.
        tier: the slowest that any process needed: "memory", "peer", "storage", "source" or "init".
        set_aside: (step, reason) of newer steps that were found damaged.
    """

    step: int
    state: Any
    items: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    custom: Any = None
    tier: str = "init"
    set_aside: list[tuple[int, str]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How strictly a reference must match; see DESIGN, References."""

    partial: bool = False
    cast: bool = False
    shapes: Literal["match", "checkpoint"] = "match"
    transforms: Callable[[Any], object] | None = None


@dataclass(frozen=True, kw_only=True)
class StepContent:
    """A step that can be read, from whichever tier."""

    step: int
    tier: str
    trees: Mapping[str, TreeSpec]  # array items; the state is "state", whatever Orbax called it
    source: Callable[[str], PieceSource]  # item -> its bytes
    iterator_states: Callable[[str], tuple[dict[int, bytes], int]]  # item -> (by process, process count)
    iterators: tuple[str, ...]
    json_items: Mapping[str, Any]
    metrics: Mapping[str, float]
    custom: Any
    used_tier: Callable[[], str]  # the slowest tier that reading has needed so far
    no_state: ReferenceMismatchError | None = None  # why there is no "state": the step was written with other items

    def restore(
        self, reference: object, items: Mapping[str, object] | None, options: ReadOptions, *, world: int, process_index: int
    ) -> Restored:
        """Read what the reference and the items ask for.

        Raises:
            ReferenceMismatchError: all differences in one; ItemTopologyError; CorruptCheckpointError.
        """
        self.check(reference, items, options)
        state = self.tree(STATE, reference, options)
        got: dict[str, Any] = dict(self.json_items)
        iterators: dict[str, Any] = {}
        for name, wanted in (items or {}).items():
            if is_iterator(wanted):
                iterators[name] = got[name] = wanted
            elif name in self.trees:
                got[name] = self.tree(name, wanted, options)
        if iterators:
            states = {name: self.iterator_states(name) for name in iterators}
            old_world = max(world for _, world in states.values())
            by_process = {name: found for name, (found, _) in states.items()}
            set_iterators(iterators, by_process, old_world=old_world, world=world, process_index=process_index)
        return Restored(
            step=self.step,
            state=state,
            items=got,
            metrics=dict(self.metrics),
            custom=self.custom,
            tier=self.used_tier(),
        )

    def check(self, reference: object, items: Mapping[str, object] | None, options: ReadOptions) -> None:
        """Refuse what does not fit this step, before any of it is read. What `transforms` make of it is not known here.

        Raises:
            ReferenceMismatchError: all differences in one.
        """
        self._check_tree(STATE, reference, options)
        for name, wanted in (items or {}).items():
            if is_iterator(wanted):
                if name not in self.iterators:
                    raise ReferenceMismatchError(
                        f"step {self.step} has no iterator item {name!r}; it has {sorted(self.iterators)}",
                        step=self.step,
                        item=name,
                    )
            elif name in self.trees:
                self._check_tree(name, wanted, options)
            elif name not in self.json_items and not options.partial:
                have = sorted({*self.json_items, *self.iterators, *self.trees} - {STATE})
                raise ReferenceMismatchError(f"step {self.step} has no item {name!r}; it has {have}", step=self.step, item=name)

    def _check_tree(self, item: str, reference: Any, options: ReadOptions) -> None:
        self._find(item)
        if reference is not None and options.transforms is None:
            match_reference(reference, self.trees[item], partial=options.partial, cast=options.cast, shapes=options.shapes)

    def _find(self, item: str) -> None:
        if item == STATE and self.no_state is not None:
            raise self.no_state
        if item not in self.trees:
            raise ReferenceMismatchError(
                f"step {self.step} has no item {item!r} of arrays; it has {sorted(self.trees)}", step=self.step, item=item
            )

    def tree(self, item: str, reference: Any, options: ReadOptions) -> Any:
        """Read an item of arrays. Raises as `restore`."""
        self._find(item)
        spec, source = self.trees[item], self.source(item)
        if options.transforms is not None:
            raw = options.transforms(restore_tree(None, spec, source))
            spec, source = in_memory(item, raw)
        return restore_tree(reference, spec, source, partial=options.partial, cast=options.cast, shapes=options.shapes)


@dataclass(frozen=True)
class _Arrays:
    """A PieceSource over numpy arrays."""

    arrays: dict[int, np.ndarray]

    def read(self, requests: Sequence[ReadRequest]) -> list[np.ndarray]:
        boxes = [(r, tuple(slice(a, a + n) for a, n in zip(r.start, r.shape, strict=True))) for r in requests]
        return [np.array(self.arrays[r.leaf][box]) for r, box in boxes]


def in_memory(item: str, tree: Any) -> tuple[TreeSpec, PieceSource]:
    """A pytree of numpy arrays as something to restore from."""
    described = describe({item: tree}, process_index=0)
    spec = described.layout.trees[0].with_values(described.values[0])
    positions = [i for i, leaf in enumerate(spec.leaves) if leaf.kind == "array"]
    arrays = zip(positions, array_leaves(described, 0), strict=True)
    return spec, _Arrays({position: np.asarray(array) for position, array in arrays})


@dataclass(frozen=True)
class _StorageSource:
    reader: StepReader
    item: str

    def read(self, requests: Sequence[ReadRequest]) -> list[np.ndarray]:
        return self.reader.read(self.item, [(r.leaf, r.start, r.shape) for r in requests])


def content_from_storage(reader: StepReader, step: int) -> StepContent:
    """A step in storage: raystate's own, or stock Orbax's. One without a state can be looked at, and its other items read.

    Raises:
        CorruptCheckpointError: what its metadata say is not there.
        StepNotFoundError, StorageError.
    """
    kinds = reader.items()
    arrays = [name for name, kind in kinds.items() if kind == "arrays"]
    no_state, state_item = None, STATE
    try:
        state_item = reader.state_item()
    except ReferenceMismatchError as mistake:
        no_state = mistake
    orbax_name = {(STATE if name == state_item and name in STATE_ITEMS else name): name for name in arrays}
    if no_state is None:
        orbax_name[STATE] = state_item  # which also keeps a name of its own
    return StepContent(
        step=step,
        tier="storage",
        trees={name: reader.tree(item) for name, item in orbax_name.items()},
        source=lambda name: _StorageSource(reader, orbax_name[name]),
        iterator_states=reader.iterator_states,
        iterators=tuple(name for name, kind in kinds.items() if kind == "iterator"),
        json_items={name: reader.json(name) for name, kind in kinds.items() if kind == "json" and name != "metrics"},
        metrics=reader.metrics(),
        custom=reader.custom(),
        used_tier=lambda: "storage",
        no_state=no_state,
    )
