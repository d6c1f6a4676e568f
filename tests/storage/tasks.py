"""Who carries out the slow commands of a process."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, Protocol


class Tasks(Protocol):
    """Who carries out slow commands, and when."""

    def spawn(self, call: Callable[[], None]) -> None: ...

    def step(self, wanted: Callable[[], bool]) -> bool:
        """Let some of it happen, until `wanted`; False if there is nothing under way."""
        ...


class OneByOne:
    """One after the other, each at once and whole.

    Args:
        chance: in whichever order it draws; None: first come, first served.
    """

    def __init__(self, chance: random.Random | None = None) -> None:
        self.chance = chance
        self.waiting: deque[Callable[[], None]] = deque()

    def spawn(self, call: Callable[[], None]) -> None:
        self.waiting.append(call)

    def step(self, wanted: Callable[[], bool]) -> bool:
        if not self.waiting:
            return False
        if self.chance is not None:
            self.waiting.rotate(self.chance.randrange(len(self.waiting)))
        self.waiting.popleft()()
        return True


class TaskExecutor(Executor):
    """Hands its work to `tasks`. What is no `Exception`, such as a process's death, is nobody's result: it ends whoever does the work."""

    def __init__(self, tasks: Tasks):
        self.tasks = tasks

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                result = fn(*args, **kwargs)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.tasks.spawn(run)
        return future
