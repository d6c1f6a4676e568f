"""How far a transfer is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""What goes on ("writing", "verifying"), bytes done, bytes in all."""


def ignore(_what: str, _done: int, _total: int) -> None:
    """Show no progress."""


class Tally:
    """Adds up the bytes of each phase and tells them.

    Args:
        progress: is told.
        total: bytes of each phase.
    """

    def __init__(self, progress: Progress, total: int):
        self._progress = progress
        self._total = total
        self._done: dict[str, int] = {}

    def writing(self, nbytes: int) -> None:
        """So many more bytes are written."""
        self._add("writing", nbytes)

    def verifying(self, nbytes: int) -> None:
        """So many more bytes were read back."""
        self._add("verifying", nbytes)

    def _add(self, what: str, nbytes: int) -> None:
        self._done[what] = self._done.get(what, 0) + nbytes
        self._progress(what, min(self._done[what], self._total), self._total)
