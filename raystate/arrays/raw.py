"""A restore without a reference: which leaf becomes what, what that takes, and when it is refused."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from raystate.arrays.meshes import Saved, SavedShardings
from raystate.arrays.paths import shown
from raystate.arrays.reference import Device, Numpy, Plain, Want
from raystate.arrays.shards import places_of
from raystate.core.formats.boxes import Box
from raystate.core.formats.errors import CapacityError, ReferenceMismatchError
from raystate.core.formats.texts import counted
from raystate.core.formats.tree import LeafSpec, TreeSpec

FREE_SHARE = 0.9  # of free memory; the program needs some, too
WHOLE_BYTES = 64 << 20  # of numpy arrays that each of several processes may get in full
_SHOWN = 5

_WAYS_OUT = (
    "Give a reference: one sharding over all devices for everything (jax.sharding.NamedSharding(mesh, spec)), abstract arrays, or only "
    "the part that you need (... leaves the rest out)"
)


def array_bytes(leaf: LeafSpec) -> int:
    """Of the whole array; 0 for everything else."""
    if leaf.array is None:
        return 0
    return math.prod(leaf.array.shape) * np.dtype(leaf.array.dtype).itemsize


def raw_wants(spec: TreeSpec) -> list[Want]:
    """One per leaf: a jax.Array on the devices where it was saved if they exist here, typed PRNG keys, numpy arrays, plain values."""
    shardings = SavedShardings()
    return [_placed(spec, index, shardings) for index in range(len(spec.leaves))]


def host_want(spec: TreeSpec, index: int) -> Want:
    """A leaf in full on this process: a numpy array, typed PRNG keys, or a plain value."""
    leaf = spec.leaves[index]
    if leaf.array is None:
        return Plain(value=leaf.plain)
    dtype = np.dtype(leaf.array.dtype)
    if leaf.array.key_impl is not None:
        return Device(leaf=index, shape=leaf.array.shape, dtype=dtype, sharding=None, key_impl=leaf.array.key_impl)
    return Numpy(leaf=index, dtype=dtype)


def _placed(spec: TreeSpec, index: int, shardings: SavedShardings) -> Want:
    array = spec.leaves[index].array
    saved = _saved(spec.leaves[index], shardings)
    if array is None or saved is None:
        return host_want(spec, index)
    return Device(leaf=index, shape=array.shape, dtype=np.dtype(array.dtype), sharding=saved.sharding, key_impl=array.key_impl)


def _saved(leaf: LeafSpec, shardings: SavedShardings) -> Saved | None:
    array = leaf.array
    if array is None or array.typestr == "np.ndarray":
        return None
    dtype = np.dtype(array.dtype)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        return None  # jax would make it narrower; numpy keeps it as it is
    return shardings.find(array.sharding, array.shape)


def check_raw(spec: TreeSpec, wants: Sequence[Want], *, free_bytes: int, says: str) -> None:
    """Refuse a tree that this process can't, or should not, hold without a reference.

    Args:
        wants: `raw_wants`, or all leaves in full.
        free_bytes: of host memory.
        says: where that number comes from.

    Raises:
        CapacityError: it takes more than FREE_SHARE of the free host memory, or of a device's.
        ReferenceMismatchError: one of several processes would get arrays in full that are meant to lie on devices.
    """
    host, devices = _needs(wants, spec)
    free = int(FREE_SHARE * free_bytes)
    if host > free:
        had = f"{_gib(free)} can be had ({FREE_SHARE:.0%} of what is free on {says})"
        text = f"the raw tree takes {_gib(host)} of this process's memory, and {had}"
        raise CapacityError(f"item {spec.item!r}: {text}. {_WAYS_OUT}", item=spec.item, needed_bytes=host, available_bytes=free)
    for device, needed in devices.items():
        stats: Mapping[str, Any] = device.memory_stats() or {}
        if "bytes_limit" not in stats:
            continue
        free = int(FREE_SHARE * (stats["bytes_limit"] - stats.get("bytes_in_use", 0)))
        if needed > free:
            text = f"the raw tree takes {_gib(needed)} of {device}, and {_gib(free)} can be had ({FREE_SHARE:.0%} of what is free)"
            raise CapacityError(
                f"item {spec.item!r}: {text}. {_WAYS_OUT}", item=spec.item, needed_bytes=needed, available_bytes=free
            )


def check_asked_for(spec: TreeSpec, wants: Sequence[Want], *, free_bytes: int, says: str) -> None:
    """Refuse what a reference asks for if this process can't hold it: shapes may be the checkpoint's, and these anything at all.

    Devices with a memory of their own refuse what they can't hold themselves, with an error that can be caught.

    Args:
        free_bytes: of host memory.
        says: where that number comes from.

    Raises:
        CapacityError: with the numbers.
    """
    needed, _ = _needs(wants, spec)
    if needed > free_bytes:
        text = f"the reference asks for {_gib(needed)} of this process's memory, and {_gib(free_bytes)} are free on {says}"
        text += ". Spread it over more processes, or leave out what is not needed (... in the reference)"
        raise CapacityError(f"item {spec.item!r}: {text}", item=spec.item, needed_bytes=needed, available_bytes=free_bytes)


def check_spread(spec: TreeSpec, wants: Sequence[Want], *, processes: int) -> None:
    """On several processes: refuse to give each of them all of an array that lay on devices, or much of what lay in host memory.

    Raises:
        ReferenceMismatchError: with the numbers.
    """
    if processes == 1:
        return
    whole = [(spec.leaves[want.leaf], want) for want in wants if isinstance(want, Numpy | Device) and _is_whole(want)]
    lost = [leaf for leaf, _ in whole if leaf.array is not None and leaf.array.typestr == "jax.Array" and not _is_number(leaf)]
    if lost:
        text = f"devices that are not here held {counted(len(lost), 'array')} ({_gib(sum(map(array_bytes, lost)))})"
    elif (size := sum(array_bytes(leaf) for leaf, _ in whole)) > WHOLE_BYTES:
        lost = [leaf for leaf, _ in whole]
        text = f"its numpy arrays have {_gib(size)}"
    else:
        return
    named = ", ".join(shown(leaf.path) for leaf in lost[:_SHOWN]) + (
        f" and {len(lost) - _SHOWN:,} more" if len(lost) > _SHOWN else ""
    )
    text += f", and without a reference each of {processes} processes would get all of them: {named}"
    raise ReferenceMismatchError(f"item {spec.item!r}: {text}. {_WAYS_OUT}", item=spec.item)


def _is_whole(want: Numpy | Device) -> bool:
    return isinstance(want, Numpy) or want.sharding is None


def _is_number(leaf: LeafSpec) -> bool:
    """One number, or one PRNG key: nothing to spread."""
    return leaf.array is not None and len(leaf.array.shape) == (0 if leaf.array.key_impl is None else 1)


def _needs(wants: Sequence[Want], spec: TreeSpec) -> tuple[int, dict[Any, int]]:
    """(bytes of host memory, bytes of each device with a memory of its own)"""
    host, devices = 0, dict[Any, int]()
    default = jax.local_devices()[0]
    host += sum(array_bytes(spec.leaves[want.leaf]) for want in wants if isinstance(want, Numpy))
    alike = Counter((want.sharding, want.shape, want.dtype.itemsize) for want in wants if isinstance(want, Device))
    for (sharding, shape, size), number in alike.items():
        places = places_of(sharding, shape) if sharding is not None else ((default, Box((0,) * len(shape), shape)),)
        on_host = {box for device, box in places if device.platform == "cpu"}  # replicas share the memory
        host += number * size * sum(box.size for box in on_host)
        for device, box in places:
            if device.platform != "cpu":
                devices[device] = devices.get(device, 0) + number * size * box.size
    return host, devices


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.1f} MiB"
