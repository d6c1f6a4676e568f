"""Saves of one process to one place, one after the other in the order of their calls."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

from raystate.waits import LOOK_EVERY_S

Given = TypeVar("Given")


# Of all places, in the order of the calls. No lock guards it, and all its changes are atomic: a
# signal's handler may save at any moment, and would wait for ever for a lock that its own thread
# holds.
_turns: list[weakref.ref[Turn]] = []


class Turn:
    """A save's place in the order of the calls that save to one place. Its maker leaves it when the
    save ends in any way; one that is dropped before is over, too.

    Args:
        place: its name; canonical.

    Attributes:
        is_nested: a signal's handler saves while its thread is in a save to the same place. That one can't go on meanwhile, so this one
            waits neither for it nor for those that wait for it.
    """

    def __init__(self, place: str):
        self._place = place
        self._thread: int | None = threading.get_ident()  # as long as the call is in it
        self._has_begun = False
        self._is_over = False
        self._until_over = threading.Lock()  # held until it is over
        self._until_over.acquire()
        me: weakref.ref[Turn] = weakref.ref(self, _remove)
        _turns.append(me)
        self._earlier: list[weakref.ref[Turn]] = []
        self.is_nested = False
        for one in _turns.copy():
            if one is me:
                break
            turn = one()
            if turn is None or turn._place != place:
                continue
            if turn._thread == self._thread:
                self.is_nested = True
                break
            self._earlier.append(one)
        self._me = me

    @property
    def must_wait(self) -> bool:
        """Whether a save that was called before is under way."""
        return any(not _is_over(one) for one in self._earlier)

    def wait(self, limit_s: float, *, begun_only: bool = False) -> bool:
        """Whether all saves that were called before, or those of them that have begun, are over within `limit_s`."""
        deadline_s = time.monotonic() + limit_s
        for one in self._earlier:
            while not _is_over(one) and (_has_begun(one) or not begun_only):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return False
                _rest(one, min(left_s, LOOK_EVERY_S))
        return True

    def begin(self) -> None:
        """This save waits for no other one any more."""
        self._has_begun = True

    @property
    def is_in_background(self) -> bool:
        """Whether the call has ended before the save."""
        return self._thread is None

    def go_on_in_background(self) -> None:
        """The call ends, and the save does not."""
        self._thread = None

    def leave(self) -> None:
        """This save is over. May be called twice."""
        self._is_over = True
        with contextlib.suppress(RuntimeError):
            self._until_over.release()
        _remove(self._me)


class Handed:
    """A save's task for another thread. It is called once, there; or it is taken back and never runs. Then its turns are over.

    Which of both comes first is known, also if the thread that gives it away is interrupted.

    Args:
        task: does the saving.
        turns: of the save; more may be added until it is given away.
    """

    def __init__(self, task: Callable[[], object], turns: list[Turn]):
        self._turns = turns
        self._left = [task]

    def __call__(self) -> None:
        if (task := self._take()) is not None:
            try:
                task()
            finally:
                self.end()

    def give(self, away: Callable[[], Given]) -> Given:
        """Give it away, by a function that has another thread call it. If that fails after it has begun, it goes on all the same."""
        try:
            given = away()
            self._go_on()
        except BaseException:
            if not self.take_back():
                self._go_on()  # this thread's next save waits for it
            raise
        return given

    def take_back(self) -> bool:
        """Whether it had not begun; then it never does."""
        if self._take() is None:
            return False
        self.end()
        return True

    def end(self) -> None:
        """The save is over."""
        for turn in self._turns:
            turn.leave()

    def _go_on(self) -> None:
        for turn in self._turns:
            turn.go_on_in_background()

    def _take(self) -> Callable[[], object] | None:
        """For the first who asks; what the task holds is let go with it."""
        try:
            return self._left.pop()  # atomic
        except IndexError:
            return None


def _is_over(one: weakref.ref[Turn]) -> bool:
    turn = one()
    return turn is None or turn._is_over


def _has_begun(one: weakref.ref[Turn]) -> bool:
    turn = one()
    return turn is not None and turn._has_begun


def _rest(one: weakref.ref[Turn], seconds: float) -> None:
    """Until it is over, at most so long."""
    turn = one()
    if turn is None:
        return
    lock = turn._until_over
    del turn  # it may be dropped
    if lock.acquire(timeout=seconds):
        with contextlib.suppress(RuntimeError):  # `leave` came once more
            lock.release()  # the next one that waits looks, too


def _remove(one: weakref.ref[Turn], turns: list[weakref.ref[Turn]] = _turns) -> None:
    try:  # without names of modules: the interpreter's end may have taken them
        turns.remove(one)
    except ValueError:
        pass


# Saves that a fork copied are not under way in the child, and it would never hear of their end.
os.register_at_fork(after_in_child=_turns.clear)
