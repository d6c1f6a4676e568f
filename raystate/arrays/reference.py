"""Match a reference with what a checkpoint holds: which leaf comes from where, and everything that doesn't fit, in one error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from raystate.arrays.asked import is_step, not_a_value
from raystate.arrays.paths import Path, names, path_key, shown
from raystate.core.errors import ReferenceMismatchError
from raystate.core.tree import ArraySpec, LeafSpec, TreeSpec

ShapeRule = Literal["match", "checkpoint"]
_SHOWN_DIFFERENCES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Not from the checkpoint: skipped, or missing there with partial=True."""

    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """A value that needs no bytes read."""

    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Numpy:
    """Read in full on this process. `scalar`: a Python or numpy scalar type to give back instead of an array."""

    leaf: int
    dtype: np.dtype
    scalar: type | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Read the boxes of this process's devices. No sharding: an uncommitted array on the default device, as `jnp.asarray` gives."""

    leaf: int
    shape: tuple[int, ...]  # as stored: of a typed PRNG key, its data's
    dtype: np.dtype
    sharding: Sharding | None
    key_impl: str | None = None  # wrap the data as typed PRNG keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A stored Python number that the reference wants as a jax.Array of shape ()."""

    value: np.ndarray
    sharding: Sharding | None


Want = Keep | Plain | Given | Numpy | Device


def match_reference(reference: Any, spec: TreeSpec, *, partial: bool, cast: bool, shapes: ShapeRule) -> tuple[list[Want], Any]:
    """What to do for each leaf of the reference, and its structure.

    Raises:
        ReferenceMismatchError: `differences` lists (path, what) of all of them.
    """
    flat, structure = jax.tree_util.tree_flatten_with_path(reference)
    stored = {names(leaf.path): index for index, leaf in enumerate(spec.leaves)}
    matcher = _Matcher(spec, cast=cast, shapes=shapes)
    wants: list[Want] = []
    missing: list[tuple[Path, str]] = []
    for keys, value in flat:
        path = tuple(map(path_key, keys))
        if value is ...:
            wants.append(Keep(value=value))
            continue
        index = stored.get(names(path))
        if index is None:
            wants.append(Keep(value=value))
            missing.append((path, _not_there(value)))
        else:
            wants.append(matcher.match(path, value, index))
    differences = matcher.differences
    if missing and not partial:
        differences.extend(missing)
    if differences:
        if is_step(reference):
            differences = [
                (path, f"{what}. The first argument is the reference: did you mean step={reference}?") for path, what in differences
            ]
        raise _mismatch(
            spec, differences, _unused(spec, [names(tuple(map(path_key, keys))) for keys, _ in flat]) if missing else []
        )
    return wants, structure


def _not_there(value: Any) -> str:
    why = not_a_value(value)
    return f"is not in the checkpoint{f'; {why}' if why else ''}"


