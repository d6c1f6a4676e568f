"""Match a reference with what a checkpoint holds: which leaf comes from where, and everything that doesn't fit, in one error."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec, Sharding

from raystate.arrays.checks import is_step, not_a_value
from raystate.arrays.converting import number_as, number_in
from raystate.arrays.holders_of_arrays import uncollected
from raystate.arrays.leaves import (
    asked_by_restore_args,
    is_abstract,
    is_exact,
    is_foreign,
    is_key,
    is_restore_args,
    is_weak,
    key_impl_of,
    kind,
    python_type,
    same_kind,
    shape_and_dtype,
)
from raystate.arrays.meshes import Saved, SavedShardings, check_fits, resolved, sharding_of
from raystate.arrays.mismatch import MISSING, DifferenceError, Differences, way_to_cast
from raystate.arrays.paths import Path, cannot_flatten, path_key
from raystate.arrays.stored import EMPTY, Stored
from raystate.arrays.transforms import KeepReference, Made, Rules, Unknown
from raystate.core.formats.errors import ConfigError
from raystate.core.formats.texts import counted
from raystate.core.formats.tree import ArraySpec, LeafSpec, TreeSpec, nest

ShapeRule = Literal["match", "checkpoint"]

_PARTIAL = "partial=True keeps the reference's value of what is not in the checkpoint; transforms can take it from another path."
_SHAPES = 'shapes="checkpoint" takes the checkpoint\'s shapes.'


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
    weak_type: bool = False  # JAX's own: in the reference the dtype gives way to that of what it meets


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A stored Python number that the reference wants as a jax.Array of shape ()."""

    value: np.ndarray
    sharding: Sharding | None
    weak_type: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Make:
    """What a function of `transforms` makes of other leaves of the checkpoint. Whether it fits is known when it is made."""

    path: Path
    value: Any  # the reference's leaf
    made: Made


Want = Keep | Plain | Given | Numpy | Device | Make


class Matched(NamedTuple):
    """What to do for each leaf of a reference, its structure, and the checkpoint's leaves that it says nothing of."""

    wants: list[Want]
    structure: Any
    left_out: list[LeafSpec]
    paths: list[Path]


def match_reference(
    reference: Any, spec: TreeSpec, *, partial: bool, cast: bool, shapes: ShapeRule, rules: Rules | None = None
) -> Matched:
    """What to do for each leaf of the reference, and its structure; nothing is read.

    Args:
        rules: what `transforms` say, if they are a mapping. Then what neither they nor the checkpoint have keeps the reference's value.

    Raises:
        ReferenceMismatchError: `differences` lists (path, what) of all of them. ConfigError: the reference is no tree.
    """
    with uncollected():
        return _match(reference, spec, partial=partial, cast=cast, shapes=shapes, rules=rules)


