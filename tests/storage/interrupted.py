"""Something else comes between: a signal's handler or another process in the use of a storage, or a failure of one call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import pytest

from raystate.core.formats.errors import StorageError
from raystate.storage import Storage, StorageWrapper

Result = TypeVar("Result")


class Interrupted(StorageWrapper, Generic[Result]):
    """`act` is called once, before or after the nth operation; then `raises`, if it is given.

    Attributes:
        came: whether it was.
        got: what it has returned; None if it was refused, as it may be in the midst of something.
    """

    def __init__(
        self, inner: Storage, nth: int, when: str, act: Callable[[Storage], Result], *, raises: BaseException | None = None
    ):
        super().__init__(inner)
        self._left = nth
        self._when = when
        self._act = act
        self._raises = raises
        self.got: Result | None = None

    @property
    def came(self) -> bool:
        return self._left < 0

    def before(self, operation: str, name: str) -> None:
        if self._when == "before":
            self._look()

    def after(self, operation: str, name: str) -> None:
        if self._when == "after":
            self._look()

    def _look(self) -> None:
        self._left -= 1
        if self._left == -1:
            with contextlib.suppress(StorageError):
                self.got = self._act(self.inner)
            if self._raises is not None:
                raise self._raises


class Failing:
    """From the nth call of these functions on, all fail, or so many; before or after they did their work.

    Args:
        functions: (owner, name) of each.
        lasting: so many fail.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, functions: Sequence[tuple[Any, str]], nth: int, error: BaseException,
        *, after: bool, lasting: int = 1,
    ):  # fmt: skip
        self.left = nth
        self._error, self._after, self._lasting = error, after, lasting
        for owner, name in functions:
            patch.setattr(owner, name, self._failing(getattr(owner, name)))

    def _failing(self, whole: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **rest: Any) -> Any:
            self.left -= 1
            if -self._lasting <= self.left < 0:
                if self._after and self.left == -1:
                    whole(*arguments, **rest)
                raise self._error
            return whole(*arguments, **rest)

        return call
