"""Copies of a step's arrays on the CPU backend, in memory that was touched before: fresh pages cost several times the copy.

`enqueue` runs on the training thread, `Spare.give` and `Spare.prepare` behind it. Three things cost
the training thread time:

- XLA runs a program that only copies at once, in the thread that asks for it, since it counts as
  cheap: by its arithmetic. These programs do a little arithmetic beside, so that they are queued
  like a step (1 GiB: 0.2 ms instead of 90). If XLA counts otherwise one day, this costs time again
  and nothing else.
- XLA needs seconds to compile one program of thousands of arguments. So a program has at most
  `GROUP` arrays, groups alike share one, and they are compiled behind the training. Until one is
  there the runtime copies into fresh memory.
- Small arrays cost by their number, however they are copied: 50 µs by `device_put`, 15 by a
  program for one. Those that are computed already are copied here and now, 3 µs each, by the buffer
  protocol: it waits for no computation, and refuses arrays that don't lie in row-major order.
"""

from __future__ import annotations

import functools
import logging
import mmap
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from raystate.arrays.stagers import Keeping, ToKeep, nothing_to_do
from raystate.arrays.tree import Plan
from raystate.machine.aligned import SMALL_BYTES, padded
from raystate.machine.checksum import Bytes

logger = logging.getLogger("raystate")

GROUP = 64  # arrays of one program
ALIKE = 256  # so many arrays of one shape are worth a program for one of them
MOST_PROGRAMS = 32  # compiling them takes a core from the training
_KEEP = 2  # sets of the state's size: one being copied to a slot while the next is held
_ARITHMETIC = 4096  # operations; XLA calls fewer than 1,000 cheap


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How the arrays of a plan are copied. Numbers are positions among them."""

    plan: object
    small: tuple[int, ...]
    places: tuple[tuple[int, int], ...]  # (begin, end) in the memory for the small ones
    small_bytes: int
    alone: tuple[int, ...]  # that no program takes, see `_is_alone`
    groups: tuple[tuple[int, ...], ...]  # of the others, on one device each
    kinds: tuple[Hashable, ...]  # per group: groups of one kind share a program
    common: frozenset[Hashable]  # what at least ALIKE arrays are like


@dataclass(frozen=True, slots=True)
class Buffers:
    """The memory of one hold."""

    arrangement: Arrangement
    packed: mmap.mmap | None
    groups: list[list[jax.Array]]


class Program:
    """Copies arrays like these into the memory of others, queued behind what computes them.

    Args:
        group: arrays of one device. Compiles.
    """

    def __init__(self, group: list[jax.Array]):
        like = [jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding) for array in group]
        self._numbers = jax.device_put(np.ones(_ARITHMETIC, np.float32), group[0].sharding)
        with jax.set_mesh(None):
            self._compiled = _copy_into.lower(like, like, self._numbers).compile()

    def __call__(self, old: list[jax.Array], new: list[jax.Array]) -> list[jax.Array] | None:
        """The copies; None: the arrays lie in memory in another order than usual, and `old` is as it was."""
        try:
            return self._compiled(old, new, self._numbers)[0]
        except ValueError:  # says that the layouts disagree
            return None


class Spare:
    """Memory of earlier holds, to be written again, and the programs that do: the `Stager` of CPU devices. For use from two threads:
    `hold` on one, the rest on another."""

    def __init__(self) -> None:
        self._arrangement: Arrangement | None = None
        self._free: list[Buffers] = []
        self._programs: dict[Hashable, Program | None] = {}  # None: it could not be compiled

    def takes(self, array: jax.Array) -> bool:
        """Whether it is on CPU devices."""
        return _is_on_cpu(array.sharding)

    def hold(self, plan: Plan, wanted: Sequence[ToKeep], parts: list[Any], into: Callable[[], Bytes] | None) -> Keeping:  # noqa: ARG002
        """See `Stager.hold`: each shard is copied on its device."""
        near = [(one.number + i, _shard(one.array, shard.position)) for one in wanted for i, shard in enumerate(one.leaf.shards)]
        copies, buffers = enqueue(plan, [array for _, array in near], self)
        for (shard, _), copied in zip(near, copies, strict=True):
            parts[shard] = copied
        return _InMemory(self, buffers)

    def foresee(self, plan: Plan, wanted: Sequence[ToKeep]) -> None:
        """Nothing to do: programs need memory to write to, which the first hold makes."""

    def restore(self, boxes: Sequence[np.ndarray], targets: Sequence[Any]) -> list[jax.Array | None]:  # noqa: ARG002
        """JAX does."""
        return [None] * len(boxes)

    def attach(self, memory: Sequence[Bytes]) -> Callable[[], None]:  # noqa: ARG002 - a processor reaches all memory
        """Nothing to do."""
        return nothing_to_do

    def release(self) -> None:
        """The memory goes."""
        self._arrangement, self._free = None, []

    def arrangement(self, plan: object, arrays: Sequence[jax.Array]) -> Arrangement:
        """How these arrays, which are the plan's, are copied. Computed once."""
        found = self._arrangement
        if found is None or found.plan is not plan:
            found = self._arrangement = _arrange(plan, arrays)
            self._free = []
        return found

    def take(self, arrangement: Arrangement) -> Buffers | None:
        """Memory for such arrays, or None."""
        while True:
            try:
                buffers = self._free.pop()
            except IndexError:
                return None
            if buffers.arrangement is arrangement:
                return buffers

    def give(self, buffers: Buffers) -> None:
        """Keep this memory for the next step: no array in it is read any more."""
        if buffers.arrangement is self._arrangement and len(self._free) < _KEEP:
            self._free.append(buffers)

    def prepare(self) -> None:
        """Compile what writes such memory the next time; not on the training thread. Quick when all is there."""
        for buffers in self._free[-1:]:
            self._prepare(buffers)

    def program(self, kind: Hashable) -> Program | None:
        """The program for a kind of group, if it is there."""
        return self._programs.get(kind)

    def _prepare(self, buffers: Buffers) -> None:
        for kind, group in zip(buffers.arrangement.kinds, buffers.groups, strict=True):
            if kind in self._programs or len(self._programs) >= MOST_PROGRAMS:
                continue
            self._programs[kind] = None
            try:
                self._programs[kind] = Program(group)
            except Exception as error:  # a copy into fresh memory does as well
                logger.warning("copies of the state cost more than they need to, since this failed: %s", error)


