"""One simulated process of a run: the real `CoordinatorLoop` over a storage, with made-up hosts, and without threads or Ray.

What carries the Coordinator's commands out is what does so in production. Its workers are `tasks.Tasks`: they do one thing at a time.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from fsspec.implementations.memory import MemoryFileSystem

from raystate.core.coordinator.machine import Coordinator
from raystate.core.formats.errors import error_from_name
from raystate.core.formats.messages import (
    Ask,
    CarriedOut,
    DeleteAsked,
    Event,
    Failure,
    FlushReply,
    HostId,
    Joined,
    JoinReply,
    RestoreAsked,
    RestoreChoice,
    RestoreSettled,
    RestoreTried,
    Settings,
    SnapshotId,
)
from raystate.observe.ledger.ledger import Ledger
from raystate.observe.record import Recorder
from raystate.runtime.coordinator.loop import CoordinatorLoop
from raystate.runtime.coordinator.storing import Workers
from raystate.storage import Storage
from raystate.storage.objects import ObjectStorage
from raystate.waits import ASKED_AGAIN_S
from tests.steps import keep_newest
from tests.storage.contents import HOSTS
from tests.storage.made_up import MadeUpHosts, MadeUpPackager
from tests.storage.tasks import OneByOne, TaskExecutor, Tasks

TICK_S = 2.0  # of the machine's own clock; nobody waits
PATIENCE_TICKS = 100

Reply = TypeVar("Reply")


class Witness(Protocol):
    """Hears what a process believes to be true."""

    def heard_durable(self, step: int, save: str | None) -> None: ...
    def heard_gone(self, step: int, save: str | None) -> None: ...


_ledgers: list[str] = []


def _place_of_a_ledger() -> str:
    """A new one. Those before it are removed: fsspec's memory looks at every object for each that is asked for."""
    while _ledgers:
        with contextlib.suppress(FileNotFoundError):
            MemoryFileSystem().rm(f"/{_ledgers.pop()}", recursive=True)
    _ledgers.append(f"ledger-{secrets.token_hex(8)}")
    return _ledgers[-1]


class _Loop(CoordinatorLoop):
    """Lets its process hear what is posted, right when it happens."""

    heard: Callable[[Event], None]

    def post(self, event: Event) -> None:
        self.heard(event)
        super().post(event)