def _match(reference: Any, spec: TreeSpec, *, partial: bool, cast: bool, shapes: ShapeRule, rules: Rules | None) -> Matched:
    stored = Stored(spec)
    try:
        flat, structure = jax.tree_util.tree_flatten_with_path(_expanded(reference, stored))
    except (ValueError, TypeError, SystemError, RecursionError) as error:  # keys that can't be sorted; containers without end
        raise ConfigError(f"reference: {cannot_flatten(error)}", field="reference", item=spec.item) from error
    matcher = _Matcher(spec, cast=cast, shapes=shapes)
    differences = matcher.differences
    wants: list[Want] = []
    used: list[int] = []
    skipped: list[int] = []
    paths: list[Path] = [tuple(map(path_key, keys)) for keys, _ in flat]
    for path, (_, value) in zip(paths, flat, strict=True):
        ruled = rules.apply(path, stored) if rules is not None else None
        if value is ... or isinstance(ruled, KeepReference):
            index = stored.find(path)
            skipped.extend(stored.below(path) if index is None else [index])
            if value is not ...:
                _check_kept(path, value, differences, "transforms say to keep the reference's value")
            wants.append(Keep(value=value))
        elif isinstance(ruled, Unknown):
            differences.add(path, f"transforms take it from {ruled.old!r}, which {MISSING}")
            wants.append(Keep(value=value))
        elif isinstance(ruled, Made):
            used.extend(ruled.needs)
            wants.append(Make(path=path, value=value, made=ruled))
        elif (index := ruled if isinstance(ruled, int) else stored.find(path)) is not None:
            used.append(index)
            wants.append(matcher.match(path, value, index))
        else:
            wants.append(Keep(value=value))
            if below := stored.below(path):
                why = not_a_value(value) or f"expected {kind(value)}"
                leaves = counted(len(below), "leaf", "leaves")
                differences.add(path, f"{why}, the checkpoint has {leaves} below it{_of_a_step(path, value)}")
            elif partial or rules is not None:
                _check_kept(path, value, differences, MISSING)
            else:
                why = not_a_value(value)
                differences.add(path, f"{MISSING}; {why}" if why else MISSING, _PARTIAL)
    for pattern in rules.unused() if rules is not None else ():
        differences.add(("transforms",), f"{pattern!r} matches no path of the reference")
    if differences:
        raise differences.error(spec.item, [leaf.path for leaf in stored.others(used)] if differences.any_missing else [])
    return Matched(wants, structure, stored.others([*used, *skipped]), paths)


def match_leaf(spec: TreeSpec, path: Path, value: Any, differences: Differences, *, cast: bool, shapes: ShapeRule) -> Want:
    """As `match_reference`, for the only leaf of `spec`; a difference goes to `differences`."""
    matcher = _Matcher(spec, cast=cast, shapes=shapes)
    matcher.differences = differences
    return matcher.match(path, value, 0)


def _expanded(reference: Any, stored: Stored) -> Any:
    """The reference with each sharding that stands for a subtree of the checkpoint spread over that subtree's leaves."""

    if not any(isinstance(leaf, Sharding | PartitionSpec) for leaf in jax.tree_util.tree_leaves(reference)):
        return reference  # as nearly always: to build another tree takes as long as to match it

    def spread(keys: Any, value: Any) -> Any:
        if not isinstance(value, Sharding | PartitionSpec):
            return value
        path = tuple(map(path_key, keys))
        index = stored.find(path)
        leaves = [stored.spec.leaves[i] for i in (stored.below(path) if index is None else [index])]
        if not leaves or (len(leaves) == 1 and index is not None and leaves[0].kind not in EMPTY):
            return value
        shortened = [dataclasses.replace(leaf, path=leaf.path[len(path) :]) for leaf in leaves]
        return nest(shortened, [leaf.plain if leaf.kind in EMPTY else value for leaf in leaves])

    return jax.tree_util.tree_map_with_path(spread, reference)


def _check_kept(path: Path, value: Any, differences: Differences, why: str) -> None:
    if isinstance(value, jax.Array):
        if value.is_deleted():
            differences.add(path, f"{why}, and the reference's own array was donated and is deleted")
    elif is_abstract(value):
        text = f"{why}, and the reference has no value to keep: {kind(value)} is abstract"
        differences.add(path, text, "Give an initialized array where the reference's value is to be kept, or ... to leave it out.")


def _of_a_step(path: Path, value: Any) -> str:
    """A step number in the reference's place is what CheckpointManager's callers write."""
    return f"; did you mean step={value}?" if not path and is_step(value) else ""


