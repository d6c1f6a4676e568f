"""What a restore gives back, and how a step's bytes are read, whichever tier holds them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np

from raystate.arrays.checkpointables import is_checkpointable, load_files
from raystate.arrays.checks import shown
from raystate.arrays.items import holds_arrays, is_iterator, is_state_of, set_iterators
from raystate.arrays.paths import shown as shown_path
from raystate.arrays.raw import array_bytes, check_asked_for, check_raw, check_spread, host_want, raw_wants
from raystate.arrays.reference import Matched, match_reference
from raystate.arrays.restore import HostArrays, PieceSource, ReadRequest, read_raw, restore_tree
from raystate.arrays.stage import array_leaves
from raystate.arrays.stored import state_dict
from raystate.arrays.transforms import Rules, Transforms
from raystate.arrays.tree import describe
from raystate.config.errors import check_flag
from raystate.core.formats.boxes import Box
from raystate.core.formats.errors import ConfigError, ReferenceMismatchError, callers_code
from raystate.core.formats.tree import TreeSpec
from raystate.machine.memory import node_memory
from raystate.orbax.item_kinds import STATE_ITEMS
from raystate.orbax.step_reader import StepReader

STATE = "state"


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A restored step.

    Attributes:
        step: completed steps; 0 when fresh.
        state: the state, in the reference's structure and shardings.
        items: by name: iterators and checkpointables (set in place), trees, JSON values.
        metrics, custom: as they were saved with the step.
        tier: the slowest that any process needed: "memory", "peer", "storage", "source" or "init".
        set_aside: (step, reason) of newer steps that were found damaged.
        bytes_from: array bytes that this process has taken, by tier: "memory" (its own node's), "peer" (other nodes' memory),
            "storage" (whole chunks). A value that several of its devices have counts once.
        left_out: (path, bytes) of the leaves and items that neither the reference nor `items` names: "state/params/kernel",
            "data". The bytes of an item that is no tree of arrays count as 0.
    """

    step: int
    state: Any
    items: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    custom: Any = None
    tier: str = "init"
    set_aside: list[tuple[int, str]] = field(default_factory=list)
    bytes_from: dict[str, int] = field(default_factory=dict)
    left_out: list[tuple[str, int]] = field(default_factory=list)

    def state_dict(self) -> Any:
        """The state as `flax.serialization.to_state_dict` gives it, for `from_state_dict`. Lists
        and tuples become {"0": …}, empty nodes and None {}. Its arrays are the state's own."""
        return state_dict(self.state)


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How strictly a reference must match.

    Attributes:
        partial: paths and items that only the reference has keep its value.
        cast: dtypes are converted.
        shapes: "checkpoint": where shapes differ, the checkpoint's is taken.
        transforms: of the state, or with `load(item=…)` of that item. A function on the raw tree in
            host memory, or a mapping of new path to old path; see `Rules`.

    Raises:
        ConfigError: names the option.
    """

    partial: bool = False
    cast: bool = False
    shapes: Literal["match", "checkpoint"] = "match"
    transforms: Transforms | None = None

    def __post_init__(self) -> None:
        for name in ("partial", "cast"):
            check_flag(name, getattr(self, name))
        if self.shapes not in ("match", "checkpoint"):
            text = f"shapes: expected 'match' or 'checkpoint', not {shown(self.shapes)}"
            raise ConfigError(text, field="shapes", expected=("match", "checkpoint"), got=shown(self.shapes))
        if self.transforms is not None and not callable(self.transforms):
            if not isinstance(self.transforms, Mapping):
                text = f"transforms must be a function or a mapping of new path to old path, not a {type(self.transforms).__name__}"
                raise ConfigError(text, field="transforms", got=type(self.transforms).__name__)
            Rules(self.transforms)

    def rules(self) -> Rules | None:
        """For one tree, if `transforms` is a mapping."""
        return Rules(self.transforms) if isinstance(self.transforms, Mapping) else None

    def of_items(self) -> ReadOptions:
        """For the trees beside the state."""
        return dataclasses.replace(self, transforms=None)


_KEYS = ". Keys of Orbax's JaxRandomKeySave and NumpyRandomKeySave lie below the item: raystate.load('…/jax_random_key')"


@dataclass(frozen=True, kw_only=True)
class StepContent:
    """A step that can be read, from whichever tier."""

    step: int
    tier: str
    trees: Mapping[str, TreeSpec]  # array items; the state is always "state"
    source: Callable[[str], PieceSource]  # item -> its bytes
    iterator_states: Callable[[str], tuple[dict[int, bytes], int]]  # item -> (by process, process count)
    iterators: tuple[str, ...]
    json_items: Mapping[str, Any]
    metrics: Mapping[str, float]
    custom: Any
    used_tier: Callable[[], str]  # the slowest tier that reading has needed so far
    bytes_from: Callable[[], dict[str, int]]  # see `Restored`: so far
    file_items: tuple[str, ...] = ()
    files: Callable[[str], dict[str, bytes]] = lambda _: {}  # of `file_items`: item -> what the user's checkpointable wrote
    on_plan: Callable[[int], None] = lambda _: None  # called with bytes that will be read, before they are
    on_moved: Callable[[Callable[[], None]], None] = lambda _: None  # called with what puts iterators back that were set
    no_state: ReferenceMismatchError | None = None  # why there is no "state": the step was written with other items
    alone: bool = False  # the one checkpoint of its path, and no step of a run

    def restore(
        self, reference: object, items: Mapping[str, object] | None, options: ReadOptions, *, world: int, process_index: int
    ) -> Restored:
        """Read what the reference and the items ask for.

        Raises:
            ReferenceMismatchError: all differences in one; ItemTopologyError; CorruptCheckpointError.
        """
        matched, of_items = self.check(reference, items, options)
        state = self._read(STATE, reference, options, matched)
        got = self._read_items(items or {}, options, of_items, world=world, process_index=process_index)
        return Restored(
            step=self.step,
            state=state,
            items={**self.json_items, **got},
            metrics=dict(self.metrics),
            custom=self.custom,
            tier=self.used_tier(),
            bytes_from=self.bytes_from(),
            left_out=self.left_out(items or {}, matched, of_items),
        )

    def load_items(self, items: Mapping[str, object], options: ReadOptions, *, world: int, process_index: int) -> dict[str, Any]:
        """These items by name, and nothing else; the state is one of them. Raises as `restore`."""
        matched = self._check_items(items, options)
        return self._read_items(items, options, matched, world=world, process_index=process_index)

    def _read_items(
        self, items: Mapping[str, object], options: ReadOptions, matched: Mapping[str, Matched], *, world: int, process_index: int
    ) -> dict[str, Any]:
        """Each of `items`, as `_check_items` let it pass: what the step lacks is the wanted value."""
        got: dict[str, Any] = {}
        iterators: dict[str, Any] = {}
        files: dict[str, dict[str, bytes]] = {}
        for name, wanted in items.items():
            if name not in self.names():
                got[name] = wanted
            elif is_iterator(wanted):
                iterators[name] = got[name] = wanted
            elif is_checkpointable(wanted):
                files[name], got[name] = self.files(name), wanted
            elif name in self.trees:
                got[name] = self._read(name, wanted, options if name == STATE else options.of_items(), matched.get(name))
            else:
                got[name] = self.json_items.get(name, wanted)
        with contextlib.ExitStack() as undo:
            if iterators:
                states = {name: self.iterator_states(name) for name in iterators if name in self.iterators}
                old_world = max((count for _, count in states.values()), default=world)
                by_process = {name: found for name, (found, _) in states.items()}
                for name in iterators.keys() - states.keys():  # JSON, as scripts keep it that use Orbax alone: one for all
                    by_process[name] = dict.fromkeys(range(old_world), json.dumps(self.json_items[name]).encode())
                undo.callback(set_iterators(iterators, by_process, old_world=old_world, world=world, process_index=process_index))
            for name, found in files.items():  # last: their own code may raise anything
                load_files(name, got[name], found)
            self.on_moved(undo.pop_all().close)
        return got

    def check(
        self, reference: object, items: Mapping[str, object] | None, options: ReadOptions
    ) -> tuple[Matched | None, dict[str, Matched]]:
        """Refuse what does not fit this step, before it is read; `transforms` functions don't run.

        Returns:
            What to do for the leaves of the state, and of each item, as far as they were matched.

        Raises:
            ReferenceMismatchError: all differences in one. CapacityError: it is larger than the memory that is free.
        """
        return self._check_tree(STATE, reference, options), self._check_items(items or {}, options)

    def left_out(
        self, items: Mapping[str, object] | None, matched: Matched | None, of_items: Mapping[str, Matched]
    ) -> list[tuple[str, int]]:
        """See `Restored`; the two last are what `check` gave."""
        of_trees = {STATE: matched, **of_items}
        leaves = [(name, leaf) for name, one in of_trees.items() if one is not None for leaf in one.left_out]
        found = [(f"{name}/{shown_path(leaf.path)}", array_bytes(leaf)) for name, leaf in leaves]
        others = sorted({*self.trees, *self.iterators, *self.file_items} - {STATE, *(items or {})})
        sizes = {name: sum(map(array_bytes, tree.leaves)) for name, tree in self.trees.items()}
        return found + [(name, sizes.get(name, 0)) for name in others]

    def _check_items(self, items: Mapping[str, object], options: ReadOptions) -> dict[str, Matched]:
        matched: dict[str, Matched] = {}
        for name, wanted in items.items():
            if name == STATE and self.no_state is not None:
                raise self.no_state
            if wanted is ... and name in {*self.iterators, *self.file_items}:
                continue
            if options.partial and name not in self.names():
                if not (is_iterator(wanted) or is_checkpointable(wanted)):  # has it values to keep?
                    match_reference(wanted, TreeSpec(item=name, leaves=()), partial=True, cast=False, shapes="match")
            elif is_iterator(wanted):
                if name not in self.iterators and not is_state_of(self.json_items.get(name), wanted):
                    raise self._no_item(name, "iterator item", self.iterators)
            elif is_checkpointable(wanted):
                if name not in self.file_items:
                    raise self._no_item(name, "item of a checkpointable", self.file_items)
            elif name in self.file_items:
                text = f"item {name!r} of {self._called} are files that an object wrote: give such an object, which loads itself"
                raise ReferenceMismatchError(f"{text}, items={{{name!r}: object}}{_KEYS}", step=self.step, item=name)
            elif name in self.trees:
                found = self._check_tree(name, wanted, options if name == STATE else options.of_items())
                if found is not None:
                    matched[name] = found
            elif name in self.iterators:
                text = f"item {name!r} of {self._called} is the state of an iterator: give the iterator that is to be set in place"
                raise ReferenceMismatchError(f"{text}, items={{{name!r}: iterator}}", step=self.step, item=name)
            elif name in self.json_items:
                if holds_arrays(wanted):
                    text = f"item {name!r} of {self._called} is JSON: ask for it with None, items={{{name!r}: None}}"
                    raise ReferenceMismatchError(text, step=self.step, item=name)
            else:
                raise self._no_item(name, "item", self.names() - {STATE})
        return matched

    def _no_item(self, name: str, what: str, there: Collection[str]) -> ReferenceMismatchError:
        text = f"{self._called} has no {what} {name!r}; it has {', '.join(map(repr, sorted(there))) or 'none'}. "
        text += "A new item keeps its value with partial=True"
        text += "" if self.alone else "; to have it at a restart give it to each save, save(…, items={…})"
        return ReferenceMismatchError(text, step=self.step, item=name)

    @property
    def _called(self) -> str:
        return "this checkpoint" if self.alone else f"step {self.step}"

    def names(self) -> set[str]:
        """Of all items, the state among them."""
        return {*self.json_items, *self.iterators, *self.file_items, *self.trees}

    def _check_tree(self, item: str, reference: Any, options: ReadOptions) -> Matched | None:
        self._find(item)
        spec = self.trees[item]
        if callable(options.transforms):
            self._check_raw(spec, [host_want(spec, index) for index in range(len(spec.leaves))])
            return None
        rules = options.rules()
        if reference is not None:
            matched = match_reference(
                reference, spec, partial=options.partial, cast=options.cast, shapes=options.shapes, rules=rules
            )
            node = node_memory()
            check_asked_for(spec, matched.wants, free_bytes=node.free_bytes, says=node.whose)
            return matched
        if rules is not None:
            raise ConfigError("transforms as a mapping needs a reference, whose leaves it makes", field="transforms")
        wants = raw_wants(spec)
        check_spread(spec, wants, processes=jax.process_count())
        self._check_raw(spec, wants)
        return None

    def _check_raw(self, spec: TreeSpec, wants: Sequence[Any]) -> None:
        node = node_memory()
        check_raw(spec, wants, free_bytes=node.free_bytes, says=node.whose)

    def _find(self, item: str) -> None:
        if item == STATE and self.no_state is not None:
            raise self.no_state
        if item in self.trees:
            return
        text = f"{self._called} has no item {item!r} of arrays; it has {sorted(self.trees)}"
        for names, kind, wanted in (
            (self.file_items, "files that an object wrote", "object"),
            (self.iterators, "the state of an iterator", "iterator"),
            (self.json_items, "JSON", "None"),
        ):
            if item in names:
                call = f"raystate.load(…, items={{{item!r}: {wanted}}})[{item!r}]"
                text = f"item {item!r} of {self._called} has no arrays, it is {kind}: {call} reads it"
                text += _KEYS if names is self.file_items else ""
        raise ReferenceMismatchError(text, step=self.step, item=item)

    def tree(self, item: str, reference: Any, options: ReadOptions) -> Any:
        """Read an item of arrays. Raises as `restore`."""
        return self._read(item, reference, options, self._check_tree(item, reference, options))

    def _read(self, item: str, reference: Any, options: ReadOptions, matched: Matched | None) -> Any:
        spec, source = self.trees[item], self.source(item)
        if callable(options.transforms):
            raw = read_raw([host_want(spec, index) for index in range(len(spec.leaves))], spec, source, self.on_plan)
            with callers_code():
                made = options.transforms(raw)
            if reference is None:
                return made
            spec, source = in_memory(item, made)
        return restore_tree(
            reference,
            spec,
            source,
            partial=options.partial,
            cast=options.cast,
            shapes=options.shapes,
            rules=options.rules(),
            matched=matched,
            on_plan=self.on_plan,
        )


def in_memory(item: str, tree: Any) -> tuple[TreeSpec, PieceSource]:
    """A pytree of numpy arrays as something to restore from."""
    described = describe({item: tree}, process_index=0)
    spec = described.layout.trees[0].with_values(described.values[0])
    positions = [i for i, leaf in enumerate(spec.leaves) if leaf.kind == "array"]
    arrays = zip(positions, array_leaves(described, 0), strict=True)
    return spec, HostArrays({position: np.asarray(array) for position, array in arrays})


@dataclass(frozen=True)
class _StorageSource:
    reader: StepReader
    item: str
    lends = False

    def read(self, requests: Sequence[ReadRequest]) -> list[np.ndarray]:
        return self.reader.read(self.item, [(r.leaf, r.start, r.shape) for r in requests])

    def read_into(self, boxes: Sequence[tuple[int, Box]], into: Sequence[np.ndarray]) -> None:
        self.reader.read(self.item, [(leaf, box.start, box.shape) for leaf, box in boxes], into)


def content_from_storage(reader: StepReader, step: int, *, alone: bool = False) -> StepContent:
    """A step in storage, or the checkpoint that is `alone` there: raystate's own, or stock Orbax's. One without a state can be looked
    at, and its other items read.

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
        iterators=tuple(
            name for name, kind in kinds.items() if kind == "iterator" or (kind == "files" and reader.has_iterator_states(name))
        ),
        files=reader.own_files,
        file_items=tuple(name for name, kind in kinds.items() if kind in ("files", "other")),
        json_items={name: reader.json(name) for name, kind in kinds.items() if kind == "json" and name != "metrics"},
        metrics=reader.metrics(),
        custom=reader.custom(),
        used_tier=lambda: "storage",
        bytes_from=lambda: {"storage": reader.bytes_read},
        no_state=no_state,
        alone=alone,
    )