@functools.lru_cache(maxsize=1024)
def _is_on_cpu(sharding: Any) -> bool:
    return next(iter(sharding.device_set)).platform == "cpu"


class _InMemory:
    """The memory of one hold, see `stagers.Keeping`."""

    def __init__(self, spare: Spare, buffers: Buffers):
        self._spare = spare
        self._buffers = buffers

    def copy(self, data: Bytes) -> dict[int, list[int]]:  # noqa: ARG002
        """All lies in `parts`."""
        return {}

    def release(self, *, reuse: bool) -> None:
        """See `Keeping.release`."""
        if reuse:
            self._spare.give(self._buffers)


def _shard(array: jax.Array, position: int) -> jax.Array:
    """One shard as an array on one device. To ask jax for the only one there is takes 30 µs."""
    return array if isinstance(array.sharding, SingleDeviceSharding) else array.addressable_data(position)


def enqueue(plan: object, arrays: Sequence[jax.Array], spare: Spare) -> tuple[list[Any], Buffers]:
    """Copies of arrays that lie on one CPU device each; the caller may donate them next. Waits for no computation.

    Args:
        plan: the same object as long as number, shapes, dtypes and devices of the arrays stay the same.

    Returns:
        (per array its copy: a jax.Array, or its bytes as uint8, the memory to be given back when they were used)
    """
    arrangement = spare.arrangement(plan, arrays)
    old = spare.take(arrangement)
    copies: list[Any] = [None] * len(arrays)
    packed, rest = _pack(arrangement, arrays, copies, old.packed if old is not None else None)
    # The caller's mesh, if one is set, has other devices than these arrays, which lie on one each. And a state may have NaNs in it, whose
    # cause the caller is looking for: jax would wait for each copy and raise.
    with jax.set_mesh(None), jax.debug_nans(False), jax.debug_infs(False):
        _copy_each([index for index in rest if _kind_of(arrays[index]) in arrangement.common], arrays, copies)
        queued = [*arrangement.alone, *(index for index in rest if copies[index] is None)]
        groups: list[list[jax.Array] | None] = []
        for number, indices in enumerate(arrangement.groups):
            group = None
            if old is not None and (program := spare.program(arrangement.kinds[number])) is not None:
                group = program(old.groups[number], [arrays[index] for index in indices])
            groups.append(group)
            queued += indices if group is None else ()
    if queued:
        sources = [arrays[index] for index in queued]
        fresh = jax.device_put(sources, [source.sharding for source in sources], may_alias=False)
        for index, copied in zip(queued, fresh, strict=True):
            copies[index] = copied
    kept: list[list[jax.Array]] = []
    for indices, group in zip(arrangement.groups, groups, strict=True):
        if group is None:
            group = [copies[index] for index in indices]
        else:
            for index, copied in zip(indices, group, strict=True):
                copies[index] = copied
        kept.append(group)
    return copies, Buffers(arrangement, packed, kept)


