"""Shardings that a reference or a checkpoint only describes, as shardings on the devices of this program."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from raystate.arrays.mismatch import DifferenceError

_SET_MESH = "restore under jax.set_mesh(mesh)"
_AXIS_TYPES = {str(kind): kind for kind in AxisType}


def sharding_of(value: Any) -> Sharding | None:
    """Of a leaf of a reference; None for what is not bound to devices: abstract without a sharding, or an array that jit may move.

    Raises:
        DifferenceError: as `resolved`.
    """
    if isinstance(value, jax.Array):
        return value.sharding if value.committed else None
    return resolved(getattr(value, "sharding", None))


def resolved(sharding: Sharding | PartitionSpec | None) -> Sharding | None:
    """A sharding with devices. A bare PartitionSpec, and what was traced under `jax.set_mesh` (its mesh is abstract), mean the mesh
    in force.

    Raises:
        DifferenceError: none is in force, or another one.
    """
    if isinstance(sharding, PartitionSpec):
        found = jax.sharding.get_mesh()
        if found.empty:
            raise DifferenceError(f"its sharding is a bare {sharding}, and no mesh is in force: {_SET_MESH}")
        return _on(found, sharding, None)
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, AbstractMesh):
        return sharding
    wanted, found = sharding.mesh, jax.sharding.get_mesh()
    if wanted.empty:
        return None
    if dict(found.shape) != dict(wanted.shape):
        have = f"the one in force is {dict(found.shape)}" if not found.empty else "none is in force"
        text = f"its sharding lies on an abstract mesh {dict(wanted.shape)}, without devices, and {have}"
        raise DifferenceError(f"{text}: {_SET_MESH}")
    return _on(found, sharding.spec, sharding.memory_kind)


def check_fits(sharding: Sharding, shape: tuple[int, ...]) -> None:
    """Raises DifferenceError unless an array of this shape can have this sharding."""
    if isinstance(sharding, NamedSharding) and len(sharding.spec) > len(shape):  # an IndexError to jax
        raise DifferenceError(f"{sharding} has {len(sharding.spec)} dimensions, and doesn't fit shape {shape}")
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        raise DifferenceError(f"{sharding} doesn't fit shape {shape}: {error}") from None


def _on(mesh: Mesh, spec: PartitionSpec, memory_kind: str | None) -> NamedSharding:
    try:
        return NamedSharding(mesh, spec, memory_kind=memory_kind)
    except ValueError as error:
        raise DifferenceError(f"{spec} doesn't fit the mesh in force, {dict(mesh.shape)}: {error}") from None


class Saved(NamedTuple):
    """The sharding that an array was saved with, on this program's devices. None: on the default device, and free to move."""

    sharding: Sharding | None


class SavedShardings:
    """Finds the devices that arrays were saved on. Use one per restore: checkpoints of 10,000 arrays have a few shardings."""

    def __init__(self) -> None:
        self._found: dict[str, Saved | None] = {}

    def of(self, abstract: Any, shape: tuple[int, ...]) -> Saved | None:
        """Of an abstract array of Orbax's, or of raystate's own `metadata`. None: of NumPy, or its devices are not here."""
        sharding: Any = getattr(abstract, "sharding", None)
        if isinstance(sharding, Sharding):
            return Saved(resolved(sharding))
        if isinstance(sharding, Mapping):
            sharding = json.dumps(sharding)
        elif hasattr(sharding, "to_serialized_string"):  # Orbax v0's own description
            sharding = sharding.to_serialized_string()
        return self.find(sharding, shape)

    def find(self, text: str | None, shape: tuple[int, ...]) -> Saved | None:
        """None: the array was saved without a sharding, or devices of it don't exist here, or it doesn't fit.

        Args:
            text: as Orbax writes a sharding down.
            shape: of the stored array.
        """
        if text is None:
            return None
        if text not in self._found:
            self._found[text] = _parsed(text)
        saved = self._found[text]
        if saved is not None and saved.sharding is not None:
            try:
                check_fits(saved.sharding, shape)
            except DifferenceError:
                return None
        return saved


def _parsed(text: str) -> Saved | None:
    try:
        raw = json.loads(text)
        match raw["sharding_type"]:
            case "NamedSharding":
                return Saved(_named(raw))
            case "SingleDeviceSharding":
                return _single(raw["device_str"])
            case _:
                return None
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        # Devices that are not here, or a kind of sharding that this version doesn't know: the array
        # comes to the host.
        return None


def _named(raw: Mapping[str, Any]) -> NamedSharding:
    shape = [int(size) for size in raw["shape"]]
    by_id = {device.id: device for device in jax.devices()}
    if raw.get("device_mesh"):
        devices = [by_id[number] for number in _ids(raw["device_mesh"]["mesh"])]
    else:  # early Orbax wrote none
        devices = list(by_id.values())
    if len(devices) != math.prod(shape):
        raise ValueError(f"{len(devices)} devices for a mesh of {shape}")
    grid = np.empty(len(devices), object)
    grid[:] = devices
    kinds = raw.get("axis_types")
    types = tuple(_AXIS_TYPES[kind] for kind in kinds) if kinds else None
    mesh = Mesh(grid.reshape(shape), tuple(raw["axis_names"]), axis_types=types)
    return NamedSharding(
        mesh, PartitionSpec(*(tuple(entry) if isinstance(entry, list) else entry for entry in raw["partition_spec"]))
    )


def _ids(mesh: Any) -> list[int]:
    return [number for part in mesh for number in _ids(part)] if isinstance(mesh, list) else [int(mesh["id"])]


def _single(name: str) -> Saved | None:
    if jax.process_count() > 1:
        return None  # it is a device of one process; the others would have nothing
    plain = name.replace("TFRT_CPU_", "cpu:")  # as older jax called them
    for device in jax.local_devices():
        if str(device).replace("TFRT_CPU_", "cpu:") == plain:
            default = jax.device_put(np.zeros((), np.int8)).devices()
            return Saved(None if device in default else SingleDeviceSharding(device))
    return None
