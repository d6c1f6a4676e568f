"""Boxes in host memory as jax.Arrays: many at once, since asking the runtime costs 0.1 ms each time.

On CPUs each array gets memory of XLA's own, so that the first step after a restore can donate it as
any later one. XLA's CPU client makes an array of host memory without a copy if that begins at a
multiple of 64 bytes, even when asked not to (may_alias=False). Such an array is never donated. So
small boxes are laid elsewhere before, and the arrays of large ones are copied on their device.

`device_put` itself takes 50 µs for each array, all of it in Python. So many small boxes alike are
copied by a program for one of them, which JAX calls without that: 15 µs. It copies from where the
box lies, so that the box needs no copy before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from raystate.arrays.reference import Device
from raystate.arrays.shards import places_of
from raystate.arrays.ways import of_restores
from raystate.core.formats.boxes import Box
from raystate.core.formats.errors import CorruptCheckpointError, ReferenceMismatchError
from raystate.machine.aligned import SMALL_BYTES, aligned, is_aligned, padded

ALIKE = 1000  # so many small boxes of one kind are worth a program: to compile it takes as long as `device_put` of so many
_BLOCK_BYTES = 1 << 20  # of which small boxes get their memory
_BESIDE = 8  # bytes behind a multiple of 64: where XLA copies


class Placing:
    """Collects what is to be placed, and places it. The arrays share memory with no box once they are ready."""

    def __init__(self) -> None:
        self._wants: list[tuple[int, Device, list[int]]] = []  # (position, what, which sources)
        self._sources: list[np.ndarray] = []
        self._targets: list[Sharding] = []

    def add(self, position: int, want: Device, boxes: Mapping[Box, np.ndarray]) -> None:
        """An array.

        Args:
            position: its name in `arrays`.
            boxes: at least those that this process's devices need, of the wanted dtype.
        """
        if want.sharding is None:
            (box,) = boxes.values()
            self._wants.append((position, want, [len(self._sources)]))
            self._sources.append(box)
            self._targets.append(_ANYWHERE)
            return
        numbers: list[int] = []
        for target, box in targets_of(want.sharding, want.shape):
            numbers.append(len(self._sources))
            self._sources.append(boxes[box])
            self._targets.append(target)
        self._wants.append((position, want, numbers))

    def arrays(self) -> dict[int, jax.Array]:
        """Position -> array; transfers to devices may still run, and read the boxes."""
        placed: list[Any] = of_restores().restore(self._sources, self._targets)
        _copy_alike(self._sources, self._targets, placed)
        rooms = _Rooms()
        left = [number for number, array in enumerate(placed) if array is None]
        hosts = {number: rooms.lay(self._sources[number]) for number in left}
        free = [number for number in left if self._targets[number] is _ANYWHERE]
        bound = [number for number in left if self._targets[number] is not _ANYWHERE]
        for numbers in (free, bound):
            self._put(placed, numbers, [hosts[number] for number in numbers])
            shared = [number for number in numbers if is_aligned(hosts[number]) and _is_on_cpu(placed[number])]
            self._put(placed, shared, [placed[number] for number in shared], may_alias=False)
        results: dict[int, jax.Array] = {}
        for position, want, numbers in self._wants:
            results[position] = assembled(want, [placed[number] for number in numbers])
        return results

    def _put(self, placed: list[Any], numbers: list[int], values: list[Any], *, may_alias: bool | None = None) -> None:
        """All of them either free or bound."""
        if numbers:
            targets = [self._targets[number] for number in numbers]
            where: Any = None if targets[0] is _ANYWHERE else targets
            for number, array in zip(numbers, jax.device_put(values, where, may_alias=may_alias), strict=True):
                placed[number] = array


def targets_of(sharding: Sharding, shape: tuple[int, ...]) -> list[tuple[SingleDeviceSharding, Box]]:
    """Where an array's boxes go in this process, in the order of jax."""
    if isinstance(sharding, SingleDeviceSharding):
        return [(sharding, box) for _, box in places_of(sharding, shape)]
    return [(_on(device, sharding.memory_kind), box) for device, box in places_of(sharding, shape)]


def assembled(want: Device, parts: list[jax.Array]) -> jax.Array:
    """The array that is wanted, of its boxes on their devices, in the order of jax."""
    if want.sharding is None or isinstance(want.sharding, SingleDeviceSharding):
        (array,) = parts
    else:  # of other processes' devices it has no parts here
        array = jax.make_array_from_single_device_arrays(want.shape, want.sharding, parts, dtype=want.dtype)
    if want.weak_type:
        array = _as_weak(array)
    return array if want.key_impl is None else _as_keys(array, want.key_impl)


_ANYWHERE: Any = None  # on the default device, and free to move


def _is_on_cpu(array: jax.Array) -> bool:
    (device,) = array.devices()
    return device.platform == "cpu"


@functools.lru_cache(maxsize=1024)
def _on(device: Any, memory_kind: str | None) -> SingleDeviceSharding:
    """One object for all: to compare two takes a hundred times as long as one."""
    return SingleDeviceSharding(device, memory_kind=memory_kind)


def _copy_alike(sources: Sequence[np.ndarray], targets: Sequence[Any], placed: list[Any]) -> None:
    """Place the boxes that a program is worth compiling for."""
    if len(sources) < ALIKE:
        return
    kinds: dict[Hashable, list[int]] = {}
    for number, (box, target) in enumerate(zip(sources, targets, strict=True)):
        if box.nbytes <= SMALL_BYTES:
            kinds.setdefault((target, box.shape, box.dtype), []).append(number)
    # The caller's settings don't count here: its mesh is of other devices, NaNs may be in the
    # state, and its guards are about its own transfers.
    with jax.set_mesh(None), jax.debug_nans(False), jax.debug_infs(False), jax.disable_jit(False), _allowed("allow"):
        for numbers in kinds.values():
            target, dtype = targets[numbers[0]], sources[numbers[0]].dtype
            # Not of elements smaller than a byte: XLA has two layouts for them.
            if len(numbers) >= ALIKE and (dtype.isbuiltin == 1 or dtype == jax.numpy.bfloat16) and _in_usual_memory(target):
                copied = _copier(target)
                for number in numbers:
                    placed[number] = copied(sources[number])


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


class _Rooms:
    """Copies of small boxes where XLA makes no array of them; they share blocks."""

    def __init__(self) -> None:
        self._block = np.empty(0, np.uint8)
        self._used = 0
        self._laid: dict[int, np.ndarray] = {}

    def lay(self, box: np.ndarray) -> np.ndarray:
        """The box itself if it is large, or lies so already."""
        if box.nbytes > SMALL_BYTES or not is_aligned(box):
            return box
        if (laid := self._laid.get(id(box))) is not None:  # replicas share theirs
            return laid
        if self._used + box.nbytes > self._block.size:
            self._block, self._used = aligned((_BLOCK_BYTES + _BESIDE,), np.dtype(np.uint8))[_BESIDE:], 0
        room = self._block[self._used : self._used + box.nbytes].view(box.dtype).reshape(box.shape)
        self._used += padded(box.nbytes)
        np.copyto(room, box)
        self._laid[id(box)] = room
        return room


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