def _pack(
    arrangement: Arrangement, arrays: Sequence[Any], copies: list[Any], memory: mmap.mmap | None
) -> tuple[mmap.mmap | None, list[int]]:
    """Copy the small arrays that are computed, here and now; (their memory, the small arrays that are left)."""
    if not arrangement.small:
        return None, []
    if memory is None:
        memory = mmap.mmap(-1, arrangement.small_bytes)
    if not all(arrays[index].is_ready() for index in arrangement.small):
        return memory, list(arrangement.small)
    left: list[int] = []
    for index, (begin, _) in zip(arrangement.small, arrangement.places, strict=True):
        memory.seek(begin)
        try:
            memory.write(arrays[index])  # on the CPU a jax.Array is a buffer
        except (BufferError, ValueError, TypeError):  # bfloat16 and its like, or another order than row-major
            left.append(index)
    left_out = set(left)
    body = np.frombuffer(memory, np.uint8)
    for index, (begin, end) in zip(arrangement.small, arrangement.places, strict=True):
        if index not in left_out:
            copies[index] = body[begin:end]
    return memory, left


def _copy_each(indices: list[int], arrays: Sequence[jax.Array], copies: list[Any]) -> None:
    for index in indices:
        copies[index] = _copy_one(arrays[index])


@jax.jit
def _copy_one(array: jax.Array) -> jax.Array:
    return jax.numpy.copy(array)


@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def _copy_into(old: list[jax.Array], new: list[jax.Array], numbers: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Copies of `new` in the memory of `old`, which is donated for that; and a little arithmetic, see above."""
    del old
    return [jax.numpy.copy(array) for array in new], numbers * 0.5


def _arrange(plan: object, arrays: Sequence[jax.Array]) -> Arrangement:
    kinds = [_kind_of(array) for array in arrays]
    small: list[int] = []
    places: list[tuple[int, int]] = []
    end = 0
    large: dict[Any, list[int]] = {}
    alone: list[int] = []
    number = Counter(kinds)
    example = dict(zip(kinds, arrays, strict=True))
    sizes = {kind: array.nbytes for kind, array in example.items()}
    for index, array in enumerate(arrays):
        nbytes = sizes[kinds[index]]
        # A small one that numpy knows no buffer of is copied like a large one, unless there are many alike.
        is_small = nbytes <= SMALL_BYTES and (array.dtype.isbuiltin == 1 or number[kinds[index]] >= ALIKE)
        if not is_small and _is_alone(array):
            alone.append(index)
        elif not is_small:
            large.setdefault(kinds[index][2], []).append(index)
        else:
            small.append(index)
            places.append((end, end + nbytes))
            end += padded(nbytes)
    groups: list[tuple[int, ...]] = []
    for indices in large.values():
        indices.sort(key=lambda index: (kinds[index][0], str(kinds[index][1])))  # arrays alike beside each other: groups alike
        groups += [tuple(indices[start : start + GROUP]) for start in range(0, len(indices), GROUP)]
    return Arrangement(
        plan=plan,
        small=tuple(small),
        places=tuple(places),
        small_bytes=end,
        alone=tuple(alone),
        groups=tuple(groups),
        kinds=tuple(tuple(kinds[index] for index in group) for group in groups),
        common=frozenset(kind for kind, alike in number.items() if alike >= ALIKE),
    )


def _kind_of(array: jax.Array) -> tuple[tuple[int, ...], Any, Any]:
    return array.shape, array.dtype, next(iter(array.sharding.device_set))


def _is_alone(array: jax.Array) -> bool:
    """XLA has two layouts for elements smaller than a byte. And what a program gives is meant to lie in the device's usual memory: if it
    is made in the place of an array that lies in another kind, JAX ends the process."""
    (device,) = array.sharding.device_set
    return below_a_byte(array.dtype) or array.sharding.memory_kind not in (None, device.default_memory().kind)


@functools.lru_cache(maxsize=64)
def below_a_byte(dtype: Any) -> bool:
    """Whether elements are smaller than a byte: devices pack them, slots don't."""
    if jax.numpy.issubdtype(dtype, np.integer):
        return jax.numpy.iinfo(dtype).bits < 8
    return jax.numpy.issubdtype(dtype, np.floating) and jax.numpy.finfo(dtype).bits < 8
