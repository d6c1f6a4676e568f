"""From what `save` was given to the bytes in a slot: what is kept of a step, how large its table is, and the copy itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import numpy as np

from raystate.arena import Slot
from raystate.arrays.items import PackedItems
from raystate.arrays.names import flatten_trees
from raystate.arrays.stage import HeldState, copy
from raystate.arrays.tree import Described
from raystate.arrays.ways import Ways
from raystate.core.formats.local_values import digest, local_checksums
from raystate.core.formats.messages import SnapshotId, Staged
from raystate.core.formats.tree import SlotTable
from raystate.machine import fault_points
from raystate.machine.counts import counts
from raystate.manager.session import Session
from raystate.restored import STATE

LATER_BYTES = 16 << 10  # metrics and custom values of a later promise may be so much larger than those of the capture


@dataclass(frozen=True, kw_only=True)
class SaveArguments:
    """What one `save` was given, checked."""

    step: int
    state: Any
    items: PackedItems
    # From `hold_metrics`: numbers, or 0-d arrays of its own that may still be computing.
    metrics: Mapping[str, Any]
    custom: Any

    def kept(self) -> KeptArguments:
        """The same for later.

        Raises:
            ConfigError: jax can't flatten a tree.
        """
        leaves, structure = flatten_trees({STATE: self.state, **self.items.trees})
        if any(issubclass(kind, np.ndarray) for kind in set(map(type, leaves))):
            leaves = [*map(_own, leaves)]
        return KeptArguments(self, leaves, structure)


@dataclass(frozen=True, slots=True)
class KeptArguments:
    """What one `save` was given, as it was: the caller may change its containers and numpy arrays. jax.Arrays don't change."""

    _given: SaveArguments
    leaves: list[Any]
    _structure: Any

    @property
    def step(self) -> int:
        """Its number."""
        return self._given.step

    @property
    def metrics(self) -> Mapping[str, Any]:
        """As they were given: numbers, or 0-d arrays."""
        return self._given.metrics

    @property
    def has_words(self) -> bool:
        """Whether it has metrics or custom values."""
        return bool(self._given.metrics) or self._given.custom is not None

    def again(self) -> SaveArguments:
        """For a save of it."""
        trees = self._structure.unflatten(self.leaves)
        state = trees.pop(STATE)
        return replace(self._given, state=state, items=replace(self._given.items, trees=trees))


@dataclass(eq=False, kw_only=True)
class StepCopy:
    """One step on its way into a slot. `slot` is None for a promised step that found none free: it waits here, not the trainer."""

    snapshot: SnapshotId
    slot: int | None
    held: HeldState
    table: SlotTable  # without what is only known when the bytes are there
    metrics: Mapping[str, Any]
    promised: bool
    give_up_s: float
    fills: ClassVar = True

    def put(self, session: Session, *, compared: bool) -> None:
        """See `stage`."""
        stage(self, session, compared=compared)

    def release(self) -> None:
        """Let the bytes on the devices go."""
        self.held.release()


@dataclass(eq=False)
class LatePromise:
    """A step that is captured already, in that slot, is promised now, with the metrics and custom values of this later call."""

    snapshot: SnapshotId
    slot: int | None
    metrics: Mapping[str, Any]
    custom: Any
    promised: ClassVar = True
    fills: ClassVar = False

    def put(self, session: Session, *, compared: bool) -> None:  # noqa: ARG002 - as `StepCopy.put`
        """The capture is whole: its copy was made before."""
        assert session.words.arena is not None and self.slot is not None
        session.words.arena.slots[self.slot].promise(self.snapshot, _numbers(self.metrics), self.custom)

    def release(self) -> None:
        """There are no bytes."""


Job = StepCopy | LatePromise


def keep(
    given: SaveArguments,
    described: Described,
    ways: Ways,
    session: Session,
    slot: int | None,
    *,
    promised: bool,
) -> StepCopy:
    """Hold the bytes of a step on the devices, so that the training may go on and donate its state."""
    assert not given.items.unread, given.items.unread
    table = SlotTable(
        layout_ref="",
        crc32c=(),
        values=described.values,
        iterators=dict(given.items.iterators),
        files=dict(given.items.files),
        json_items=dict(given.items.json_items),
        custom=given.custom,
    )
    arena = session.words.arena
    return StepCopy(
        snapshot=SnapshotId(session.lineage, given.step),
        slot=slot,
        held=ways.hold(described, None if slot is None or arena is None else arena.slots[slot].fill),
        table=table,
        metrics=given.metrics,
        promised=promised,
        give_up_s=session.link.clock() + session.config.save_timeout_s,
    )


def stage(kept: StepCopy, session: Session, *, compared: bool) -> None:
    """Copy a step into its slot; the header comes last.

    Args:
        compared: the header says what this rank holds for itself, so that the ranks' values can be compared.
    """
    arena, snapshot = session.words.arena, kept.snapshot
    assert arena is not None and kept.slot is not None
    plan = kept.held.plan
    ref = arena.put_layout(plan.layout_bytes)
    slot: Slot = arena.slots[kept.slot]
    crcs = copy(kept.held, slot.fill())
    fault_points.reached("staging")
    table = replace(kept.table, layout_ref=ref, crc32c=crcs, metrics=_numbers(kept.metrics))
    header = Staged(
        lineage=snapshot.lineage,
        step=snapshot.step,
        rank=session.rank,
        world=session.world,
        layout=plan.layout_hash,
        promised=kept.promised,
        nbytes=plan.layout.data_bytes,
        local=digest(local_checksums(plan.layout, table)) if compared else 0,
    )
    slot.commit(header, table.to_bytes())
    counts.add("copied_bytes/memory", header.nbytes)


def table_bytes_of(described: Described, given: SaveArguments) -> int:
    """At most so many bytes does the slot's table take: JSON of checksums, scalars, items, metrics and custom, and those of a later
    promise."""
    items = given.items
    size = 4096 + LATER_BYTES + 2 * said_bytes(given) + 11 * len(described.layout.pieces)
    for values in described.values:
        size += sum(6 * len(value) + 3 if isinstance(value, str) else 32 for value in values)
    size += sum(6 * len(name) + 2 * len(state) + 16 for name, state in items.iterators.items())
    size += sum(
        6 * len(name) + 16 + sum(6 * len(file) + 2 * len(data) + 16 for file, data in files.items())
        for name, files in items.files.items()
    )
    return size + len(json.dumps(items.json_items))


def said_bytes(given: SaveArguments) -> int:
    """At most so many bytes do metrics and custom values take."""
    return sum(6 * len(name) + 40 for name in given.metrics) + len(json.dumps(given.custom))


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(np.asarray(value)) for name, value in metrics.items()}


def _own(leaf: Any) -> Any:
    return np.array(cast("Any", leaf)) if isinstance(leaf, np.ndarray) else leaf
