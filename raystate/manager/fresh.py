"""The fresh state of a run: what it is like, where it lies, and how it is made."""

# JAX's own functions are only partly typed; everything of ours is checked strictly.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Literal
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from raystate.arrays.leaves import Free
from raystate.arrays.meshes import resolved
from raystate.core.formats.errors import ConfigError

logger = logging.getLogger("raystate")


def check_init(init_fn: object) -> None:
    """Raises ConfigError if it is no function."""
    if not callable(init_fn):
        what = f"restore_or_init() needs a function that makes the state, not a {type(init_fn).__name__}"
        raise ConfigError(f"{what}; for a state that is there already: restore(state)", field="init_fn")


def abstract_state(init_fn: Callable[[], Any], shardings: Any) -> tuple[Any, Callable[[], Any]]:
    """(reference for a restore, a function that makes the fresh state)."""
    try:
        abstract = jax.eval_shape(init_fn)
    except TypeError as error:
        raise ConfigError(
            f"restore_or_init(): JAX can't trace init_fn: {error}. It takes no arguments (functools.partial binds them) and gives a "
            "pytree of arrays and numbers; text and the like go into `custom` or an item of save()",
            field="init_fn",
        ) from error
    if callable(shardings):
        shardings = shardings(abstract)
    if shardings is None:
        return _as_init_says(init_fn, abstract)
    try:
        if jax.sharding.get_abstract_mesh().empty and any(
            isinstance(one, PartitionSpec) for one in jax.tree_util.tree_leaves(shardings)
        ):
            raise ValueError("there is a PartitionSpec, and no mesh is set")
        return _placed(abstract, shardings), jax.jit(init_fn, out_shardings=shardings)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "restore_or_init(): these shardings don't fit what init_fn makes: give one for all, a pytree like the state (or a prefix of "
            f"it), or a function of the abstract state; a PartitionSpec needs a mesh: call under jax.set_mesh(mesh). JAX says: {error}",
            field="shardings",
        ) from error


# ---------------------------------------------------------------- where init itself puts it


def _as_init_says(init_fn: Callable[[], Any], abstract: Any) -> tuple[Any, Callable[[], Any]]:
    """Where `init_fn` puts its arrays, they stay. `jit` forgets a `device_put`, and the arrays' own devices in a closure.

    `jit` can be told of those that are put last. What is made of others, as an optimizer's state is, lies where the program itself
    says only as it runs: then it runs, also before a restore, and what it made is dropped.
    """
    structure = jax.tree_util.tree_structure(abstract)
    puts = _puts(jax.jit(init_fn).trace().jaxpr)
    if puts.must_run:

        def written() -> Any:
            return jax.tree_util.tree_map(jax.numpy.asarray, init_fn())  # numbers, as jit makes them

        return jax.tree_util.tree_map(
            lambda array: _outline(array, array.sharding if array.committed else None), written()
        ), written
    out_shardings = structure.unflatten(puts.shardings) if any(puts.shardings) else None
    lowered = jax.jit(init_fn, out_shardings=out_shardings).lower()
    if not _is_committed(lowered):  # a restore needs no such program
        return jax.tree_util.tree_map(lambda array: _outline(array, None), abstract), lambda: lowered.compile()()
    compiled = lowered.compile()
    return _placed(abstract, compiled.output_shardings), compiled


def _outline(array: Any, sharding: Sharding | None) -> jax.ShapeDtypeStruct:
    kind = Free if sharding is None else jax.ShapeDtypeStruct
    return kind(array.shape, array.dtype, sharding=sharding, weak_type=array.weak_type)


class _Puts(NamedTuple):
    """Where a program puts what it gives. `shardings`: for jit, by leaf; None as jit finds it."""

    shardings: Sequence[Sharding | None]
    must_run: bool


def _puts(program: ClosedJaxpr) -> _Puts:
    kept: dict[Any, Sharding] = {}
    put: dict[Any, Sharding] = {}  # and jit forgets it
    used = _used(program)
    for variable, value in zip(program.jaxpr.constvars, program.consts, strict=True):
        if variable in used and isinstance(value, jax.Array) and value.committed:
            put[variable] = value.sharding
    must_run = not all(sharding.is_fully_replicated for sharding in put.values())  # jit would make a constant of it, whole
    for step in program.jaxpr.eqns:
        match step.primitive.name:
            case "device_put":
                put.update(_shardings(step.outvars, step.params["devices"]))
            case "jit":
                kept.update(_shardings(step.outvars, step.params["out_shardings"]))
            case "sharding_constraint":
                kept.update(_shardings(step.outvars, [step.params["sharding"]]))
            case _:
                pass
    arrays = [variable for variable in program.jaxpr.outvars if not isinstance(variable, Literal)]
    told = kept | put
    if any(map(_is_spread, put.values())):
        must_run |= any(array not in told and array.aval.shape for array in arrays)
    must_run |= len({frozenset(told[array].device_set) for array in arrays if array in told}) > 1  # jit has one mesh
    return _Puts([None if isinstance(end, Literal) else put.get(end) for end in program.jaxpr.outvars], must_run)


def _shardings(variables: Sequence[Any], given: Sequence[Any]) -> dict[Any, Sharding]:
    found: dict[Any, Sharding] = {}
    for variable, target in zip(variables, given, strict=True):
        sharding = SingleDeviceSharding(target) if isinstance(target, jax.Device) else target
        if isinstance(sharding, Sharding) and (on_devices := resolved(sharding)) is not None:
            found[variable] = on_devices
    return found


def _is_spread(sharding: Sharding) -> bool:
    """Whether each device has a part, and jit doesn't know it: the axes of an Explicit mesh are part of a type."""
    explicit = isinstance(sharding, NamedSharding) and set(sharding.mesh.axis_types) == {AxisType.Explicit}
    return not sharding.is_fully_replicated and not explicit


def _used(program: ClosedJaxpr) -> set[Any]:
    """The variables that the program's values are made of."""
    used = {variable for variable in program.jaxpr.outvars if not isinstance(variable, Literal)}
    for step in reversed(program.jaxpr.eqns):
        if not used.isdisjoint(step.outvars):
            used.update(variable for variable in step.invars if not isinstance(variable, Literal))
    return used


def _is_committed(lowered: Any) -> bool:
    """Whether what a program gives is bound to its devices. If not, jit may move it to where other arguments lie.

    JAX's public functions tell it of arrays only, and to make them takes as long as `init_fn` (tests/model/test_every_tier.py notices if
    this changes).
    """
    try:
        return bool(lowered._lowering.compile_args["committed"])
    except (AttributeError, KeyError, TypeError):
        _warn_of_jax()
        return True


@functools.cache  # once
def _warn_of_jax() -> None:
    text = "JAX %s doesn't say whether a fresh state is bound to its devices, as a restored state is. Name its `shardings`"
    logger.warning(text, jax.__version__)


def _placed(abstract: Any, shardings: Any) -> Any:
    full = jax.tree_util.tree_broadcast(shardings, abstract) if not _same_tree(shardings, abstract) else shardings
    return jax.tree_util.tree_map(_outline, abstract, full)


def _same_tree(a: Any, b: Any) -> bool:
    return bool(jax.tree_util.tree_structure(a) == jax.tree_util.tree_structure(b))
