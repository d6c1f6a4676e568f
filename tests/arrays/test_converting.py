"""What a target can't hold is refused by path and value, from every tier; into floats values are rounded."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raystate
from raystate.arrays.converting import converted
from raystate.arrays.mismatch import DifferenceError
from raystate.arrays.tree import STORABLE
from raystate.core.formats.errors import ReferenceMismatchError
from tests.arrays.saved import Saved

I32, F32, F8 = jnp.int32(0), jnp.float32(0), jnp.zeros((), jnp.float8_e4m3fn)
NUMBERS = [  # saved, reference, cast, what comes back (None: refused)
    (5_000_000_000, I32, False, None),
    (5_000_000_000, np.int64(0), False, 5_000_000_000),
    (5_000_000_000, np.zeros((), np.int32), False, None),
    (-(2**63), np.uint64(0), False, None),
    (-1, jnp.uint8(0), False, None),
    (300, np.zeros((), "int4"), False, None),
    (math.inf, F8, False, None),
    (math.inf, F32, False, math.inf),
    (1e300, F32, False, None),
    (0.1, F32, False, float(np.float32(0.1))),
    (-1.0, np.zeros((), "float8_e8m0fnu"), False, None),
    (100.0, np.zeros((), "float4_e2m1fn"), False, None),
    (2**53 + 1, I32, True, None),
    (2**53 + 1, 0.0, True, float(2**53)),
    (math.nan, I32, True, None),
    (math.nan, 0, True, None),
    (math.inf, 0, True, None),
    (85.19, 0, True, None),
    (85.19, I32, True, None),
    (85.0, I32, True, 85),
    (2, False, True, None),
    (1, False, True, True),
    (np.int64(2**53 + 1), I32, True, None),
    (np.float64(math.nan), I32, True, None),
    (np.float64(1e300), 0, True, int(1e300)),
    (np.float32(0.5), 0, True, None),
    (np.array([1, 2.5, 2**31]), np.zeros(3, np.int32), True, None),
    (np.array([1 + 2j]), np.zeros(1), True, None),
    (np.array([1e39 + 1j]), np.zeros(1, np.complex64), True, None),
    (jnp.full(2, 3.4e38), jnp.zeros(2, jnp.bfloat16), True, None),
    (jnp.full(2, -7), jnp.zeros(2, jnp.uint32), True, None),
    (np.full(2, -math.inf, np.float16), np.zeros(2, np.int32), True, None),
    (np.full(2, -math.inf, np.float16), np.zeros(2, np.int64), True, None),
]  # fmt: skip


@pytest.mark.parametrize("tier", ["memory", "storage"])
def test_what_the_target_cannot_hold_is_a_difference(tier: str, tmp_path: Any):
    state = {"keep": np.ones(2), **{f"n{i}": saved for i, (saved, *_) in enumerate(NUMBERS)}}
    if tier == "memory":
        load = Saved(state).restore
    else:
        raystate.save(tmp_path / "saved", state)

        def load(reference: Any, **options: Any) -> Any:
            return raystate.load(tmp_path / "saved", reference, **options)

    told: dict[str, str] = {}
    for cast in (False, True):
        refused: list[dict[str, Any]] = [{}, {}]  # numbers, which are looked at before anything is read, and arrays
        held: dict[str, Any] = {}
        for i, (saved, like, casts, wanted) in enumerate(NUMBERS):
            if casts == cast:
                where = held if wanted is not None else refused[isinstance(saved, np.ndarray | np.generic | jax.Array)]
                where[f"n{i}"] = like
        for reference in filter(None, refused):
            with pytest.raises(ReferenceMismatchError) as caught:
                load(reference, cast=cast)
            told |= caught.value.differences
            assert {path for path, _ in caught.value.differences} == set(reference)
        for name, value in load(held, cast=cast).items():
            assert value == NUMBERS[int(name[1:])][3]
            assert type(value) is type(held[name])
    assert all("can't be held by" in why for why in told.values())
    assert told["n0"] == "5000000000 can't be held by int32"
    assert told["n26"] == "2.5 at [1], and 1 more can't be held by int32"


NARROW = sorted(name for name in [*STORABLE, "uint2", "uint4"] if np.dtype(name).isbuiltin != 1)


@pytest.mark.parametrize("name", NARROW)
def test_between_narrow_dtypes_it_is_as_from_float64(name: str):
    every = np.arange(256, dtype=np.uint8).view(name)[:16] if np.dtype(name).itemsize == 1 else np.arange(16).astype(name)
    for wanted in NARROW:
        for value in every:
            results: list[Any] = []
            for one in (np.asarray(value), np.asarray(value).astype(np.float64)):
                try:
                    results.append(converted(one, np.dtype(wanted)).tobytes())
                except DifferenceError as error:
                    results.append(str(error))
            assert results[0] == results[1] or all(isinstance(got, str) for got in results)


@pytest.mark.parametrize("wanted", [object, "U9", "S3", "M8[s]", "m8[s]", "i4,f4"], ids=str)
@pytest.mark.parametrize("saved", [5, np.arange(2)], ids=str)
def test_what_is_no_dtype_of_numbers_is_a_difference(saved: Any, wanted: Any):
    with pytest.raises(ReferenceMismatchError, match=r"n: int64 can't become .*, which is no dtype of numbers"):
        Saved({"n": saved}).restore({"n": np.zeros(np.shape(saved), wanted)}, cast=True)


@pytest.mark.parametrize("name", sorted(STORABLE - {"float64", "complex128"}))
@given(values=st.lists(st.floats(width=64) | st.integers(-(2**63), 2**64 - 1), min_size=1, max_size=5))
def test_a_value_comes_back_rounded_or_not_at_all(name: str, values: list[float]):
    """By the definition: the nearest value of the dtype, found among its neighbours, or a refusal."""
    dtype = np.dtype(name)
    for value in values:
        try:
            got: Any = converted(np.asarray(value), dtype).item()
        except DifferenceError:
            got = None
        if name.startswith(("int", "uint", "bool")):
            info = None if name == "bool" else ml_dtypes.iinfo(dtype)
            low, high = (0, 1) if info is None else (int(info.min), int(info.max))
            fits = not (isinstance(value, float) and not value.is_integer()) and low <= value <= high
            assert got == (value if fits else None)
            continue
        info = ml_dtypes.finfo(np.float32 if name == "complex64" else dtype)
        if got is None:
            small = name == "float8_e8m0fnu" and not value >= float(info.min) * 2
            special = isinstance(value, float) and not math.isfinite(value)
            assert special or small or abs(value) > float(info.max)
        elif isinstance(value, float) and math.isnan(value):
            assert got != got
        elif math.isinf(value):
            assert got == value
        else:
            assert math.isfinite(abs(got)) and abs(got - value) <= max(abs(value) * float(info.eps), float(info.smallest_subnormal))
