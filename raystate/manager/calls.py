"""What may come between the lines of a call: Ctrl-C, a signal handler that raises, a signal handler that calls the manager."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from raystate.core.formats.errors import RaystateError

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M")

_calls: dict[tuple[int, int], str] = {}  # (thread, whose) -> the call that it is in


def alone(method: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
    """Refuse a call that begins inside another one of the same thread, which is not finished."""
    name = getattr(method, "__name__", "")

    @functools.wraps(method)
    def call(self: M, *args: P.args, **kwargs: P.kwargs) -> R:
        me = threading.get_ident(), id(self)
        if (outer := _calls.get(me)) is not None:
            raise RaystateError(
                f"{name}() was called inside {outer}() of the same StateManager, by a signal handler or by code that {outer}() runs: "
                f"{outer}() has not finished. Let a signal handler set a flag, and call {name}() from the loop"
            )
        try:
            _calls[me] = name
            return method(self, *args, **kwargs)
        finally:
            _calls.pop(me, None)

    return call
