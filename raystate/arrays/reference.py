"""Match a reference with what a checkpoint holds: which leaf comes from where, and everything that doesn't fit, in one error."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec, Sharding

from raystate.arrays.asked import is_step, not_a_value
from raystate.arrays.meshes import check_fits, resolved, sharding_of
from raystate.arrays.mismatch import MISSING, DifferenceError, Differences, way_to_cast
from raystate.arrays.paths import Path, cannot_flatten, path_key
from raystate.arrays.stored import EMPTY, Stored
from raystate.arrays.transforms import KeepReference, Made, Rules, Unknown
from raystate.arrays.uncollected import uncollected
from raystate.core.errors import ConfigError
from raystate.core.tree import ArraySpec, LeafSpec, TreeSpec, nest

ShapeRule = Literal["match", "checkpoint"]

_PARTIAL = "partial=True keeps the reference's value of what is not in the checkpoint; transforms can take it from another path."
_SHAPES = 'restore(…, shapes="checkpoint") takes the checkpoint\'s shapes.'


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
    for keys, value in flat:
        path = tuple(map(path_key, keys))
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
                why = not_a_value(value) or f"expected {_kind(value)}"
                leaves = "1 leaf" if len(below) == 1 else f"{len(below)} leaves"
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
    return Matched(wants, structure, stored.others([*used, *skipped]))


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
        text = f"{why}, and the reference has no value to keep: {_kind(value)} is abstract"
        differences.add(path, text, "Give an initialized array where the reference's value is to be kept, or ... to leave it out.")


def is_abstract(value: Any) -> bool:
    """Whether a leaf says what an array is like, and has no values: of JAX, or of another library."""
    if isinstance(value, Sharding | PartitionSpec | jax.ShapeDtypeStruct):
        return True
    return hasattr(value, "shape") and hasattr(value, "dtype") and not hasattr(value, "__array__")


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

    def match(self, path: Path, value: Any, index: int) -> Want:
        stored = self.spec.leaves[index]
        try:
            if why := not_a_value(value):
                raise DifferenceError(why)
            if stored.array is None:
                return self._plain(value, stored)
            return self._like_others(value, stored.array, index)
        except DifferenceError as error:
            self.differences.add(path, str(error), error.way_out)
            return Keep(value=value)

    # ------------------------------------------------ what the checkpoint has as a value

    def _plain(self, value: Any, stored: LeafSpec) -> Want:
        have = stored.value
        if stored.kind in EMPTY:
            raise DifferenceError(f"expected {_kind(value)}, the checkpoint has {_EMPTY[stored.kind]} there")
        if isinstance(value, Sharding | PartitionSpec):
            return Plain(value=have)
        if stored.kind == "string" or isinstance(value, str):
            if isinstance(value, str) and isinstance(have, str):
                return Plain(value=have)
            raise DifferenceError(f"expected {_kind(value)}, the checkpoint has {_kind(have)}")
        if isinstance(value, bool | int | float):
            python = _python_type(value)
            if type(have) is not python and not self.cast:
                text = f"expected {_kind(value)}, the checkpoint has {_kind(have)} {have!r}"
                raise DifferenceError(text, way_to_cast(type(have), python))
            return Plain(value=python(have))
        shape, dtype = _shape_and_dtype(value)
        if shape != () and self.shapes == "match":
            raise DifferenceError(f"expected shape {shape}, the checkpoint has {_kind(have)} {have!r}", _SHAPES)
        if _is_key(dtype):
            raise DifferenceError(f"expected PRNG keys, the checkpoint has {_kind(have)} {have!r}")
        # A Python number has no width: it fits every dtype of its kind.
        if not _same_kind(type(have), dtype) and not self.cast:
            text = f"expected dtype {dtype.name}, the checkpoint has {_kind(have)} {have!r}"
            raise DifferenceError(text, way_to_cast(type(have), dtype))
        array = np.asarray(have).astype(dtype)
        if isinstance(value, np.generic):
            return Plain(value=array[()])
        if isinstance(value, np.ndarray):
            return Plain(value=array)
        self._check_width(dtype)
        return Given(value=array, sharding=sharding_of(value), weak_type=_is_weak(value))

    # ------------------------------------------------ what the checkpoint has as an array

    def _like_others(self, value: Any, stored: ArraySpec, index: int) -> Want:
        """States of ten thousand arrays have a few kinds of them: each kind is looked at once."""
        if not isinstance(value, jax.ShapeDtypeStruct | jax.Array):
            return self._array(value, stored, index)
        free = isinstance(value, jax.Array) and not value.committed
        key = type(value), value.shape, value.dtype, value.sharding, free, _is_weak(value), stored
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
        if isinstance(value, bool | int | float):
            if stored.shape != ():
                raise DifferenceError(f"expected {_kind(value)}, the checkpoint has an array {stored.dtype}{list(stored.shape)}")
            python = _python_type(value)
            if not _same_kind(python, have) and not self.cast:
                raise DifferenceError(f"expected {_kind(value)}, the checkpoint has a {stored.dtype}", way_to_cast(have, python))
            return Numpy(leaf=index, dtype=have, scalar=python)
        if isinstance(value, str):
            raise DifferenceError(f"expected a string, the checkpoint has an array {stored.dtype}{list(stored.shape)}")
        shape, dtype = _shape_and_dtype(value)
        if _is_key(dtype):
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
        self._check_width(dtype)
        return self._device(index, stored, dtype, sharding_of(value), None, weak_type=_is_weak(value))

    def _keys(self, value: Any, shape: tuple[int, ...], dtype: Any, stored: ArraySpec, index: int) -> Want:
        impl = key_impl_of(dtype)
        if stored.key_impl is None and not (self.cast and stored.dtype == "uint32"):
            raise DifferenceError(f"expected PRNG keys ({impl}), the checkpoint has {stored.dtype}")
        if stored.key_impl not in (None, impl):
            raise DifferenceError(f"expected PRNG keys of {impl}, the checkpoint has {stored.key_impl}")
        data_shape = (*shape, *stored.shape[len(stored.shape) - 1 :])
        self._check_shape(data_shape, stored.shape)
        return self._device(index, stored, np.dtype(stored.dtype), sharding_of(value), impl)

    def _device(
        self,
        index: int,
        stored: ArraySpec,
        dtype: np.dtype,
        sharding: Sharding | None,
        key_impl: str | None,
        *,
        weak_type: bool = False,
    ) -> Device:
        if sharding is not None:
            check_fits(sharding, stored.shape if key_impl is None else stored.shape[:-1])  # keys are sharded, not their words
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


def _is_weak(value: Any) -> bool:
    return bool(getattr(value, "weak_type", False))


def _kind(value: Any) -> str:
    if isinstance(value, Sharding | PartitionSpec):
        return "an array with a sharding"
    if isinstance(value, bool | int | float):
        return f"a Python {type(value).__name__}"
    if isinstance(value, str):
        return "a string"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array {value.dtype}{list(value.shape)}"
    return f"a {type(value).__name__}"


def _python_type(value: bool | int | float) -> type:
    """What its subclasses, such as an enum's, are saved as, and come back as. numpy's own stay what they are."""
    if isinstance(value, np.generic):
        return type(value)
    return next(python for python in (bool, int, float) if isinstance(value, python))


def _shape_and_dtype(value: Any) -> tuple[tuple[int, ...], Any]:
    if isinstance(value, np.ndarray | np.generic | jax.Array | jax.ShapeDtypeStruct):
        return tuple(value.shape), value.dtype
    if hasattr(value, "shape") and hasattr(value, "dtype"):  # another library's abstract array
        return tuple(value.shape), value.dtype
    raise DifferenceError(
        f"a reference leaf must be a ShapeDtypeStruct, array, scalar, string, Sharding or ..., not {type(value).__name__}"
    )


def _is_key(dtype: Any) -> bool:
    return jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def key_impl_of(dtype: Any) -> str:
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
