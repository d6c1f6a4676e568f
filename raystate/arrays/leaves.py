"""What a leaf of a reference is."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec, Sharding

from raystate.arrays.mismatch import DifferenceError
from raystate.core.formats.tree import LeafSpec


class Free(jax.ShapeDtypeStruct):
    """An abstract array that goes onto the default device, free to move, wherever it was saved: so `init` makes it."""

    __slots__ = ()


def is_abstract(value: Any) -> bool:
    """Whether a leaf says what an array is like, and has no values: of JAX, or of another library."""
    return isinstance(value, Sharding | PartitionSpec | jax.ShapeDtypeStruct) or is_foreign(value)


def is_foreign(value: Any) -> bool:
    """Whether it is an abstract array of another library's, or raystate's own of `metadata`."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return False
    return hasattr(value, "shape") and hasattr(value, "dtype") and not hasattr(value, "__array__")


def is_restore_args(value: Any) -> bool:
    """Whether it is what Orbax v0's `construct_restore_args` gives for NumPy arrays, numbers and strings; those of jax.Arrays are
    `is_foreign`."""
    return hasattr(value, "restore_type") and not hasattr(value, "shape")


def asked_by_restore_args(value: Any, stored: LeafSpec) -> Any:
    """A leaf of a reference that asks for the same."""
    if value.restore_type in (bool, int, float, str):
        return value.restore_type()
    if stored.array is None and value.restore_type is None:
        return stored.plain
    shape, dtype = ((), None) if stored.array is None else (stored.array.shape, stored.array.dtype)
    return np.broadcast_to(np.zeros((), value.dtype or dtype), shape)


def is_weak(value: Any) -> bool:
    """Whether an array gives way to the dtype of what it meets."""
    return bool(getattr(value, "weak_type", False))


def is_key(dtype: Any) -> bool:
    """Whether it is of typed PRNG keys."""
    return jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def key_impl_of(dtype: Any) -> str:
    """The name of a key dtype's implementation, as `jax.random.key_impl` gives it for an array: found by tracing, without a key."""
    found: list[str] = []
    jax.eval_shape(lambda keys: found.append(str(jax.random.key_impl(keys))), jax.ShapeDtypeStruct((), dtype))
    return found[0]


def python_type(value: Any) -> type | None:
    """What a Python number's subclasses, such as an enum's, are saved as, and come back as; None for all else, NumPy's scalars too."""
    if isinstance(value, np.generic):
        return None
    return next((python for python in (bool, int, float) if isinstance(value, python)), None)


def same_kind(python: type, dtype: np.dtype) -> bool:
    """Whether Python's numbers of a type fit arrays of a dtype, but for their size."""
    if python is bool:
        return dtype == np.bool_
    if python is int:
        return jax.numpy.issubdtype(dtype, np.integer)
    return jax.numpy.issubdtype(dtype, np.floating)


def is_exact(number: object, dtype: np.dtype) -> bool:
    """Whether a number is a whole Python one that this dtype of floats has."""
    if type(number) is not int or not jax.numpy.issubdtype(dtype, np.floating) or abs(number) > 2**64:
        return False
    with np.errstate(over="ignore"):
        return float(np.asarray(number, np.float64).astype(dtype)) == number


def shape_and_dtype(value: Any, shape: tuple[int, ...], dtype: Any) -> tuple[tuple[int, ...], Any]:
    """Of an array or an abstract one; `shape` and `dtype` where it says nothing of them, as Orbax's may.

    Raises:
        DifferenceError: it is something else.
    """
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return shape if value.shape is None else tuple(value.shape), dtype if value.dtype is None else value.dtype
    raise DifferenceError(
        f"a reference leaf must be a ShapeDtypeStruct, array, scalar, string, Sharding or ..., not {type(value).__name__}"
    )


def kind(value: Any) -> str:
    """For messages."""
    if isinstance(value, Sharding | PartitionSpec):
        return "an array with a sharding"
    if python_type(value) is not None:
        return f"a Python {type(value).__name__}"
    if isinstance(value, str):
        return "a string"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array {value.dtype}{'' if value.shape is None else list(value.shape)}"
    return f"a {type(value).__name__}"