class _Matcher:
    def __init__(self, spec: TreeSpec, *, cast: bool, shapes: ShapeRule):
        self.spec = spec
        self.cast = cast
        self.shapes = shapes
        self.differences: list[tuple[Path, str]] = []

    def match(self, path: Path, value: Any, index: int) -> Want:
        stored = self.spec.leaves[index]
        problem = None
        want: Want = Keep(value=value)
        try:
            if why := not_a_value(value):
                raise _DifferenceError(why)
            if stored.array is None:
                want = self._plain(value, stored)
            else:
                want = self._array(value, stored.array, index)
        except _DifferenceError as error:
            problem = str(error)
        if problem:
            self.differences.append((path, problem))
        return want

    # ------------------------------------------------ what the checkpoint has as a value

    def _plain(self, value: Any, stored: LeafSpec) -> Want:
        have = stored.value
        if stored.kind in ("none", "dict", "list"):
            raise _DifferenceError(f"expected {_kind(value)}, the checkpoint has {_EMPTY[stored.kind]} there")
        if isinstance(value, Sharding):
            return Plain(value=have)
        if stored.kind == "string" or isinstance(value, str):
            if isinstance(value, str) and isinstance(have, str):
                return Plain(value=have)
            raise _DifferenceError(f"expected {_kind(value)}, the checkpoint has {_kind(have)}")
        if isinstance(value, bool | int | float):
            if type(have) is not type(value) and not self.cast:
                raise _DifferenceError(f"expected {_kind(value)}, the checkpoint has {_kind(have)} {have!r}")
            return Plain(value=type(value)(have))  # type: ignore[arg-type]
        shape, dtype = _shape_and_dtype(value)
        if shape != () and self.shapes == "match":
            raise _DifferenceError(f"expected shape {shape}, the checkpoint has {_kind(have)} {have!r}")
        if _is_key(dtype):
            raise _DifferenceError(f"expected PRNG keys, the checkpoint has {_kind(have)} {have!r}")
        # A Python number has no width: it fits every dtype of its kind.
        if not _same_kind(type(have), dtype) and not self.cast:
            raise _DifferenceError(f"expected dtype {dtype.name}, the checkpoint has {_kind(have)} {have!r}")
        array = np.asarray(have).astype(dtype)
        if isinstance(value, np.generic):
            return Plain(value=array[()])
        if isinstance(value, np.ndarray):
            return Plain(value=array)
        self._check_width(dtype)
        return Given(value=array, sharding=_sharding(value))

    # ------------------------------------------------ what the checkpoint has as an array

    def _array(self, value: Any, stored: ArraySpec, index: int) -> Want:
        have = np.dtype(stored.dtype)
        if isinstance(value, Sharding):
            self._check_width(have)
            return self._device(index, stored, have, _resolved(value), stored.key_impl)
        if isinstance(value, bool | int | float):
            if stored.shape != ():
                raise _DifferenceError(f"expected {_kind(value)}, the checkpoint has an array {stored.dtype}{list(stored.shape)}")
            if not _same_kind(type(value), have) and not self.cast:
                raise _DifferenceError(f"expected {_kind(value)}, the checkpoint has a {stored.dtype}")
            return Numpy(leaf=index, dtype=have, scalar=type(value))
        if isinstance(value, str):
            raise _DifferenceError(f"expected a string, the checkpoint has an array {stored.dtype}{list(stored.shape)}")
        shape, dtype = _shape_and_dtype(value)
        if _is_key(dtype):
            return self._keys(value, shape, dtype, stored, index)
        self._check_shape(shape, stored.shape)
        if np.dtype(dtype).newbyteorder("=") != have and not self.cast:
            raise _DifferenceError(f"expected dtype {dtype.name}, the checkpoint has {have.name}")
        if isinstance(value, np.generic):
            if stored.shape != ():
                raise _DifferenceError(f"expected a numpy scalar, the checkpoint has shape {stored.shape}")
            return Numpy(leaf=index, dtype=dtype, scalar=type(value))
        if isinstance(value, np.ndarray):
            return Numpy(leaf=index, dtype=dtype)
        self._check_width(dtype)
        return self._device(index, stored, dtype, _sharding(value), None)

    def _keys(self, value: Any, shape: tuple[int, ...], dtype: Any, stored: ArraySpec, index: int) -> Want:
        impl = _key_impl_of(dtype)
        if stored.key_impl is None and not (self.cast and stored.dtype == "uint32"):
            raise _DifferenceError(f"expected PRNG keys ({impl}), the checkpoint has {stored.dtype}")
        if stored.key_impl not in (None, impl):
            raise _DifferenceError(f"expected PRNG keys of {impl}, the checkpoint has {stored.key_impl}")
        data_shape = (*shape, *stored.shape[len(stored.shape) - 1 :])
        self._check_shape(data_shape, stored.shape)
        return self._device(index, stored, np.dtype(stored.dtype), _sharding(value), impl)

    def _device(self, index: int, stored: ArraySpec, dtype: np.dtype, sharding: Sharding | None, key_impl: str | None) -> Device:
        if sharding is not None:
            try:
                sharding.shard_shape(stored.shape)
            except ValueError as error:
                raise _DifferenceError(f"{sharding} doesn't fit shape {stored.shape}: {error}") from None
        return Device(leaf=index, shape=stored.shape, dtype=dtype, sharding=sharding, key_impl=key_impl)

    def _check_shape(self, expected: tuple[int, ...], have: tuple[int, ...]) -> None:
        if expected != have and self.shapes == "match":
            raise _DifferenceError(f"expected shape {expected}, the checkpoint has {have}")

    def _check_width(self, dtype: np.dtype) -> None:
        """jax would narrow 64-bit values without a word."""
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise _DifferenceError(
                f"a jax.Array can't be {dtype.name} unless jax_enable_x64 is set; ask for np.ndarray or another dtype"
            )


