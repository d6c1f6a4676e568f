"""What may come between the lines of a call: Ctrl-C, a signal handler that raises, a signal handler that calls the manager."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from raystate.core.formats.errors import RaystateError
from raystate.manager.session import Session


class _Manager(Protocol):
    _session: Session


P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=_Manager)

_calls: dict[tuple[int, int], str] = {}  # (thread, whose) -> the call that it is in


def alone(cause: str) -> Callable[[Callable[Concatenate[M, P], R]], Callable[Concatenate[M, P], R]]:
    """Refuse a call that begins inside another one of the same thread, which is not finished.

    Args:
        cause: as what its time counts; see `manager.spent`.
    """

    def decorate(method: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
        name = getattr(method, "__name__", "")

        @functools.wraps(method)
        def call(self: M, *args: P.args, **kwargs: P.kwargs) -> R:
            me, spent = (threading.get_ident(), id(self)), self._session.spent  # pyright: ignore[reportPrivateUsage] - for it alone
            if (outer := _calls.get(me)) is not None:
                raise RaystateError(
                    f"{name}() was called inside {outer}() of the same StateManager, by a signal handler or by code that {outer}() "
                    f"runs: {outer}() has not finished. Let a signal handler set a flag, and call {name}() from the loop"
                )
            try:
                _calls[me] = name
                with spent.span(cause):
                    return method(self, *args, **kwargs)
            finally:
                _calls.pop(me, None)

        return call

    return decorate
