"""One tree of a run or of a path, now or beside the caller's work; and what it holds."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Literal, ParamSpec, TypeVar

import jax

from raystate.arrays.checks import check_asked
from raystate.arrays.transforms import Transforms
from raystate.core.formats.errors import ConfigError
from raystate.inspection import StepMetadata
from raystate.public_calls import public
from raystate.reader.background import in_background
from raystate.reader.steps import Reader
from raystate.restored import STATE, ReadOptions
from raystate.storage import StorageUrl

P = ParamSpec("P")
R = TypeVar("R")


@public
def load(
    path_or_run: StorageUrl,
    reference: object = None,
    *,
    step: int | None = None,
    item: str | None = None,
    items: Mapping[str, object] | None = None,
    partial: bool = False,
    cast: bool = False,
    shapes: Literal["match", "checkpoint"] = "match",
    transforms: Transforms | None = None,
) -> Any:
    """One tree, placed as `reference` says (None: the raw tree). With `items`: several of one step, as a dict by name.

    Args:
        path_or_run: a run, or the folder of one step, of one plain Orbax checkpoint or of one of its items.
        reference, partial, cast, shapes, transforms: as `StateManager.restore`.
        step: of a run; None: its newest.
        item: an item of arrays; None: the state.
        items: name -> reference of a tree (None: raw), iterator or checkpointable (set in place), or None for a JSON
            value. The state is one of them: as "state", or as `reference`.

    Returns:
        The tree; with `items` a dict of what was asked for.

    Raises:
        StepNotFoundError: there is none, or it was retired meanwhile.
        ReferenceMismatchError: the step has no such item, no state, or other leaves; says what there is.
        CapacityError: there is no reference, and the raw tree is larger than the memory that is free.
        ConfigError: an option has a value that means nothing, or both `item` and `items` are given.
        CorruptCheckpointError, StorageError.
    """
    step = check_asked(reference, step=step, items=items, call="load")
    options = ReadOptions(partial=partial, cast=cast, shapes=shapes, transforms=transforms)
    reader = Reader(path_or_run)
    if items is None:
        return reader.load_tree(reference, step=step, item=item, options=options)
    if item is not None:
        raise ConfigError(f"load(): item= names one item, items= names several: put {item!r} into items", field="item")
    if reference is not None and STATE in items:
        raise ConfigError("load(): the state has two references, reference= and items['state']", field="items")
    asked = {STATE: reference, **items} if reference is not None else items
    return reader.load_items(asked, step=step, options=options)


@public
def metadata(path_or_run: StorageUrl, step: int | None = None) -> StepMetadata:
    """The contents of the checkpoint at a path, or of a step of a run (None: the newest). Raises as `Reader.metadata`."""
    return Reader(path_or_run).metadata(step)


def _takes_what(other: Callable[P, object]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """A decorator: the function takes the arguments of `other`."""

    def with_signature(function: Callable[..., R]) -> Callable[P, R]:
        returned = inspect.signature(function).return_annotation
        setattr(function, "__signature__", inspect.signature(other).replace(return_annotation=returned))  # noqa: B010
        return function

    return with_signature


@public
@_takes_what(load)
def load_async(*arguments: Any, **options: Any) -> Future[Any]:
    """Like `load`, with the same arguments, in the background: the mesh and the default device are those of this call.

    The interpreter's exit waits for it, as for `save_async`.

    Returns:
        A `concurrent.futures.Future`: `result(timeout)` returns the tree or raises as `load`; `done()`, `exception()`.
    """
    path = inspect.signature(load).bind(*arguments, **options).args[0]
    return in_background(f"loading {path}", functools.partial(_as_here(), functools.partial(load, *arguments, **options)))


def _as_here() -> Callable[[Callable[[], R]], R]:
    """Calls a function under the settings of JAX that belong to this thread."""
    mesh, device, wide = jax.sharding.get_mesh(), *(getattr(jax.config, name) for name in ("jax_default_device", "jax_enable_x64"))

    def call(function: Callable[[], R]) -> R:
        with contextlib.ExitStack() as settings:
            settings.enter_context(jax.default_device(device))
            settings.enter_context(jax.enable_x64(wide))
            if not mesh.empty:
                settings.enter_context(jax.set_mesh(mesh))
            return function()

    return call