class Process:
    """One attempt, from its claim to its death or its end.

    Args:
        storage: as this process sees it; it may fail, lose answers, or die (raise a BaseException and stay dead).
        name: for writer ids and host names; each process has its own.
        witness: hears what becomes durable and what is gone.
        is_dead: whether the process behind a log writer id is known to be dead.
        tasks: who carries out slow commands.
        keep_last: steps that retention keeps.
        recorder: hears of every event.
        known_hosts: that an attempt before it has left.
        known_attempt: an attempt that has claimed on its cluster.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        name: str,
        witness: Witness,
        is_dead: Callable[[str], bool] = lambda writer: False,
        tasks: Tasks | None = None,
        keep_last: int = 2,
        recorder: Recorder | None = None,
        known_hosts: tuple[HostId, ...] = (),
        known_attempt: int = 0,
    ):
        self.name = name
        self.witness = witness
        self.tasks: Tasks = tasks or OneByOne()
        workers = TaskExecutor(self.tasks)
        self.hosts = MadeUpHosts(name, storage, workers, self._post)
        self.loop = _Loop(
            settings=Settings(
                run="lm", storage=storage.url, replicas=0, host_timeout_s=1e6, idle_timeout_s=1e9, save_timeout_s=60.0
            ),
            keep=keep_newest(keep_last),
            storage=storage,
            hosts=self.hosts,
            known_hosts=known_hosts,
            known_attempt=known_attempt,
            writer=name,
            is_dead=is_dead,
            on_end=lambda reason: None,
            workers=Workers(build=workers, clean=workers, log=workers),
            packager=MadeUpPackager(),
            recorder=recorder,
            clock=lambda: self.now_s,
            wall_clock=lambda: 0.0,  # a log entry has the same length each time
        )
        # Threads that nobody here schedules write the ledger, and nothing that is checked depends on it: it has a place of its own.
        self.loop.observers.ledger = Ledger(ObjectStorage(f"memory://{_place_of_a_ledger()}"), self.loop.machine)
        self.loop.heard = self._heard
        self.news = False
        self.told: set[tuple[int, str | None]] = set()
        self.now_s = 0.0
        self.asked = 0
        self.lineage = ""

    @property
    def machine(self) -> Coordinator:
        return self.loop.machine

    # ---------------------------------------------------------------- what a run does

    def claim(self) -> None:
        """Become the newest attempt; then left-overs are removed, and what is open is finished, beside everything else.

        Raises:
            StorageError: this process is of no use then.
        """
        self.loop.claim()
        self._raise_failure()
        self._take_in()

    def join(self) -> None:
        """A worker group starts: one rank on each host, which have nothing in memory."""
        joined = [
            self._ask(Joined, group=f"{self.name}g", rank=rank, world=HOSTS, host=host) for rank, host in enumerate(self.hosts.ids)
        ]
        self.lineage = self._answer(joined[0], JoinReply).lineage
        self.hosts.word(self.lineage, -1)

    def restore(self, *, damaged: Collection[int] = (), **wanted: Any) -> int:
        """All ranks restore; those steps are found to be damaged in storage.

        Returns:
            the step, -1: the run has none.
        """
        asks = [self._ask(RestoreAsked, lineage=self.lineage, rank=rank, **wanted) for rank in range(HOSTS)]
        while True:
            choice = self._answer(asks[0], RestoreChoice)
            tried: dict[str, Any] = {"ok": True} if choice.step not in damaged else {"ok": False, "error": "checksum"}
            tried |= {"step": choice.step, "begins": choice.begins}
            asks = [self._ask(RestoreTried, lineage=self.lineage, rank=rank, **tried) for rank in range(HOSTS)]
            if tried["ok"]:
                settled = self._answer(asks[0], RestoreSettled)
                self.lineage = choice.begins
                self.hosts.word(self.lineage, choice.step)
                return settled.step

    def save(self, step: int) -> bool:
        """All ranks have staged the step and promised it. True once it is durable; False if it will not be."""
        self.hosts.stage(self.lineage, step)
        key = SnapshotId(self.lineage, step)
        self._until(f"the save of step {step}", lambda: step in self.machine.journal.published or key in self.machine.saves.failed)
        return step in self.machine.journal.published

    def delete(self, step: int) -> None:
        self._answer(self._ask(DeleteAsked, step=step), FlushReply)

    def look_for_dead(self) -> None:
        """So much time passes that it looks whether somebody has said that the process of an older attempt is gone."""
        self.now_s += ASKED_AGAIN_S

    def settle(self) -> None:
        """Until everything decided is carried out and logged."""
        journal = self.machine.journal
        self._until("rest", lambda: not (journal.working or journal.closable or journal.busy))

    # ---------------------------------------------------------------- events and time

    def _post(self, event: Event) -> None:
        self.loop.post(event)

    def _ask(self, kind: type[Any], **fields: Any) -> Future[Any]:
        self.asked += 1
        return self.loop.ask(kind(ask=Ask(f"{self.name}q{self.asked}"), **fields))

    def _answer(self, ask: Future[Any], kind: type[Reply]) -> Reply:
        self._until(f"a {kind.__name__}", ask.done)
        reply = ask.result()
        if isinstance(reply, Failure):
            raise error_from_name(reply.error, reply.message, reply.details)
        if not isinstance(reply, kind):
            raise AssertionError(f"{self.name}: {kind.__name__} was expected, not {reply}")
        return reply

    def _raise_failure(self) -> None:
        if (failed := self.loop.failed) is not None:
            raise error_from_name(failed.error, failed.message, failed.details)

    def _until(self, what: str, done: Callable[[], bool]) -> None:
        """Let things happen, and time pass, until `done`.

        Raises:
            StaleAttemptError: the machine has ended, superseded.
        """
        for _ in range(PATIENCE_TICKS):
            self._run()
            if done():
                return
            self._raise_failure()
            self.now_s += TICK_S
        raise AssertionError(f"{self.name} waits for {what} for ever: {self.machine.story()} {self.machine.journal.troubles}")

    def _run(self) -> None:
        """Until nothing is under way."""
        while True:
            self._take_in()
            if not self.tasks.step(lambda: self.news) and not self.news:
                return

    def _take_in(self) -> None:
        while self.loop.turn():
            self._tell()
        self.news = False

    # ---------------------------------------------------------------- what it believes

    def _tell(self) -> None:
        journal = self.machine.journal
        if journal.tail is None:
            return
        saves = {one.step: one.save for one in journal.tail.live}
        for step in journal.published:
            if (step, saves[step]) not in self.told:
                self.told.add((step, saves[step]))
                self.witness.heard_durable(step, saves[step])

    def _heard(self, event: Event) -> None:
        self.news = True
        if isinstance(event, CarriedOut) and event.intent.kind == "retire" and not event.error:
            if event.intent.step in self.machine.journal.retiring:
                self.witness.heard_gone(event.intent.step, event.intent.save)
