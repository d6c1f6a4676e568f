"""A storage in whose use something else comes between: a signal's handler, or another process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Generic, TypeVar

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
