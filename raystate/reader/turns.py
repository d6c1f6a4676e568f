"""Saves of one process to one place, one after the other in the order of their calls."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time

# Of all places, in the order of the calls. A list's own methods are atomic: a signal's handler may save at any moment, and a lock that
# its thread holds would end both.
_turns: list[Turn] = []


class Turn:
    """A save's place in the order of the calls that save to one place. Whoever makes one leaves it, however the save ends.

    Args:
        place: whatever names it; canonical.
    """

    def __init__(self, place: str):
        self._place = place
        self._thread: int | None = threading.get_ident()  # as long as the call is in it
        self._over = threading.Event()
        _turns.append(self)

    @property
    def is_nested(self) -> bool:
        """A signal's handler saves while its thread is in a save to the same place. That one can't go on meanwhile, so this one does
        not wait for it."""
        return any(one._thread == threading.get_ident() for one in self._before())

    @property
    def must_wait(self) -> bool:
        """Whether a save that was called before is under way."""
        return any(one._thread != threading.get_ident() for one in self._before())

    def wait(self, limit_s: float) -> bool:
        """Whether all saves that were called before are over, within `limit_s`."""
        deadline_s = time.monotonic() + limit_s
        return all(
            one._over.wait(max(0.0, deadline_s - time.monotonic()))
            for one in self._before()
            if one._thread != threading.get_ident()
        )

    def go_on_in_background(self) -> None:
        """The call ends, and the save does not."""
        self._thread = None

    def leave(self) -> None:
        """This save is over. May be called twice."""
        self._over.set()
        with contextlib.suppress(ValueError):
            _turns.remove(self)

    def _before(self) -> list[Turn]:
        earlier = itertools.takewhile(lambda one: one is not self, _turns.copy())
        return [one for one in earlier if one._place == self._place]


# What a fork copied is not under way in the child, and nobody would tell it when it is over.
os.register_at_fork(after_in_child=_turns.clear)
