"""Loading beside the caller's work."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

import jax

from raystate.reader.background import in_background
from raystate.reader.loading import load

P = ParamSpec("P")
R = TypeVar("R")


def _takes_what(other: Callable[P, object]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """A decorator: the function takes the arguments of `other`."""

    def with_signature(function: Callable[..., R]) -> Callable[P, R]:
        returned = inspect.signature(function).return_annotation
        setattr(function, "__signature__", inspect.signature(other).replace(return_annotation=returned))  # noqa: B010
        return function

    return with_signature


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
