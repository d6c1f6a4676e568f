"""Values in another dtype than they were saved in. Into floats they are rounded; what a dtype can't hold is refused, never changed."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from raystate.arrays.checks import shown
from raystate.arrays.mismatch import DifferenceError
from raystate.machine.aligned import aligned

_BLOCK = 1 << 16  # elements that are looked at together: what that takes stays in the cache

KEEP_WIDE = (
    "A value that a dtype can't hold is never changed: keep large Python numbers in save's `custom` or as an item, ask for a wider dtype, "
    "or round by a function in `transforms`."
)


def converted(values: np.ndarray, dtype: np.dtype, start: tuple[int, ...] | None = None) -> np.ndarray:
    """A copy in another dtype.

    Args:
        values: any shape, and a dtype that a checkpoint can have.
        dtype: rounded to, if it is one of floats.
        start: where `values` begin in their array; None: say nothing of places.

    Raises:
        DifferenceError: some are too large for it, or no whole numbers, or NaN or infinite where it has none of these; or it is no
            dtype of numbers.
    """
    if not _has_numbers(dtype):
        raise DifferenceError(f"{values.dtype.name} can't become {dtype}, which is no dtype of numbers")
    got = aligned(values.shape, dtype)
    if dtype.isbuiltin == 1 and np.can_cast(values.dtype, dtype, "safe"):  # of others NumPy says so although it is not
        np.copyto(got, values)
        return got
    flat, into = values.reshape(-1), got.reshape(-1)
    bad = 0
    first = -1
    for begin in range(0, flat.size, _BLOCK):
        block: Any = flat[begin : begin + _BLOCK]
        with np.errstate(all="ignore"):
            if block.dtype.isbuiltin != 1:  # NumPy knows no way from one narrow dtype to another; float32 holds each exactly
                block = block.astype(np.float32)
            into[begin : begin + _BLOCK] = block.real if block.dtype.kind == "c" and dtype.kind != "c" else block
            lost = _lost(block, dtype)
        if lost is not None and lost.any():
            first = first if bad else begin + int(lost.argmax())
            bad += int(lost.sum())
    if bad:
        place = [a + int(i) for a, i in zip(start or (), np.unravel_index(first, values.shape), strict=bool(start))]
        where = f" at {place}" if place else ""
        more = f", and {bad - 1:,} more" if bad > 1 else ""
        raise DifferenceError(f"{flat[first].item()!r}{where}{more} can't be held by {dtype.name}", KEEP_WIDE)
    return got


def number_in(value: bool | int | float, dtype: np.dtype) -> np.ndarray:
    """A number as an array of shape (). Raises as `converted`."""
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise DifferenceError(f"{shown(value)} can't be held by {dtype.name}", KEEP_WIDE)
    return converted(np.asarray(value), dtype)


def number_as(value: Any, wanted: type) -> Any:
    """A number as a Python or numpy scalar type; of floats it is rounded.

    Raises:
        DifferenceError: the type can't hold it.
    """
    try:
        got = wanted(value)
    except (ValueError, OverflowError, TypeError):  # no whole number; larger than any float; complex
        got = None
    if got is None or (not issubclass(wanted, float) and got != value):
        raise DifferenceError(f"{shown(value)} can't be held by a Python {wanted.__name__}", KEEP_WIDE)
    return got


def _lost(block: Any, dtype: np.dtype) -> np.ndarray | None:
    """Which values the dtype can't hold; None: it holds all."""
    if block.dtype.kind == "c":
        real = _lost(block.real, dtype)
        imag = _lost(block.imag, dtype) if dtype.kind == "c" else block.imag != 0
        return imag if real is None else real if imag is None else real | imag
    if dtype.kind == "c":
        dtype = np.dtype(f"float{dtype.itemsize * 4}")
    if block.dtype == np.float16:  # in which limits of integers are infinite
        block = block.astype(np.float32)
    if dtype == np.bool_:
        return (block != 0) & (block != 1)
    whole = _whole_limits(dtype)
    if whole is not None:
        low, high = whole
        if block.dtype.kind != "f":
            return None if low <= int(block.min()) and int(block.max()) <= high else (block < low) | (block > high)
        # `high` itself may be no float, one more is.
        return ~((block == np.trunc(block)) & (block >= float(low)) & (block < float(high + 1)))
    limits = ml_dtypes.finfo(dtype)
    low, high = float(limits.min), float(limits.max)
    if low <= float(block.min()) and float(block.max()) <= high:  # neither where there is a NaN
        return None
    wide = block.astype(np.float64)
    back = wide.astype(dtype).astype(np.float64)
    rounded = np.isfinite(back) & (np.abs(wide) <= high + math.ldexp(float(limits.eps), math.frexp(high)[1] - 2))
    return ~np.where(np.isfinite(wide), rounded, (back == wide) | (np.isnan(back) & np.isnan(wide)))


def _has_numbers(dtype: np.dtype) -> bool:
    if dtype == np.bool_ or dtype.kind == "c" or _whole_limits(dtype) is not None:
        return True
    try:
        ml_dtypes.finfo(dtype)
    except ValueError:
        return False
    return True


def _whole_limits(dtype: np.dtype) -> tuple[int, int] | None:
    """The smallest and largest whole number of a dtype of integers."""
    try:
        found = ml_dtypes.iinfo(dtype)
    except ValueError:
        return None
    return int(found.min), int(found.max)
