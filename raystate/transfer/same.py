"""Whether a run has this very step already: an import that was interrupted goes on where it ended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from raystate.core.formats.errors import ConfigError, CorruptCheckpointError
from raystate.core.formats.tree import TreeSpec
from raystate.inspection import open_step
from raystate.inspection.boxes import total_bytes
from raystate.storage import Storage
from raystate.transfer.boxes import batches, raw, read_ahead
from raystate.transfer.incoming import IncomingStep
from raystate.transfer.orbax_tree import essence, with_our_chunks
from raystate.transfer.progress import Progress


def has_same(storage: Storage, step: IncomingStep, progress: Progress) -> bool:
    """Whether the visible step of this number is the same in all that an import brings: every array bit for bit, and everything else.

    The content alone decides: a number says nothing about it, and a name of a source says nothing about what lay there then.

    Raises:
        CorruptCheckpointError, StorageError: the source can't be read. A step that is there and
            can't be read is not the same.
    """
    try:
        there = IncomingStep.from_reader(open_step(storage, step.step), step.step)
        if _small(there) != _small(step):
            return False
    except (ConfigError, CorruptCheckpointError):
        return False
    total, done = sum(map(total_bytes, step.trees.values())), 0
    for item, tree in step.trees.items():
        for same, nbytes in _compared(step, there, item, with_our_chunks(tree)):
            if not same:
                return False
            done += nbytes
            progress(f"step {step.step}: comparing", min(done, total), total)
    return True


def _small(step: IncomingStep) -> list[Any]:
    """All but the arrays' elements."""
    leaves = {item: sorted(map(repr, map(essence, tree.leaves))) for item, tree in step.trees.items()}
    world = step.world if step.iterators else 1
    documents = [json.dumps(one, sort_keys=True) for one in (step.json_items, step.metrics, step.custom)]
    return [leaves, step.iterators, world, step.own_files, *documents]


def _compared(step: IncomingStep, there: IncomingStep, item: str, tree: TreeSpec) -> Iterator[tuple[bool, int]]:
    """(whether they are equal, their bytes) of each batch of boxes."""
    index = {leaf.name: number for number, leaf in enumerate(there.trees[item].leaves)}
    wanted = list(batches(tree, [number for number, leaf in enumerate(tree.leaves) if leaf.array is not None]))
    moved = [[(index[tree.leaves[leaf].name], start, shape) for leaf, start, shape in requests] for requests in wanted]
    theirs = read_ahead(partial(there.read, item), moved)
    for _, parts in read_ahead(partial(step.read, item), wanted):
        try:
            _, others = next(theirs)
        except CorruptCheckpointError:
            yield False, 0
            return
        yield all(np.array_equal(raw(a), raw(b)) for a, b in zip(parts, others, strict=True)), sum(part.nbytes for part in parts)
