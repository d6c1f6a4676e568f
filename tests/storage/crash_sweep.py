"""The histories whose every operation is struck, and what a run does after a strike."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from raystate.core.formats.errors import StaleAttemptError, StorageError
from raystate.storage import Storage, collect_garbage
from raystate.testing.storage import DiedError
from tests.sim.storage import Violation
from tests.storage.harness import Process
from tests.storage.mortal import Fault, Mortal, Operation
from tests.storage.tasks import OneByOne
from tests.storage.truth import Truth


class World:
    """One storage, the truth about it, and the processes that come one after the other.

    Args:
        storage: empty.
        tell_dead: whether a process that has died is known to be dead, as Ray knows it, or may wake up for all that anybody knows.
        order: seed of the order in which slow commands are carried out; 0: first come, first served.
    """

    def __init__(self, storage: Storage, *, tell_dead: bool = True, order: int = 0):
        self.storage = storage
        self.truth = Truth(storage)
        self.tell_dead = tell_dead
        self.order = order
        self.processes: list[Process] = []

    def begin(self, storage: Storage | None = None) -> Process:
        """A process that has claimed the run, and whose worker group has joined."""
        for _ in range(2):
            name = f"p{len(self.processes)}"
            process = Process(
                storage or Mortal(self.storage),
                name=name,
                witness=self.truth,
                is_dead=lambda _: self.tell_dead,  # only one lives at a time
                tasks=OneByOne(random.Random(f"{self.order} {name}") if self.order else None),
            )
            self.processes.append(process)
            try:
                process.claim()
            except StorageError:
                continue  # storage failed: the next one is started
            process.join()
            return process
        raise AssertionError("storage failed twice, one fault was asked for")


def _trained(world: World, *steps: int) -> None:
    """An earlier process, which ended in good order."""
    process = world.begin()
    process.restore()
    for step in steps:
        assert process.save(step)
    process.settle()


class Doomed(Mortal):
    """Dies right after the first operation of a kind on a name that has `part` in it."""

    def __init__(self, inner: Storage, kind: str, part: str):
        super().__init__(inner)
        self.doom = kind, part

    def before(self, operation: str, name: str) -> None:
        if self.fault is None and operation == self.doom[0] and self.doom[1] in name:
            self.fault = Fault(nth=len(self.operations), how="after")


def _dying(world: World, kind: str, part: str, *steps: int) -> None:
    """An earlier process, which died."""
    process = world.begin(Doomed(world.storage, kind, part))
    process.restore()
    try:
        for step in steps:
            process.save(step)
    except DiedError:
        return
    raise AssertionError(f"nobody died: there was no {kind} of {part}")


def _save(world: World, storage: Storage) -> None:
    """Three saves by three hosts; the last one retires the first."""
    process = world.begin(storage)
    process.restore()
    for step in (10, 20, 30):
        process.save(step)
    process.settle()


def _set_aside(world: World, storage: Storage) -> None:
    """The newest step turns out to be damaged; its number is saved again."""
    process = world.begin(storage)
    process.restore(damaged={20})
    process.save(20)
    process.settle()


def _roll_back(world: World, storage: Storage) -> None:
    """Newer steps are given up, one of their numbers is saved again, an older step is deleted."""
    process = world.begin(storage)
    process.restore(step=10, rollback=True)
    process.save(20)
    process.delete(10)
    process.settle()


def _take_over(world: World, storage: Storage) -> None:
    """A commit and a retirement are open."""
    process = world.begin(storage)
    process.restore()
    process.settle()


def _collect(world: World, storage: Storage) -> None:
    """Work that was never committed lies about, and one of its steps is saved again meanwhile."""
    process = world.begin(storage)
    process.restore()
    process.settle()


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """`act` is what is struck; `before` has gone well, or as badly as it says."""

    act: Callable[[World, Storage], None]
    before: Callable[[World], None] = lambda world: None
    live: tuple[int, ...]  # steps at the end


HISTORIES = {
    "save": History(act=_save, live=(20, 30)),
    "set aside": History(act=_set_aside, before=lambda world: _trained(world, 10, 20), live=(10, 20)),
    "rollback": History(act=_roll_back, before=lambda world: _trained(world, 10, 20), live=(20,)),
    # Entry 1 is the claim, 2 to 4 are the commits.
    "takeover": History(
        act=_take_over, before=lambda world: _dying(world, "create", "log/000000000004", 10, 20, 30), live=(20, 30)
    ),
    "garbage": History(act=_collect, before=lambda world: _dying(world, "create", "steps/20.", 10, 20), live=(10,)),
}


def record(history: History, storage: Storage, *, tell_dead: bool = True, order: int = 0) -> list[Operation]:
    """The operations of an undisturbed process."""
    world = World(storage, tell_dead=tell_dead, order=order)
    history.before(world)
    mortal = Mortal(storage)
    history.act(world, mortal)
    world.truth.check_clean()
    assert not tell_dead or _live(world) == history.live
    return mortal.operations


def faults(operations: list[Operation]) -> Iterator[Fault]:
    """All that can happen at each of them."""
    for nth, operation in enumerate(operations):
        for how in ("before", *(f"half {one}" for one in range(operation.halves)), "after", "lost", "beside"):
            yield Fault(nth=nth, how=how)


def representatives(operations: list[Operation]) -> Iterator[Fault]:
    """Of the faults that leave the same storage behind one: dying before or after a look is dying before the next change."""
    for fault in faults(operations):
        looks, last = operations[fault.nth].looks, fault.nth + 1 == len(operations)
        if fault.how in ("before", "beside"):
            if not looks:
                yield fault
        elif fault.how != "after" or last:
            yield fault


def strike(history: History, storage: Storage, fault: Fault, *, tell_dead: bool = True, order: int = 0) -> None:
    """Play a history on an empty storage up to a fault and beyond: what is there right then, after a restart, and after that one's save.

    Raises:
        Violation: an invariant does not hold.
    """
    world = World(storage, tell_dead=tell_dead, order=order)
    history.before(world)
    mortal = Mortal(storage, fault, meanwhile=lambda: collect_garbage(storage))
    try:
        history.act(world, mortal)
    except DiedError:
        if mortal.found is not None:
            raise mortal.found from None
    if len(mortal.operations) <= fault.nth:
        raise LookupError(f"{fault} was never reached")
    world.truth.check()
    if not fault.deadly and tell_dead and _live(world) != history.live:
        raise Violation(f"it came to {_live(world)} instead of {history.live}")
    restart(world)


def overtake(history: History, storage: Storage, nth: int, *, order: int = 0) -> None:
    """Somebody else claims the run while its process sleeps before an operation, lives a whole life, and is there when it wakes up.

    Raises:
        Violation: an invariant does not hold.
    """
    world = World(storage, tell_dead=False, order=order)
    history.before(world)

    def meanwhile() -> None:
        world.truth.check()
        other = world.begin()
        step = other.restore() // 10 * 10 + 10
        while not other.save(step):
            step += 10
        other.settle()
        world.truth.check()

    mortal = Mortal(storage, Fault(nth=nth, how="beside"), meanwhile)
    sleeper = len(world.processes)
    try:
        history.act(world, mortal)
        process = world.processes[sleeper]
        process.save(1000)
    except StaleAttemptError:
        pass
    except DiedError:
        assert mortal.found is not None
        raise mortal.found from None
    else:
        raise Violation(f"one writer: {process.name}, attempt {process.machine.attempt}, goes on: {_live(world)}")
    world.truth.check()
    world.tell_dead = True
    world.begin().settle()
    restart(world)


def restart(world: World) -> None:
    """A new process finds everything, finishes and cleans up, and goes on."""
    newest = max(_live(world), default=-1)
    process = world.begin()
    if (restored := process.restore()) != newest:
        raise Violation(f"forward only: step {restored} is restored, {newest} was committed")
    process.settle()
    world.truth.check_clean()
    step = restored // 10 * 10 + 10
    while not process.save(step):
        if world.tell_dead or "is open, and its process may still be alive" not in "".join(process.machine.journal.troubles):
            raise Violation(f"step {step} can't be saved after a restart: {process.machine.journal.troubles}")
        step += 10  # somebody may still be about to remove a step of that number
    process.settle()
    world.truth.check_clean()


def _live(world: World) -> tuple[int, ...]:
    tail = world.truth.tail
    return () if tail is None else tuple(one.step for one in tail.live)
