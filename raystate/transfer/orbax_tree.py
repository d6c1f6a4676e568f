"""A tree as Orbax has it, written a batch at a time: each batch is a writer of its own, and the merge makes one array of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from raystate.arrays.shards import chunk_shape
from raystate.core.formats.errors import CorruptCheckpointError
from raystate.core.formats.tree import LeafSpec, TreeSpec
from raystate.machine.checksum import crc32c
from raystate.orbax.array_reads import Request
from raystate.orbax.step_reader import StepReader
from raystate.orbax.writer import write_item
from raystate.storage import Storage
from raystate.storage.names import writer_name
from raystate.transfer.boxes import Read, batches, raw, read_ahead, row_major_chunk

WRITER_BYTES = 256 << 20  # that one writer writes at a time: it keeps them in memory until they are written

Counted = Callable[[int], None]


def with_our_chunks(tree: TreeSpec) -> TreeSpec:
    """The tree in chunks as a save has them, cut so that the boxes that are written are whole ones."""
    leaves = list(tree.leaves)
    for index, leaf in enumerate(leaves):
        if leaf.array is not None:
            shape, itemsize = leaf.array.shape, np.dtype(leaf.array.dtype).itemsize
            chunk = row_major_chunk(chunk_shape(shape, shape, itemsize), shape, itemsize)
            leaves[index] = dataclasses.replace(leaf, array=dataclasses.replace(leaf.array, chunk=chunk, local=False))
    return dataclasses.replace(tree, leaves=tuple(leaves))


def write_tree(
    storage: Storage, folder: str, save: str, tree: TreeSpec, read: Read, *, on_bytes: Counted
) -> Iterator[tuple[str, list[Request], list[int]]]:
    """Write the arrays of a tree below `folder`/`tree.item`.

    Args:
        storage: of the run or of the destination.
        folder: of the step.
        save: makes the writers' names unique.
        tree: from `with_our_chunks`.
        read: boxes of its arrays.
        on_bytes: called with the bytes of each batch.

    Yields:
        (writer, its boxes, their crc32c) of each batch, when it is durable.
    """
    leaves = [index for index, leaf in enumerate(tree.leaves) if leaf.array is not None]
    for number, (requests, parts) in enumerate(read_ahead(read, batches(tree, leaves, WRITER_BYTES))):
        writer = writer_name(save, number)
        pieces = [(leaf, start, part) for (leaf, start, _), part in zip(requests, parts, strict=True)]
        write_item(storage.kvstore(f"{folder}/{tree.item}"), writer, tree, pieces)
        yield writer, requests, [crc32c(raw(part)) for part in parts]
        on_bytes(sum(part.nbytes for part in parts))


def check_written(
    reader: StepReader, tree: TreeSpec, written: list[tuple[list[Request], list[int]]], *, what: str, on_bytes: Counted
) -> None:
    """Read everything that `write_tree` wrote, and compare.

    Args:
        reader: of the step.
        tree: as it was written.
        written: boxes and their crc32c, of each batch.
        what: begins the error's message.
        on_bytes: called with the bytes of each batch.

    Raises:
        CorruptCheckpointError: names the first leaf that is not what was written.
    """
    there = {leaf.name: index for index, leaf in enumerate(reader.tree(tree.item).leaves)}
    for leaf in tree.leaves:
        found = reader.tree(tree.item).leaves[there[leaf.name]] if leaf.name in there else None
        if found is None or essence(found) != essence(leaf):
            raise CorruptCheckpointError(f"{what}: leaf {leaf.name!r} was not read back as it was written", path=leaf.name)

    def read(requests: list[Request]) -> list[np.ndarray]:
        return reader.read(tree.item, [(there[tree.leaves[leaf].name], start, shape) for leaf, start, shape in requests])

    sums = iter([crcs for _, crcs in written])
    for requests, parts in read_ahead(read, [requests for requests, _ in written]):
        for (leaf, _, _), part, crc in zip(requests, parts, next(sums), strict=True):
            if crc32c(raw(part)) != crc:
                name = tree.leaves[leaf].name
                raise CorruptCheckpointError(f"{what}: array {name!r} was not read back as it was written", path=name)
        on_bytes(sum(part.nbytes for part in parts))


def essence(leaf: LeafSpec) -> tuple[Any, ...]:
    """What makes a leaf the same in two steps, beside the elements of its array."""
    array = leaf.array
    described = None if array is None else (array.shape, array.dtype, array.key_impl if array.typestr == "jax.Array" else None)
    return leaf.path, leaf.kind, repr(leaf.value), described
