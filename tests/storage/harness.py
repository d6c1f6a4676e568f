"""One simulated process of a run: core's machine, and every command carried out against a storage at once, without threads or Ray.

It does what `CoordinatorService` does, and what its three hosts would do: their reports are made up, their array data are small objects
under writers' names whose bytes follow from their names.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Protocol, TypeVar

from raystate.core.coordinator import Coordinator
from raystate.core.errors import StaleAttemptError, StorageError, error_from_name
from raystate.core.log import claim_entry
from raystate.core.messages import (
    Advise,
    Answer,
    Append,
    Appended,
    Ask,
    AttemptDead,
    BuildPackage,
    Claimed,
    Command,
    DeleteAsked,
    Discard,
    EndTrainers,
    Event,
    Failure,
    Finish,
    FlushReply,
    HostId,
    HostReported,
    HostSummary,
    HostUp,
    Invalidate,
    Invalidated,
    Joined,
    JoinReply,
    LiveStep,
    Log,
    LogEntry,
    Packaged,
    Publish,
    PublishDone,
    RestoreAsked,
    RestoreChoice,
    RestoreSettled,
    RestoreTried,
    Retire,
    RetireDone,
    Settings,
    SnapshotId,
    Staged,
    Superseded,
    Tick,
    TrainerSeen,
    Write,
    Written,
)
from raystate.core.retention import keep_newest
from raystate.core.tree import Package
from raystate.storage import RunLog, StepFolder, Storage, assumed_dead, collect_garbage, data_objects, foreign_steps, pinned_steps
from raystate.storage.names import writer_name
from tests.storage.contents import HOSTS, PARTS, fixed_files, payload
from tests.storage.tasks import OneByOne, Tasks

TICK_S = 2.0  # of the machine's own clock; nobody waits
PATIENCE_TICKS = 100

Reply = TypeVar("Reply")


class Witness(Protocol):
    """Hears what a process believes to be true."""

    def heard_durable(self, step: int, save: str | None) -> None: ...
    def heard_gone(self, step: int, save: str | None) -> None: ...


class Process:
    """One attempt, from its claim to its death or its end.

    Args:
        storage: as this process sees it; it may fail, lose answers, or die (raise a BaseException and stay dead).
        name: for writer ids and host names; each process has its own.
        witness: hears what becomes durable and what is gone.
        is_dead: whether the process behind a log writer id is known to be dead.
        tasks: who carries out slow commands.
        keep_last: steps that retention keeps.
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
    ):
        settings = Settings(run="lm", storage=storage.url, host_timeout_s=1e6, idle_timeout_s=1e9, save_timeout_s=60.0)
        self.storage = storage
        self.name = name
        self.witness = witness
        self.is_dead = is_dead
        self.tasks: Tasks = tasks or OneByOne()
        self.machine = Coordinator(settings)
        self.keep = keep_newest(keep_last)
        self.log = RunLog(storage)
        self.inbox: deque[Event] = deque()
        self.answers: dict[Ask, Any] = {}
        self.packages: dict[str, Package] = {}
        self.superseded: Superseded | None = None
        self.told: set[tuple[int, str | None]] = set()
        self.now_s = 0.0
        self.asked = 0
        self.hosts = [HostId(f"{name}host{index}") for index in range(HOSTS)]
        self.staged: dict[HostId, tuple[Staged, ...]] = {}
        self.seen: dict[HostId, TrainerSeen] = {}
        self.sequence: dict[HostId, int] = {}
        self.lineage = ""

    # ---------------------------------------------------------------- what a run does

    def claim(self) -> None:
        """Become the newest attempt; then left-overs are removed, and what is open is finished, beside everything else.

        Raises:
            StorageError: as the real one, this process is of no use then.
        """
        self.storage.self_test()
        dead: list[int] = []

        def entry_after(tail: LogEntry | None) -> LogEntry:
            gone = {tail.attempt} if tail is not None and self.is_dead(tail.writer) else set[int]()
            dead[:] = sorted(gone | set(assumed_dead(self.storage)))
            live = () if tail is None else tuple(one.step for one in tail.live)
            return claim_entry(tail, self.name, "lm", foreign_steps(self.storage, live), dead=dead)

        entry = self.log.claim(entry_after)
        self.post(Claimed(entry=entry, dead=tuple(dead)))
        self._take_in()
        self.tasks.spawn(functools.partial(self._collect_garbage, entry))

    def join(self) -> None:
        """A worker group starts: one rank on each host, which have nothing in memory."""
        for host in self.hosts:
            self.post(HostUp(host=host, incarnation=host))
            self._report(host)
        joined = [
            self._ask(Joined, group=f"{self.name}g", rank=rank, world=HOSTS, host=host, nonce=f"{self.name}{rank}")
            for rank, host in enumerate(self.hosts)
        ]
        self.lineage = self._answer(joined[0], JoinReply).lineage
        self._word(-1)

    def restore(self, *, damaged: Collection[int] = (), **wanted: Any) -> int:
        """All ranks restore; those steps are found to be damaged in storage.

        Returns:
            the step, -1: the run has none.
        """
        asks = [self._ask(RestoreAsked, lineage=self.lineage, rank=rank, **wanted) for rank in range(HOSTS)]
        while True:
            choice = self._answer(asks[0], RestoreChoice)
            self.lineage = choice.begins
            self._word(choice.step)
            tried: dict[str, Any] = {"ok": True} if choice.step not in damaged else {"ok": False, "error": "checksum"}
            asks = [self._ask(RestoreTried, lineage=self.lineage, rank=rank, step=choice.step, **tried) for rank in range(HOSTS)]
            if tried["ok"]:
                return self._answer(asks[0], RestoreSettled).step

    def save(self, step: int) -> bool:
        """All ranks have staged the step and promised it. True once it is durable; False if it will not be."""
        for rank, host in enumerate(self.hosts):
            piece = Staged(rank=rank, world=HOSTS, lineage=self.lineage, step=step, layout="l", promised=True)
            self.staged[host] = (*self.staged.get(host, ())[-1:], piece)
        self._word(step)
        key = SnapshotId(self.lineage, step)
        self._until(f"the save of step {step}", lambda: step in self.machine.journal.published or key in self.machine.saves.failed)
        return step in self.machine.journal.published

    def delete(self, step: int) -> None:
        self._answer(self._ask(DeleteAsked, step=step), FlushReply)

    def look_for_dead(self) -> None:
        """Somebody may have said that the process of an older attempt is gone."""
        if self.machine.held_by:
            self.tasks.spawn(self._look_for_dead)

    def settle(self) -> None:
        """Until everything decided is carried out and logged."""
        journal = self.machine.journal
        self._until("rest", lambda: not (journal.working or journal.closable or journal.busy))

    # ---------------------------------------------------------------- events and time

    def post(self, event: Event) -> None:
        self.inbox.append(event)

    def _ask(self, kind: type[Any], **fields: Any) -> Ask:
        self.asked += 1
        ask = Ask(f"{self.name}q{self.asked}")
        self.post(kind(ask=ask, **fields))
        return ask

    def _answer(self, ask: Ask, kind: type[Reply]) -> Reply:
        self._until(f"the answer to {ask}", lambda: ask in self.answers)
        reply = self.answers.pop(ask)
        if isinstance(reply, Failure):
            raise error_from_name(reply.error, reply.message, reply.details)
        if not isinstance(reply, kind):
            raise AssertionError(f"{self.name}: {kind.__name__} was expected, not {reply}")
        return reply

    def _until(self, what: str, done: Callable[[], bool]) -> None:
        """Let things happen, and time pass, until `done`.

        Raises:
            StaleAttemptError: the machine has ended, superseded.
        """
        for _ in range(PATIENCE_TICKS):
            self._run()
            if done():
                return
            if self.superseded is not None:
                raise StaleAttemptError(self.superseded.reason, by_attempt=self.superseded.by_attempt)
            self.now_s += TICK_S
            self.post(Tick())
        raise AssertionError(f"{self.name} waits for {what} for ever: {self.machine.journal.troubles}")

    def _run(self) -> None:
        """Until nothing is under way."""
        while True:
            self._take_in()
            if not self.tasks.step(lambda: bool(self.inbox)) and not self.inbox:
                return

    def _take_in(self) -> None:
        while self.inbox:
            for command in self.machine.handle(self.inbox.popleft(), self.now_s):
                self._execute(command)
            self._tell()

    def _tell(self) -> None:
        journal = self.machine.journal
        if journal.tail is None:
            return
        saves = {one.step: one.save for one in journal.tail.live}
        for step in journal.published:
            if (step, saves[step]) not in self.told:
                self.told.add((step, saves[step]))
                self.witness.heard_durable(step, saves[step])

    # ---------------------------------------------------------------- commands

    def _execute(self, command: Command) -> None:
        match command:
            case Answer(ask=ask, reply=reply):
                self.answers[ask] = reply
            case Advise(host=host):
                self._report(host)
            case Invalidate():
                self._invalidate(command)
            case Write():
                self.tasks.spawn(functools.partial(self._write, command))
            case BuildPackage():
                self.tasks.spawn(functools.partial(self._build, command))
            case Append(entry=entry):
                self.tasks.spawn(functools.partial(self._append, entry))
            case Publish():
                self.tasks.spawn(functools.partial(self._publish, command))
            case Retire():
                self.tasks.spawn(functools.partial(self._retire, command))
            case Discard():
                self.tasks.spawn(functools.partial(self._discard, command))
            case Superseded():
                self.superseded = command
            case Finish() | EndTrainers() | Log():
                pass

    def _invalidate(self, command: Invalidate) -> None:
        self.staged[command.host] = tuple(
            one
            for one in self.staged.get(command.host, ())
            if one.lineage == command.by or (one.lineage == command.lineage and one.step <= command.step)
        )
        self.post(Invalidated(host=command.host, lineage=command.lineage, step=command.step))

    def _write(self, command: Write) -> None:
        index = self.hosts.index(command.host)
        writer = writer_name(command.save, index)
        prefix = StepFolder(self.storage, command.step, command.save).write_prefix
        error = ""
        try:
            for part in range(PARTS[index]):
                name = f"state/ocdbt.process_{writer}/d/{part}"
                self.storage.create(f"{prefix}/{name}", payload(command.step, command.save, name))
        except StorageError as caught:
            error = caught.message
        self.post(Written(host=command.host, save=command.save, error=error))

    def _build(self, command: BuildPackage) -> None:
        error, save, step = "", command.save, command.step
        try:
            folder = StepFolder(self.storage, step, save)
            merged = f"state/d/{writer_name(save, 'm0')}"
            self.storage.create(f"{folder.write_prefix}/{merged}", payload(step, save, merged))
            objects = data_objects(self.storage, folder.write_prefix, "state/d", writer=writer_name(save, "c"), begin=f"{save}hm")
            for host in command.hosts:
                writer = writer_name(save, self.hosts.index(host))
                objects += data_objects(self.storage, folder.write_prefix, f"state/ocdbt.process_{writer}", writer=writer)
            if len(objects) != sum(PARTS) + 1:
                raise StorageError(f"{len(objects)} objects of save {save} are listed")
            package = Package(step=step, save=save, run="lm", files=fixed_files(step, save), objects=tuple(objects))
            folder.assemble(package)
            folder.put_package(package)
            self.packages[save] = package
        except StorageError as caught:
            error = caught.message
        kept = self.keep([*command.live, LiveStep(step=step, save=save)])
        self.post(Packaged(save=save, kept=tuple(kept), error=error))

    def _append(self, entry: LogEntry) -> None:
        try:
            outcome = self.log.append(dataclasses.replace(entry, writer=self.name))
        except Exception as caught:
            outcome = Appended(seq=entry.seq, outcome="failed", error=str(caught))
        self.post(outcome)

    def _publish(self, command: Publish) -> None:
        error = ""
        try:
            folder = StepFolder(self.storage, command.step, command.save)
            folder.publish(self.packages.get(command.save) or folder.read_package())
        except StorageError as caught:
            error = caught.message
        self.post(PublishDone(step=command.step, save=command.save, error=error))

    def _retire(self, command: Retire) -> None:
        error = pinned = ""
        try:
            pinned = "" if command.aside else pinned_steps(self.storage).get(command.step, "")
            if not pinned:
                StepFolder(self.storage, command.step, command.save).retire(aside=command.aside)
                self.witness.heard_gone(command.step, command.save)
        except StorageError as caught:
            error = caught.message
        self.post(RetireDone(step=command.step, error=error, pinned=pinned))

    def _discard(self, command: Discard) -> None:
        try:
            StepFolder(self.storage, command.step, command.save).discard()
        except StorageError:
            pass  # for the next start

    def _collect_garbage(self, entry: LogEntry) -> None:
        try:
            collect_garbage(self.storage, {one.save for one in (*entry.live, *entry.intents) if one.save})
        except StorageError:
            pass  # for the next start

    def _look_for_dead(self) -> None:
        try:
            for attempt in assumed_dead(self.storage):
                self.post(AttemptDead(attempt=attempt))
        except StorageError:
            pass  # next time

    # ---------------------------------------------------------------- hosts

    def _word(self, newest: int) -> None:
        """What the trainers' words say, reported by all hosts."""
        for rank, host in enumerate(self.hosts):
            self.seen[host] = TrainerSeen(rank=rank, world=HOSTS, lineage=self.lineage, newest_step=newest)
        for host in self.hosts:
            self._report(host)

    def _report(self, host: HostId) -> None:
        self.sequence[host] = self.sequence.get(host, 0) + 1
        trainers = (self.seen[host],) if host in self.seen else ()
        summary = HostSummary(
            host=host, incarnation=host, seq=self.sequence[host], staged=self.staged.get(host, ()), trainers=trainers
        )
        self.post(HostReported(summary=summary))
