"""From the hosts' parts of a save to its package: coverage, merge, small files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from raystate.core.formats.errors import ConfigError, CorruptCheckpointError
from raystate.core.formats.local_values import disagreement
from raystate.core.formats.own_files import common_files
from raystate.core.formats.tree import DataObject, Layout, Package, SlotTable, TreeSpec
from raystate.orbax.coverage import coverage_gaps
from raystate.orbax.merge import build_files, own_folders
from raystate.orbax.scratch import load_orbax
from raystate.runtime.parts import HostPart
from raystate.storage import StepFolder, Storage, data_objects


class Packager(Protocol):
    """Makes the package of a step, on a worker's thread."""

    def prepare(self) -> None:
        """Called once, while the trainers start."""
        ...

    def build(self, storage: Storage, run: str, step: int, save: str, parts: Sequence[HostPart]) -> Package:
        """See `build_package`."""
        ...


class OrbaxPackager:
    """The `Packager` of every run."""

    def prepare(self) -> None:
        """Import Orbax and JAX, which stalls all other threads for moments: not at the first save."""
        load_orbax()

    def build(self, storage: Storage, run: str, step: int, save: str, parts: Sequence[HostPart]) -> Package:
        """See `build_package`."""
        return build_package(storage, run, step, save, parts)


def build_package(storage: Storage, run: str, step: int, save: str, parts: Sequence[HostPart]) -> Package:
    """Merge exactly these writers.

    The tree, JSON items, metrics and `custom` are rank 0's; iterator states come from every rank. So are numbers, strings and arrays that
    each process holds for itself, which are equal on all.

    Raises:
        CorruptCheckpointError: a chunk is missing or written twice, or the parts describe different states.
        ConfigError: ranks hold different values of a leaf that a step has one value of; names leaf, ranks and the ways out.
    """
    tables: dict[int, SlotTable] = {rank: table for part in parts for rank, table in part.tables.items()}
    trees = _common_trees(step, parts)
    if differing := disagreement({rank: part.local[rank] for part in parts for rank in part.tables}):
        raise ConfigError(f"step {step} can't be committed. {differing}", field="state", step=step)
    prefix = StepFolder(storage, step, save).write_prefix
    objects: list[DataObject] = []
    for tree in trees:
        claims = [claim for part in parts for claim in part.claims.get(tree.item, [])]
        problems = coverage_gaps(tree, claims)
        if problems:
            shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
            raise CorruptCheckpointError(f"step {step}, item {tree.item!r} is incomplete: {shown}", step=step, item=tree.item)
        for part in parts:
            objects += part.objects.get(tree.item, [])
    first = tables[min(tables)]
    iterators: dict[str, dict[int, bytes]] = {}
    for rank, table in tables.items():
        for item, state in table.iterators.items():
            iterators.setdefault(item, {})[rank] = state
    own_files = {item: common_files(item, {rank: table.files[item] for rank, table in tables.items()}) for item in first.files}
    files = build_files(
        step,
        save,
        trees,
        first.values,
        {tree.item: [part.writer for part in parts if tree.item in part.objects] for tree in trees},
        lambda item: storage.kvstore(f"{prefix}/{item}"),
        iterators=iterators,
        own_files=own_files,
        json_items=first.json_items,
        metrics=first.metrics,
        custom=first.custom,
        world=len(tables),
    )
    for tree in trees:
        for name, begin in own_folders(tree.item, save).items():
            objects += data_objects(storage, prefix, name, writer=f"{save}hc", begin=begin)
    return Package(step=step, save=save, run=run, files=files, objects=tuple(objects))


def _common_trees(step: int, parts: Sequence[HostPart]) -> tuple[TreeSpec, ...]:
    hashes = {part.host: Layout(trees=part.trees, pieces=()).global_hash() for part in parts}
    if len(set(hashes.values())) != 1:
        shown = ", ".join(f"{host[:8]}: {value}" for host, value in sorted(hashes.items()))
        raise CorruptCheckpointError(f"step {step}: the hosts describe different states ({shown})", step=step)
    return parts[0].trees
