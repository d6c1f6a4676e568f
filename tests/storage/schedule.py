"""Threads of which exactly one runs at a time: at each storage operation a seed decides who goes on, who sleeps, dies, or gets an error."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

from raystate.core.formats.errors import StorageError
from raystate.storage import Storage
from raystate.testing.storage import DiedError
from tests.storage.mortal import Mortal

NAPS = (3, 30, 300, 3000)  # turns that a process sleeps through


class Task:
    """One thread of a process. `until`: it has nothing to do before that."""

    __slots__ = ("go", "owner", "until")

    def __init__(self, owner: Actor):
        self.owner = owner
        self.go = threading.Semaphore(0)
        self.until: Callable[[], bool] | None = None


class Actor:
    """A process, as the scheduler sees it: asleep until a turn, or dead. It is what carries out its tasks (`tasks.Tasks`)."""

    def __init__(self, scheduler: Scheduler, name: str):
        self.scheduler = scheduler
        self.name = name
        self.wakes = 0
        self.dead = False
        self.active = 0  # slow commands under way

    def spawn(self, call: Callable[[], None]) -> None:
        self.active += 1

        def run() -> None:
            try:
                call()
            finally:
                self.active -= 1

        self.scheduler.spawn(self, run)

    def step(self, wanted: Callable[[], bool]) -> bool:
        if not self.active and not self.dead:
            return False
        self.scheduler.pause(lambda: self.dead or wanted() or not self.active)
        if self.dead:
            raise DiedError(f"{self.name} is dead")
        return True


class Scheduler:
    """Decides who does the next operation.

    Args:
        seed: of all its decisions.
        sleepy: how likely a process falls asleep before an operation.
        deadly: how likely it dies there.
        lossy: how likely an operation fails, and how likely only its answer is lost.
    """

    def __init__(self, seed: int, *, sleepy: float = 0.01, deadly: float = 0.0, lossy: float = 0.0):
        self.random = random.Random(seed)
        self.sleepy = sleepy
        self.deadly = deadly
        self.lossy = lossy
        self.turn = 0
        self.tasks: list[Task] = []
        self.failure: BaseException | None = None
        self._current: Task | None = None
        self._over = threading.Event()

    def spawn(self, owner: Actor, call: Callable[[], None]) -> None:
        """A new thread, which runs when it is chosen."""
        task = Task(owner)

        def run() -> None:
            task.go.acquire()
            try:
                if self.failure is None and not owner.dead:
                    call()
            except DiedError:
                pass
            except BaseException as error:
                self.failure = self.failure or error
            self.tasks.remove(task)
            if self.tasks:
                self._hand_over()
            else:
                self._over.set()

        self.tasks.append(task)
        threading.Thread(target=run, name=owner.name, daemon=True).start()

    def run(self, timeout_s: float = 100.0) -> None:
        """Until all threads are over. Raises what the first one raised that failed."""
        self._hand_over()
        if not self._over.wait(timeout_s):
            raise AssertionError(f"not over after {timeout_s} s and {self.turn} turns: {self._waiting()}")
        if self.failure is not None:
            raise self.failure

    def pause(self, until: Callable[[], bool] | None = None) -> None:
        """Let others go on; called by the thread that runs."""
        task = self._current
        assert task is not None
        task.until = until
        self._hand_over()
        task.go.acquire()
        if self.failure is not None:
            raise DiedError("the round is over: something has failed")

    def before_operation(self, owner: Actor) -> None:
        chance = self.random.random()
        if chance < self.deadly:
            owner.dead = True
        elif chance < self.deadly + self.sleepy:
            self.sleep(owner, self.random.choice(NAPS))
        self.pause()
        if owner.dead:
            raise DiedError(f"{owner.name} is dead")

    def sleep(self, owner: Actor, turns: int) -> None:
        """All of the process sleeps from its next operation on."""
        owner.wakes = self.turn + turns

    def _hand_over(self) -> None:
        self.turn += 1
        task = self._choose()
        task.until = None
        self._current = task
        task.go.release()

    def _choose(self) -> Task:
        if self.failure is not None:
            return self.tasks[0]
        able = [task for task in self.tasks if task.until is None or task.until()]
        if not able:
            self.failure = AssertionError(f"everybody waits: {self._waiting()}")
            return self.tasks[0]
        awake = [task for task in able if task.owner.wakes <= self.turn or task.owner.dead]
        if not awake:
            self.turn = min(task.owner.wakes for task in able)
            awake = [task for task in able if task.owner.wakes <= self.turn]
        return self.random.choice(awake)

    def _waiting(self) -> list[str]:
        return [task.owner.name for task in self.tasks]


class Scheduled(Mortal):
    """A process's way to storage under a scheduler: others may go first, before every operation.

    Args:
        inner: the storage.
        actor: the process.
        changed: called when an operation that changed something has taken place, before anybody else goes on.
        trusting: it is not asked whether the storage keeps what it promises.
    """

    def __init__(self, inner: Storage, actor: Actor, changed: Callable[[str, str], None], *, trusting: bool = False):
        super().__init__(inner)
        self.actor = actor
        self.changed = changed
        self.trusting = trusting

    def before(self, operation: str, name: str) -> None:
        self.actor.scheduler.before_operation(self.actor)
        self._fail(operation, name, "503 try again")

    def after(self, operation: str, name: str) -> None:
        try:
            self.changed(operation, name)
        except Exception as error:  # a finding, and no error of this operation, which its caller could try again
            self.actor.scheduler.failure = self.actor.scheduler.failure or error
            raise DiedError("the round is over: something is wrong") from error
        self._fail(operation, name, "connection reset")

    def _fail(self, operation: str, name: str, why: str) -> None:
        if self.actor.scheduler.random.random() < self.actor.scheduler.lossy:
            raise StorageError(f"{operation} {name} failed: {why}", operation=operation, path=name)

    def self_test(self) -> None:
        if not self.trusting:
            super().self_test()
