"""The trainers at a HostActor's door, served by one thread."""

from __future__ import annotations

import logging
import selectors
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from raystate.runtime.host.doorbell import Caller, Door, Hello, Waker

logger = logging.getLogger("raystate.host")


class Parting(Protocol):
    """Called when a connection has ended. `said_bye`: its trainer has detached on purpose."""

    def __call__(self, connection: int, hello: Hello | None, *, said_bye: bool) -> None: ...


class Callers:
    """Lets trainers in, and hears what they say and how they end.

    Args:
        folder: where the door is.
        meet: called with (connection, pid, hello) when a trainer says who it is.
        part: see `Parting`.
    """

    def __init__(self, folder: Path, meet: Callable[[int, int, Hello], None], part: Parting):
        self._meet = meet
        self._part = part
        self._callers: dict[int, Caller] = {}  # by file descriptor
        self._door = Door(folder)
        self._waker = Waker()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._door, selectors.EVENT_READ)
        self._selector.register(self._waker, selectors.EVENT_READ)

    def __len__(self) -> int:
        return len(self._callers)

    @property
    def door(self) -> Path:
        """The socket's file."""
        return self._door.path

    def wake(self) -> None:
        """Let `wait` return, from any thread."""
        self._waker.wake()

    def wait(self, timeout_s: float) -> list[Any]:
        """Who has something to say, after at most `timeout_s`: for `serve`."""
        return [key.fileobj for key, _ in self._selector.select(timeout_s)]

    def serve(self, ready: list[Any]) -> None:
        for source in ready:
            if source is self._waker:
                self._waker.clear()
            elif source is not self._door:
                self._hear(source)
            elif (caller := self._door.accept()) is not None:
                self._callers[caller.fileno()] = caller
                self._selector.register(caller, selectors.EVENT_READ)

    def hear_ends(self) -> None:
        """Hear of the callers whose end the kernel knows, before anything is decided."""
        for caller in list(self._callers.values()):
            while caller.fileno() in self._callers and caller.has_hung_up():
                self._hear(caller)

    def _hear(self, caller: Caller) -> None:
        before = caller.hello
        number = caller.fileno()
        if number not in self._callers:
            return  # it has ended since it was ready
        goes_on = caller.read()
        if caller.hello is not None and caller.hello is not before:
            self._meet(number, caller.pid, caller.hello)
        if goes_on:
            return
        if caller.trouble:
            logger.warning("%s", caller.trouble)
        self._selector.unregister(caller)
        del self._callers[number]
        self._part(number, caller.hello, said_bye=caller.said_bye)
        caller.close()

    def close(self) -> None:
        for caller in self._callers.values():
            caller.close()
        self._selector.close()
        self._door.close()
        self._waker.close()