class _Matcher:
    def __init__(self, spec: TreeSpec, *, cast: bool, shapes: ShapeRule):
        self.spec = spec
        self.cast = cast
        self.shapes = shapes
        self.differences = Differences()
        self._like: dict[Any, Device] = {}  # of what is alike in the reference and in the checkpoint: all but `leaf`
        self._same: dict[Sharding, Sharding] = {}
        self._saved = SavedShardings()

    def match(self, path: Path, value: Any, index: int) -> Want:
        stored = self.spec.leaves[index]
        if is_restore_args(value):
            value = asked_by_restore_args(value, stored)
        try:
            if why := not_a_value(value):
                raise DifferenceError(why)
            if stored.array is None:
                return self._plain(value, stored)
            return self._like_others(value, stored.array, index)
        except DifferenceError as error:
            self.differences.refuse(path, error)
            return Keep(value=value)

    # ------------------------------------------------ what the checkpoint has as a value

    def _plain(self, value: Any, stored: LeafSpec) -> Want:
        have: Any = stored.value
        if stored.kind in EMPTY:
            raise DifferenceError(f"expected {kind(value)}, the checkpoint has {_EMPTY[stored.kind]} there")
        if isinstance(value, Sharding | PartitionSpec):
            return Plain(value=have)
        if stored.kind == "string" or isinstance(value, str):
            if isinstance(value, str) and isinstance(have, str):
                return Plain(value=have)
            raise DifferenceError(f"expected {kind(value)}, the checkpoint has {kind(have)}")
        if (python := python_type(value)) is not None:
            fits = type(have) is python or (python is float and is_exact(have, np.dtype(float)))
            if not fits and not self.cast:
                text = f"expected {kind(value)}, the checkpoint has {kind(have)} {have!r}"
                raise DifferenceError(text, way_to_cast(type(have), python))
            return Plain(value=number_as(have, python))
        shape, dtype = shape_and_dtype(value, (), np.asarray(have).dtype)
        if shape != () and self.shapes == "match":
            raise DifferenceError(f"expected shape {shape}, the checkpoint has {kind(have)} {have!r}", _SHAPES)
        if is_key(dtype):
            raise DifferenceError(f"expected PRNG keys, the checkpoint has {kind(have)} {have!r}")
        # A Python number has no width: it fits every dtype of its kind; a whole one also floats, as the 0 at a schedule's end.
        if not (same_kind(type(have), dtype) or is_exact(have, dtype)) and not self.cast:
            text = f"expected dtype {dtype.name}, the checkpoint has {kind(have)} {have!r}"
            raise DifferenceError(text, way_to_cast(type(have), dtype))
        if is_foreign(value) and getattr(value, "sharding", ...) is None:  # Orbax v0's of a Python number
            return Plain(value=have)
        array = number_in(have, np.dtype(dtype))
        if isinstance(value, np.generic):
            return Plain(value=array[()])
        if isinstance(value, np.ndarray) or is_foreign(value):
            return Plain(value=array)
        self._check_width(dtype)
        return Given(value=array, sharding=sharding_of(value), weak_type=is_weak(value))

    # ------------------------------------------------ what the checkpoint has as an array

    def _like_others(self, value: Any, stored: ArraySpec, index: int) -> Want:
        """States of ten thousand arrays have a few kinds of them: each kind is looked at once."""
        if not isinstance(value, jax.ShapeDtypeStruct | jax.Array):
            return self._array(value, stored, index)
        free = isinstance(value, jax.Array) and not value.committed
        key = type(value), value.shape, value.dtype, value.sharding, free, is_weak(value), stored
        found = self._like.get(key)
        if found is None:
            want = self._array(value, stored, index)
            if isinstance(want, Device):
                self._like[key] = want
            return want
        return Device(  # `replace` takes twice as long
            leaf=index,
            shape=found.shape,
            dtype=found.dtype,
            sharding=found.sharding,
            key_impl=found.key_impl,
            weak_type=found.weak_type,
        )

    def _array(self, value: Any, stored: ArraySpec, index: int) -> Want:
        have = np.dtype(stored.dtype)
        if isinstance(value, Sharding | PartitionSpec):
            self._check_width(have)
            return self._device(index, stored, have, resolved(value), stored.key_impl)
        if (python := python_type(value)) is not None:
            if stored.shape != ():
                raise DifferenceError(f"expected {kind(value)}, the checkpoint has an array {stored.dtype}{list(stored.shape)}")
            if not same_kind(python, have) and not self.cast:
                raise DifferenceError(f"expected {kind(value)}, the checkpoint has a {stored.dtype}", way_to_cast(have, python))
            return Numpy(leaf=index, dtype=have, scalar=python)
        if isinstance(value, str):
            raise DifferenceError(f"expected a string, the checkpoint has an array {stored.dtype}{list(stored.shape)}")
        shape, dtype = shape_and_dtype(value, stored.shape, have)
        if is_key(dtype):
            return self._keys(value, shape, dtype, stored, index)
        self._check_shape(shape, stored.shape)
        if np.dtype(dtype).newbyteorder("=") != have and not self.cast:
            raise DifferenceError(f"expected dtype {dtype.name}, the checkpoint has {have.name}", way_to_cast(have, dtype))
        if isinstance(value, np.generic):
            if stored.shape != ():
                raise DifferenceError(f"expected a numpy scalar, the checkpoint has shape {stored.shape}")
            return Numpy(leaf=index, dtype=dtype, scalar=type(value))
        if isinstance(value, np.ndarray):
            return Numpy(leaf=index, dtype=dtype)
        if not is_foreign(value):
            self._check_width(dtype)
            return self._device(index, stored, dtype, self._sharding(value, stored), None, weak_type=is_weak(value))
        if (saved := self._saved.of(value, shape)) is None or jax.dtypes.canonicalize_dtype(dtype) != dtype:
            return Numpy(leaf=index, dtype=dtype)
        key_impl = stored.key_impl if getattr(value, "key_impl", None) is not None else None
        return self._device(index, stored, dtype, saved, key_impl)

    def _keys(self, value: Any, shape: tuple[int, ...], dtype: Any, stored: ArraySpec, index: int) -> Want:
        impl = key_impl_of(dtype)
        if stored.key_impl is None and not (self.cast and stored.dtype == "uint32"):
            raise DifferenceError(f"expected PRNG keys ({impl}), the checkpoint has {stored.dtype}")
        if stored.key_impl not in (None, impl):
            raise DifferenceError(f"expected PRNG keys of {impl}, the checkpoint has {stored.key_impl}")
        data_shape = (*shape, *stored.shape[len(stored.shape) - 1 :])
        self._check_shape(data_shape, stored.shape)
        return self._device(index, stored, np.dtype(stored.dtype), self._sharding(value, stored), impl)

    def _sharding(self, value: Any, stored: ArraySpec) -> Sharding | Saved | None:
        """Without one in the reference it is the saved one, as Orbax has it, if its devices are here."""
        sharding = sharding_of(value)
        if sharding is None and type(value) is jax.ShapeDtypeStruct:
            return self._saved.find(stored.sharding, stored.shape)
        return sharding

    def _device(
        self,
        index: int,
        stored: ArraySpec,
        dtype: np.dtype,
        sharding: Sharding | Saved | None,
        key_impl: str | None,
        *,
        weak_type: bool = False,
    ) -> Device:
        shape = stored.shape if key_impl is None else stored.shape[:-1]  # keys are sharded, not their words
        if isinstance(sharding, Saved):
            sharding, shape = sharding.sharding, stored.shape  # but the words were, when they were written
        if sharding is not None:
            check_fits(sharding, shape)
            sharding = self._same.setdefault(sharding, sharding)  # to compare two objects takes a hundred times as long as one
        return Device(leaf=index, shape=stored.shape, dtype=dtype, sharding=sharding, key_impl=key_impl, weak_type=weak_type)

    def _check_shape(self, expected: tuple[int, ...], have: tuple[int, ...]) -> None:
        if expected != have and self.shapes == "match":
            raise DifferenceError(f"expected shape {expected}, the checkpoint has {have}", _SHAPES)

    def _check_width(self, dtype: np.dtype) -> None:
        """jax would narrow 64-bit values without a word."""
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise DifferenceError(
                f"a jax.Array can't be {dtype.name} unless jax_enable_x64 is set; ask for np.ndarray or another dtype"
            )


_EMPTY = {"none": "None", "dict": "an empty dict", "list": "an empty list"}
