"""Device -> host memory without stopping the training.

`hold` runs on the training thread and only enqueues. The next step may donate the very arrays that
are being saved, so it asks for a copy of this process's shards. `hold` returns while the step
that computes the arrays still runs. `copy` runs behind it, waits, and moves the bytes into a slot.
Each kind of device has its own way to keep them, see `stagers`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from raystate.arrays.pinned import Pinned
from raystate.arrays.stagers import Keeping, Stager, ToKeep
from raystate.arrays.tree import ArrayLeaf, Described, Plan
from raystate.core.formats.boxes import Box, cut, slices
from raystate.core.formats.errors import CapacityError
from raystate.core.formats.tree import Piece
from raystate.machine import checksum
from raystate.machine.checksum import Bytes
from raystate.machine.threads import in_threads

_ROOM_BYTES = 512 << 10
_PINNED = Pinned()


class HeldState:
    """One step's bytes, safe from donation. Give it to `copy`, or `release` it."""

    def __init__(self, plan: Plan, parts: list[Any], kept: Sequence[Keeping] = ()):
        self.plan = plan
        # Per shard: a single-device jax.Array, (array, position) in one that was held whole, or numpy: the array, or its bytes.
        self._parts = parts
        self.kept = kept

    def separate(self) -> None:
        """Replace arrays that were held whole by their shards. Not from several threads: jax takes an array apart when it is first
        asked for a shard, and another thread that asks meanwhile misses some."""
        self._parts = [part[0].addressable_data(part[1]) if isinstance(part, tuple) else part for part in self._parts]

    def take(self, shard: int) -> Any:
        """The array of a shard; this drops it from here."""
        part, self._parts[shard] = self._parts[shard], None
        return part

    def release(self, *, reuse: bool = False) -> None:
        """Let the bytes go. `reuse`: they aren't read again, so the next step may lie there."""
        self._parts = [None] * len(self._parts)
        kept, self.kept = self.kept, ()
        for one in kept:
            one.release(reuse=reuse)


def hold(described: Described, *stagers: Stager, into: Callable[[], Bytes] | None = None) -> HeldState:
    """Keep this step's bytes although the next step may donate or overwrite them.

    Returns without waiting for a computation, unless `into` is given. numpy leaves can be changed in place at any time, so they are
    copied here and now.

    Args:
        described: the state.
        stagers: the first that takes an array keeps it; if none does, JAX copies it.
        into: begins to write the slot. A device without room for a copy of the state then copies it at once.
    """
    parts: list[Any] = []
    by_stager: dict[Stager, list[ToKeep]] = {}
    for leaf in described.plan.arrays:
        if leaf.numpy:
            parts.append(np.array(described.leaves[leaf.position]))
            continue
        array = _array(described, leaf)
        wanted = ToKeep(len(parts), leaf, array)
        if (stager := _first(stagers, array)) in by_stager:
            by_stager[stager].append(wanted)
        else:
            by_stager[stager] = [wanted]
        parts.extend([None] * len(leaf.shards))
    kept = [stager.hold(described.plan, wanted, parts, into) for stager, wanted in by_stager.items()]
    return HeldState(described.plan, parts, kept)


def _array(described: Described, leaf: ArrayLeaf) -> Any:
    """As it was given; of typed PRNG keys the data."""
    value = described.leaves[leaf.position]
    return jax.random.key_data(value) if leaf.key else value


def _first(stagers: Sequence[Stager], array: jax.Array) -> Stager:
    for one in stagers:  # a generator takes three times as long
        if one.takes(array):
            return one
    return _PINNED


def foresee(described: Described, *stagers: Stager) -> None:
    """States like this are going to be held by these stagers."""
    number = 0
    by_stager: dict[Stager, list[ToKeep]] = {}
    for leaf in described.plan.arrays:
        if not leaf.numpy:
            array = _array(described, leaf)
            by_stager.setdefault(_first(stagers, array), []).append(ToKeep(number, leaf, array))
        number += len(leaf.shards)
    for stager, wanted in by_stager.items():
        stager.foresee(described.plan, wanted)


def views(described: Described) -> HeldState:
    """This step's bytes without a copy, where they lie on the host already: for a caller that goes on only when they were used."""
    parts: list[Any] = []
    for leaf in described.plan.arrays:
        value = _array(described, leaf)
        if leaf.numpy:
            parts.append(np.asarray(value))
        else:
            parts.extend((value, shard.position) for shard in leaf.shards)
    return HeldState(described.plan, parts)


