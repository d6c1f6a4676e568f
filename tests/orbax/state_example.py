"""A state with every kind of leaf, as numpy values: shared by tests and by subprocesses that know nothing of raystate."""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401 - gives numpy "bfloat16", "int4", …
import numpy as np

# Orbax's parameter name -> (shape, dtype, chunk)
ARRAYS: dict[str, tuple[tuple[int, ...], str, tuple[int, ...]]] = {
    "params.dense.kernel": ((64, 32), "float32", (16, 16)),
    "params.dense.bias": ((32,), "bfloat16", (16,)),
    "params.odd": ((7, 3), "int8", (4, 3)),  # the last chunk is cut off by the array's edge
    "opt.0.count": ((), "int32", ()),
    "opt.0.mu": ((64, 32), "float16", (16, 32)),
    "empty": ((0, 4), "float32", (1, 4)),
    "bits.i4": ((8,), "int4", (4,)),
    "bits.f8": ((8,), "float8_e4m3fn", (4,)),
    "bits.mask": ((9,), "bool", (3,)),
    "bits.wave": ((6,), "complex64", (2,)),
    "zeros": ((16,), "float32", (8,)),  # equal to the fill value
}
SCALARS: dict[str, Any] = {"n": 3, "rate": 0.25, "big": 2**40}


def array(name: str, scale: int = 1) -> np.ndarray:
    """The array's full value; another for another `scale`."""
    shape, dtype, _ = ARRAYS[name]
    if name == "zeros":
        return np.zeros(shape, dtype)
    seeded = np.random.default_rng([scale, *name.encode()])
    return np.asarray(seeded.integers(-7, 7, shape)).astype(np.float32).astype(dtype)


def state(leaf: Any = array) -> dict[str, Any]:
    """The nested tree, with `leaf(name)` in place of each array."""
    return {
        "params": {"dense": {"kernel": leaf("params.dense.kernel"), "bias": leaf("params.dense.bias")}, "odd": leaf("params.odd")},
        "opt": [{"count": leaf("opt.0.count"), "mu": leaf("opt.0.mu")}, {}, None],
        "empty": leaf("empty"),
        "bits": {name: leaf(f"bits.{name}") for name in ("i4", "f8", "mask", "wave")},
        "zeros": leaf("zeros"),
        "nothing": [],
        **SCALARS,
    }


def notes() -> dict[str, Any]:
    """A second tree, with strings."""
    return {"name": "größer", "tags": ["a/b.c", ""], "seen": 7, "flag": True, "odd": array("params.odd")}


def bits(value: Any) -> Any:
    """What must be equal for bit-equality."""
    if isinstance(value, bool | int | float | str) or value is None:
        return type(value).__name__, value
    if str(getattr(value, "dtype", "")).startswith("key<"):  # a typed PRNG key: its data
        import jax

        value = jax.random.key_data(value)
    value = np.asarray(value)
    return value.dtype.name, value.shape, value.tobytes()


def flat(tree: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """path -> bits of every leaf; empty nodes are leaves. Needs no jax."""
    if isinstance(tree, dict | list | tuple) and tree:
        entries = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {p: v for key, value in entries for p, v in flat(value, (*path, key)).items()}
    return {path: type(tree).__name__ if isinstance(tree, dict | list | tuple) else bits(tree)}
