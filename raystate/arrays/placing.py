"""Boxes in host memory as jax.Arrays: many at once, since asking the runtime costs 0.1 ms each time.

`device_put` itself takes 50 µs for each array, all of it in Python. So many small boxes alike are copied by a program for one of them,
which JAX calls without that: 15 µs, and it copies from where the box lies, so that the box needs no copy before.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from raystate.aligned import SMALL_BYTES, aligned, is_aligned, padded
from raystate.arrays.reference import Device
from raystate.arrays.shards import places_of
from raystate.arrays.threads import in_threads
from raystate.core.boxes import Box
from raystate.core.errors import CorruptCheckpointError, ReferenceMismatchError

ALIKE = 1000  # so many small boxes of one kind are worth a program: to compile it takes as long as `device_put` of so many
_BLOCK_BYTES = 1 << 20  # of which small arrays get their memory; it is kept as long as one of them is


class Placing:
    """Collects what is to be placed, and places it.

    Args:
        lent: boxes that are read-only may be views of memory that is used again once the arrays are ready. All others are nobody
            else's, and become the arrays themselves where the devices are CPUs and the boxes lie as these want it.
    """

    def __init__(self, *, lent: bool = True) -> None:
        self._lent = lent
        self._wants: list[tuple[int, Device, list[int]]] = []  # (position, what, which sources)
        self._sources: list[_PlacedBox] = []
        self._targets: list[Sharding] = []

    def add(self, position: int, want: Device, boxes: Mapping[Box, np.ndarray]) -> None:
        """An array.

        Args:
            position: its name in `arrays`.
            boxes: at least those that this process's devices need.
        """
        if want.sharding is None:
            (box,) = boxes.values()
            self._wants.append((position, want, [len(self._sources)]))
            self._sources.append(_PlacedBox(box, want.dtype, self._must_copy(box, want.dtype)))
            self._targets.append(_ANYWHERE)
            return
        memory = want.sharding.memory_kind
        numbers: list[int] = []
        sources: dict[Box, _PlacedBox] = {}
        for device, box in places_of(want.sharding, want.shape):
            if box not in sources:
                must = device.platform == "cpu" and self._must_copy(boxes[box], want.dtype)
                sources[box] = _PlacedBox(boxes[box], want.dtype, must)
            numbers.append(len(self._sources))
            self._sources.append(sources[box])
            alone = isinstance(want.sharding, SingleDeviceSharding)
            self._targets.append(want.sharding if alone else _on(device, memory))
        self._wants.append((position, want, numbers))

    def _must_copy(self, box: np.ndarray, dtype: np.dtype) -> bool:
        lent = self._lent and not box.flags.writeable
        return lent or box.dtype != dtype or box.nbytes <= SMALL_BYTES or not is_aligned(box)

    def arrays(self) -> dict[int, jax.Array]:
        """Position -> array; transfers to devices may still run."""
        placed: list[Any] = [None] * len(self._sources)
        _copy_alike(self._sources, self._targets, placed)
        left = [number for number, array in enumerate(placed) if array is None]
        hosts = dict(zip(left, _own_all([self._sources[number] for number in left]), strict=True))
        free = [number for number in left if self._targets[number] is _ANYWHERE]
        bound = [number for number in left if self._targets[number] is not _ANYWHERE]
        for numbers, where in ((free, None), (bound, [self._targets[number] for number in bound])):
            if numbers:
                got = jax.device_put([hosts[number] for number in numbers], where)
                for number, array in zip(numbers, got, strict=True):
                    placed[number] = array
        results: dict[int, jax.Array] = {}
        for position, want, numbers in self._wants:
            if want.sharding is None or isinstance(want.sharding, SingleDeviceSharding):
                array = placed[numbers[0]]
            else:
                parts = [placed[number] for number in numbers]
                array = jax.make_array_from_single_device_arrays(want.shape, want.sharding, parts, dtype=want.dtype)
            if want.weak_type:
                array = _as_weak(array)
            results[position] = array if want.key_impl is None else _as_keys(array, want.key_impl)
        return results


_ANYWHERE: Any = None  # on the default device, and free to move


class _PlacedBox(NamedTuple):
    """One box."""

    box: np.ndarray
    dtype: np.dtype
    must_copy: bool  # the array must not be made of this memory


@functools.lru_cache(maxsize=1024)
def _on(device: Any, memory_kind: str | None) -> SingleDeviceSharding:
    """One object for all: to compare two takes a hundred times as long as one."""
    return SingleDeviceSharding(device, memory_kind=memory_kind)


def _copy_alike(sources: Sequence[_PlacedBox], targets: Sequence[Any], placed: list[Any]) -> None:
    """Place the boxes that a program is worth compiling for."""
    if len(sources) < ALIKE:
        return
    kinds: dict[Hashable, list[int]] = {}
    for number, ((box, dtype, _), target) in enumerate(zip(sources, targets, strict=True)):
        if box.nbytes <= SMALL_BYTES and box.dtype == dtype:
            kinds.setdefault((target, box.shape, dtype), []).append(number)
    # The same whatever the caller has set: a mesh is of other devices, NaNs may be in the state, and guards are about its own transfers.
    with jax.set_mesh(None), jax.debug_nans(False), jax.debug_infs(False), jax.disable_jit(False), _allowed("allow"):
        for numbers in kinds.values():
            target, dtype = targets[numbers[0]], sources[numbers[0]].dtype
            # Not of elements smaller than a byte: XLA has two layouts for them.
            if len(numbers) >= ALIKE and (dtype.isbuiltin == 1 or dtype == jax.numpy.bfloat16) and _in_usual_memory(target):
                copied = _copier(target)
                for number in numbers:
                    placed[number] = copied(sources[number].box)


_allowed = jax.transfer_guard_host_to_device


def _in_usual_memory(target: SingleDeviceSharding | None) -> bool:
    """Of a CPU device. To others each box is a transfer of its own in any case."""
    if target is None:
        config: Any = jax.config
        default: Any = config.jax_default_device or jax.local_devices()[0]
        return getattr(default, "platform", default) == "cpu"
    (device,) = target.device_set
    return device.platform == "cpu" and target.memory_kind in (None, device.default_memory().kind)


@functools.lru_cache(maxsize=64)
def _copier(target: SingleDeviceSharding | None) -> Callable[[np.ndarray], jax.Array]:
    if target is None:
        return jax.jit(lambda box: jax.numpy.copy(box))
    return jax.jit(lambda box: jax.numpy.copy(box), out_shardings=target)


def _own_all(sources: Sequence[_PlacedBox]) -> list[np.ndarray]:
    """Each as what may be given to jax. Replicas share theirs.

    XLA's CPU client makes an array of host memory without copying it, even when asked not to (may_alias=False), so it must never see a
    slot's memory. It never writes to such memory either, so that replicas can share the copy.
    """
    rooms = _Rooms()
    found: dict[int, np.ndarray] = {}
    copies: list[tuple[np.ndarray, np.ndarray]] = []
    hosts: list[np.ndarray] = []
    for source in sources:
        host = found.get(id(source))
        if host is None:
            if source.must_copy:
                host = rooms.take(source.box.shape, source.dtype)
                copies.append((host, source.box))
            else:
                host = source.box.astype(source.dtype, copy=False)
            found[id(source)] = host
        hosts.append(host)
    large = [copy for copy in copies if copy[0].nbytes > SMALL_BYTES]
    in_threads(_copy, large, sum(host.nbytes for host, _ in large))
    for host, box in copies:
        if host.nbytes <= SMALL_BYTES:
            np.copyto(host, box, casting="unsafe")
    return hosts


def _copy(pair: tuple[np.ndarray, np.ndarray]) -> None:
    np.copyto(*pair, casting="unsafe")


class _Rooms:
    """Aligned memory for arrays; small ones share a block."""

    def __init__(self) -> None:
        self._block = np.empty(0, np.uint8)
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Memory for one, uninitialized."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > SMALL_BYTES:
            return aligned(shape, dtype)
        if self._used + nbytes > self._block.size:
            self._block, self._used = aligned((_BLOCK_BYTES,), np.dtype(np.uint8)), 0
        room = self._block[self._used : self._used + nbytes]
        self._used += padded(nbytes)
        return room.view(dtype).reshape(shape)


def _as_weak(array: jax.Array) -> jax.Array:
    """The same with a weak type, as `jnp.asarray(1.0)` has it: else a training that goes on computes in other dtypes than it began.

    JAX's public functions make weak types of Python numbers only (tests/model/test_weak_types.py notices if this one changes).
    """
    from jax._src.lax.lax import _convert_element_type

    weak: Any = _convert_element_type(array, weak_type=True)
    return weak


def _as_keys(data: jax.Array, impl: str) -> jax.Array:
    try:
        return jax.random.wrap_key_data(data, impl=impl)
    except (ValueError, TypeError) as error:
        if not _is_implemented(impl):
            text = f"the checkpoint has PRNG keys of the implementation {impl!r}, which this process doesn't know: import what registers it"
            raise ReferenceMismatchError(f"{text} first; or, in a step without checksums, it is damaged", got=impl) from error
        text = f"an array of {data.dtype.name}{list(data.shape)} can't be the PRNG keys ({impl}) that the checkpoint says it is: {error}"
        raise CorruptCheckpointError(text, got=impl) from error


def _is_implemented(impl: str) -> bool:
    try:
        jax.random.key(0, impl=impl)
    except (ValueError, TypeError):
        return False
    return True