class _DifferenceError(Exception):
    pass


_EMPTY = {"none": "None", "dict": "an empty dict", "list": "an empty list"}


def _kind(value: Any) -> str:
    if isinstance(value, Sharding):
        return "an array"
    if isinstance(value, bool | int | float):
        return f"a Python {type(value).__name__}"
    if isinstance(value, str):
        return "a string"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array {value.dtype}{list(value.shape)}"
    return f"a {type(value).__name__}"


def _shape_and_dtype(value: Any) -> tuple[tuple[int, ...], Any]:
    if isinstance(value, np.ndarray | np.generic | jax.Array | jax.ShapeDtypeStruct):
        return tuple(value.shape), value.dtype
    if hasattr(value, "shape") and hasattr(value, "dtype"):  # another library's abstract array
        return tuple(value.shape), value.dtype
    raise _DifferenceError(
        f"a reference leaf must be a ShapeDtypeStruct, array, scalar, string, Sharding or ..., not {type(value).__name__}"
    )


def _sharding(value: Any) -> Sharding | None:
    """None for what is not bound to devices: abstract without a sharding, or an array that jit may still move."""
    if isinstance(value, jax.Array):
        return value.sharding if value.committed else None
    return _resolved(getattr(value, "sharding", None))


def _resolved(sharding: Sharding | None) -> Sharding | None:
    """A sharding with devices. What is traced under `jax.set_mesh` has shardings on an abstract mesh: it is the one in force."""
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, AbstractMesh):
        return sharding
    wanted, found = sharding.mesh, jax.sharding.get_mesh()
    if wanted.empty:
        return None
    if dict(found.shape) != dict(wanted.shape):
        have = f"the one in force is {dict(found.shape)}" if not found.empty else "none is in force"
        text = f"its sharding lies on an abstract mesh {dict(wanted.shape)}, without devices, and {have}"
        raise _DifferenceError(f"{text}: restore under jax.set_mesh(mesh)")
    return NamedSharding(found, sharding.spec, memory_kind=sharding.memory_kind)


def _is_key(dtype: Any) -> bool:
    return jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def _key_impl_of(dtype: Any) -> str:
    """The name of a key dtype's implementation, as `jax.random.key_impl` gives it for an array: found by tracing, without a key."""
    found: list[str] = []
    jax.eval_shape(lambda keys: found.append(str(jax.random.key_impl(keys))), jax.ShapeDtypeStruct((), dtype))
    return found[0]


def _same_kind(python: type, dtype: np.dtype) -> bool:
    if python is bool:
        return dtype == np.bool_
    if python is int:
        return jax.numpy.issubdtype(dtype, np.integer)
    return jax.numpy.issubdtype(dtype, np.floating)


def _unused(spec: TreeSpec, used: Iterable[tuple[str, ...]]) -> list[Path]:
    taken = set(used)
    return [leaf.path for leaf in spec.leaves if leaf.kind in ("array", "scalar", "string") and names(leaf.path) not in taken]


def _mismatch(spec: TreeSpec, differences: list[tuple[Path, str]], unused: list[Path]) -> ReferenceMismatchError:
    lines = [f"{shown(path)}: {what}" for path, what in differences]
    text = f"item {spec.item!r}: the reference and the checkpoint differ in {len(lines)} place{'s' * (len(lines) > 1)}:\n  "
    text += "\n  ".join(lines[:_SHOWN_DIFFERENCES])
    if len(lines) > _SHOWN_DIFFERENCES:
        text += f"\n  … and {len(lines) - _SHOWN_DIFFERENCES} more"
    if unused:
        text += (
            f"\nOnly in the checkpoint ({len(unused)}): " + ", ".join(map(shown, unused[:10])) + (", …" if len(unused) > 10 else "")
        )
    return ReferenceMismatchError(
        text,
        item=spec.item,
        differences=[(shown(path), what) for path, what in differences],
        unused=[shown(path) for path in unused],
    )