def array_leaves(described: Described, tree: int) -> list[Any]:
    """The array leaves of one tree in the TreeSpec's order, as they were given; typed PRNG keys as their key data."""
    return [_array(described, leaf) for leaf in described.plan.arrays if leaf.tree == tree]


def host_arrays(held: HeldState) -> list[np.ndarray]:
    """The bytes of each piece of the layout as a numpy array of native byte order; `held` is empty afterwards.

    Waits for the computation. The arrays are only to be read: they may be views of what the caller of `hold` or `views` has.
    """
    held.separate()
    pieces, arrays = held.plan.layout.pieces, list[np.ndarray]()
    for number, part in enumerate(held.plan.pieces_of):
        shard = native(np.asarray(held.take(number)))
        arrays += [shard] if len(part) == 1 else [shard[_place(pieces[index], pieces[part[0]])] for index in part]
    return arrays


def copy(held: HeldState, data: np.ndarray) -> tuple[int, ...]:
    """Move the held bytes into a slot. For a background thread: waits for the computation; releases `held` shard by shard.

    Args:
        held: from `hold`.
        data: uint8, writable, at least `layout.data_bytes` long.

    Returns:
        The crc32c of each piece of the layout. Of what this process copies itself, it is computed from what was copied, not from the
        slot.

    Raises:
        CapacityError: `data` is too small. Errors of the computation itself pass as they are.
    """
    layout = held.plan.layout
    if data.nbytes < layout.data_bytes:
        text = f"the state needs {layout.data_bytes} bytes on this process, the slot has {data.nbytes}"
        raise CapacityError(text, needed_bytes=layout.data_bytes, slot_bytes=data.nbytes)
    pieces = layout.pieces

    def one(number: int) -> list[int]:
        return _copy_shard(held.take(number), [pieces[index] for index in held.plan.pieces_of[number]], data)

    try:
        crcs = {shard: found for kept in held.kept for shard, found in kept.copy(data).items()}
        held.separate()
        rest = [shard for shard in range(len(held.plan.pieces_of)) if shard not in crcs]
        crcs.update(zip(rest, in_threads(one, rest, layout.data_bytes, cores=copy_cores()), strict=True))
        held.release(reuse=True)
        return tuple(itertools.chain.from_iterable(crcs[shard] for shard in range(len(crcs))))
    finally:
        held.release()


def copy_cores() -> int:
    """Half the cores: the others compute the next step."""
    return len(os.sched_getaffinity(0)) // 2


def _copy_shard(array: Any, pieces: Sequence[Piece], data: np.ndarray) -> list[int]:
    """The crc32c of each of its pieces."""
    shard = native(np.asarray(array))
    if len(pieces) > 1:
        return [_copy_part(shard[_place(piece, pieces[0])], _slot_of(piece, data)) for piece in pieces]
    source = np.ascontiguousarray(shard).reshape(-1).view(np.uint8)
    checksum.copy(_slot_of(pieces[0], data), source)
    return [checksum.crc32c(source)]


def _copy_part(part: np.ndarray, slot: np.ndarray) -> int:
    """A part of a shard whose elements don't lie one after the other. It goes through memory small enough to stay in the processor's
    cache, and is not read from the slot."""
    crc, at = 0, 0
    room = np.empty(0, part.dtype)
    for box in cut(Box((0,) * part.ndim, part.shape), _ROOM_BYTES // part.itemsize):
        if box.size > room.size:
            room = np.empty(box.size, part.dtype)
        gathered = room[: box.size].reshape(box.shape)
        np.copyto(gathered, part[slices(box, (0,) * part.ndim)])
        flat = gathered.reshape(-1).view(np.uint8)
        checksum.copy(slot[at : at + flat.size], flat)
        crc = checksum.crc32c(flat, crc)
        at += flat.size
    return crc


def _slot_of(piece: Piece, data: np.ndarray) -> np.ndarray:
    return data[piece.offset : piece.offset + piece.nbytes]


def _place(piece: Piece, first: Piece) -> tuple[slice, ...]:
    """Where a piece is in its shard, which begins where its first piece does."""
    return slices(Box(piece.start, piece.shape), first.start)


def native(array: np.ndarray) -> np.ndarray:
    """The array in the machine's byte order, itself if it is so already."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
