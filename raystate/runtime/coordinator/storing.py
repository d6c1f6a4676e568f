"""The Coordinator's slow work on storage: each command is carried out by a worker, and its outcome comes back as an event.

Nothing here decides. An error is an outcome like any other; only what is no `Exception` ends a worker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, assert_never

from raystate.core.coordinator.retention import Keep
from raystate.core.formats.entries import own_commits
from raystate.core.formats.errors import ConfigError, CorruptCheckpointError, StorageError
from raystate.core.formats.log import claim_entry, live_steps
from raystate.core.formats.messages import (
    Append,
    Appended,
    AttemptDead,
    BuildPackage,
    CarriedOut,
    CarryOut,
    Discard,
    Event,
    HostId,
    Intent,
    LiveStep,
    LogEntry,
    Packaged,
    SaveId,
    Write,
    Written,
)
from raystate.core.formats.tree import Package
from raystate.inspection.run_metadata import put_run_metadata
from raystate.machine import fault_points
from raystate.machine.priority import give_way
from raystate.runtime.coordinator.one_storage import Claim
from raystate.runtime.coordinator.packaging import Packager
from raystate.runtime.link import Unreachable
from raystate.storage import LogGoneError, RunLog, StepFolder, Storage, assumed_dead, collect_garbage, foreign_steps
from raystate.storage.foreign import is_run
from raystate.storage.log_reader import FIRST
from raystate.storage.names import STATE, package_name

logger = logging.getLogger("raystate.coordinator")


Slow = BuildPackage | Append | CarryOut | Discard


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """What runs the slow commands.

    Attributes:
        build: packages and publications.
        clean: removals, apart, so that a save never waits for a deletion.
        log: entries of the log, one at a time.
    """

    build: Executor
    clean: Executor
    log: Executor

    @classmethod
    def threads(cls) -> Workers:
        return cls(
            build=ThreadPoolExecutor(max_workers=8, thread_name_prefix="raystate-work", initializer=give_way),
            clean=ThreadPoolExecutor(max_workers=2, thread_name_prefix="raystate-clean", initializer=give_way),
            log=ThreadPoolExecutor(max_workers=1, thread_name_prefix="raystate-log"),
        )

    def shutdown(self) -> None:
        """Wait for what is under way."""
        for executor in (self.log, self.build, self.clean):
            executor.shutdown(wait=True)


class Storing:
    """Carries slow commands out.

    Args:
        run: its name, for log entries and packages.
        storage: where the run's log and steps are.
        writer: random id of this process, for the log.
        keep: the retention policy; called by a worker, since it may be slow or a user's.
        packager: makes the packages.
        workers: who does the work.
        post: takes the events that come of it, from any thread.
        wall_clock: seconds since 1970: when a step was saved.
        run_metadata: of the whole run, to be written down with its first step; None: nothing.
    """

    def __init__(
        self,
        *,
        run: str,
        storage: Storage,
        writer: str,
        keep: Keep,
        packager: Packager,
        workers: Workers,
        post: Callable[[Event], None],
        wall_clock: Callable[[], float],
        run_metadata: Mapping[str, Any] | None = None,
    ):
        self._run_metadata = run_metadata
        self._run = run
        self._storage = storage
        self._writer = writer
        self._keep = keep
        self._packager = packager
        self._workers = workers
        self._post = post
        self._wall_clock = wall_clock
        self._log = RunLog(storage)
        self._parts: dict[str, dict[HostId, Any]] = {}
        self._packages: dict[str, Package] = {}
        self._given_up: set[str] = set()  # saves; hosts that were told to write may still do so
        self._discarding: set[str] = set()  # of these: what is there when it begins will be removed

    # ------------------------------------------------------------ the claim

    def claim(self, is_dead: Callable[[str], bool], *, known_attempt: int = 0) -> tuple[LogEntry, tuple[int, ...]]:
        """Become the newest attempt, at once.

        Args:
            is_dead: tells whether the process behind a log writer id is known to be dead.
            known_attempt: has claimed; 0: none is known.

        Returns:
            The claim's entry, and the attempts whose processes are known to be dead.

        Raises:
            LogGoneError: the log does not have that attempt. StorageError: the storage can't be used now.
            CorruptCheckpointError, ConfigError: the log can't be read.
        """
        dead: list[int] = []

        def entry_after(tail: LogEntry | None) -> LogEntry:
            newest = 0 if tail is None else tail.attempt
            if newest < known_attempt:
                what = f"a log that ends with attempt {newest}" if newest else "no log"
                raise LogGoneError(
                    f"{self._storage.url} has {what}, and attempt {known_attempt} of the run has trained on this cluster: the folder "
                    "has been moved, removed or replaced, or is not mounted",
                    operation="claim", path=self._storage.url,
                )  # fmt: skip
            gone = {tail.attempt} if tail is not None and is_dead(tail.writer) else set[int]()
            dead[:] = sorted(gone | set(assumed_dead(self._storage)))
            return claim_entry(tail, self._writer, self._run, foreign_steps(self._storage, live_steps(tail)), dead=dead)

        if not is_run(self._storage):
            entry_after(None)  # first without writing: a refused claim leaves nothing there
        self._storage.self_test()
        return self._log.claim(entry_after), tuple(dead)

    def take_back(self, claim: Claim) -> None:
        """Remove what the claim has made, if the run began with it and has written nothing since: then there is no run."""
        self._workers.shutdown()
        if claim.seq != FIRST:
            return
        try:
            tail = self._log.tail()
            if tail is not None and tail.seq == FIRST and tail.writer == claim.writer:
                self._storage.delete_tree(STATE)
        except (StorageError, CorruptCheckpointError) as error:
            logger.warning("what a run without a step has begun stays: %s", error)

    def why_log_is_gone(self) -> str:
        """Why the log is not where this attempt has written it; "": it is, or storage doesn't say."""
        try:
            self._log.check_newest()
        except LogGoneError as error:
            return error.message
        except StorageError as error:
            logger.debug("the log could not be looked at: %s", error)
        return ""

    def prepare(self, entry: LogEntry) -> None:
        """What can be done while the trainers start: remove what earlier attempts left, load what packages are made with."""
        self._workers.clean.submit(self._collect_garbage, entry)
        self._workers.build.submit(self._packager.prepare)

    def look_for_dead(self) -> None:
        """Somebody may have said meanwhile that the process of an older attempt is gone."""
        self._workers.build.submit(self._look_for_dead)

    # ------------------------------------------------------------ commands; called by the machine's thread

    def carry_out(self, command: Slow) -> None:
        """Hand a command to its worker."""
        match command:
            case BuildPackage():
                self._workers.build.submit(self._build, command)
            case Append(entry=entry):
                self._workers.log.submit(self._append, entry)
            case CarryOut(intent=intent) if intent.kind == "commit":
                self._workers.build.submit(self._publish, intent)
            case CarryOut(intent=intent):
                self._workers.clean.submit(self._retire, intent)
            case Discard(save=save):
                self._given_up.add(save)
                self._parts.pop(save, None)
                self._packages.pop(save, None)
                self._discard_soon(save, command.step)
            case _:
                assert_never(command)

    def await_part(self, command: Write, part: Future[Any]) -> None:
        """A host has been told to write its part of a save: keep what it hands back for the package."""
        self._parts.setdefault(command.save, {})
        part.add_done_callback(functools.partial(self._written, command))

    def end(self, *, may_be_older: bool) -> None:
        """Remove what was written for saves after they had been given up. All workers have ended, and all hosts.

        Args:
            may_be_older: of earlier attempts, too, whose hosts have gone on after `prepare`.
        """
        if self._given_up or may_be_older:
            try:
                collect_garbage(self._storage, given_up=self._given_up)
            except Exception as error:
                logger.warning("left-overs of saves that were given up stay for the next start: %s", error)

    # ------------------------------------------------------------ on worker threads

    def _written(self, command: Write, future: Future[Any]) -> None:
        error = future.exception()
        parts = self._parts.get(command.save)
        if error is None and parts is not None:  # else the save was given up meanwhile
            parts[command.host] = future.result()
        away = isinstance(error, Unreachable)
        self._post(Written(host=command.host, save=command.save, error=_outcome(error), away=away))
        self._wrote_in_vain(command)

    def _build(self, command: BuildPackage) -> None:
        error = ""
        hopeless = False
        metrics: dict[str, float] = {}
        kept: tuple[int, ...] = ()
        now_s = self._wall_clock()
        try:
            parts = [self._parts[command.save][host] for host in command.hosts]
            package = self._packager.build(self._storage, self._run, command.step, command.save, parts)
            folder = StepFolder(self._storage, command.step, command.save)
            folder.assemble(package)
            folder.put_package(package)
            self._packages[command.save] = package
            metrics = min(((rank, t) for p in parts for rank, t in p.tables.items()), key=lambda pair: pair[0])[1].metrics
            new = LiveStep(step=command.step, save=command.save, metrics=dict(metrics), time_s=now_s)
            kept = tuple(self._keep(sorted((*command.live, new), key=lambda one: one.step)))
        except Exception as caught:
            logger.debug("building step %d failed", command.step, exc_info=True)
            hopeless = isinstance(caught, ConfigError)  # values that differ between ranks will differ the next time
            error = str(caught) if hopeless else _outcome(caught)
        self._parts.pop(command.save, None)
        self._post(Packaged(save=command.save, metrics=metrics, time_s=now_s, kept=kept, error=error, hopeless=hopeless))
        self._wrote_in_vain(command)

    def _append(self, entry: LogEntry) -> None:
        entry = dataclasses.replace(entry, writer=self._writer)
        try:
            outcome = self._log.append(entry, needs=_packages_of(entry))
        except Exception as error:
            outcome = Appended(seq=entry.seq, outcome="failed", error=_outcome(error))
        self._post(outcome)

    def _publish(self, intent: Intent) -> None:
        error = ""
        try:
            save = SaveId(intent.save or "")
            folder = StepFolder(self._storage, intent.step, save)
            package = self._packages.get(save) or folder.read_package()
            fault_points.reached("publishing")
            self._put_run_metadata()
            folder.publish(package)
            self._packages.pop(save, None)
        except Exception as caught:
            logger.debug("publishing step %d failed", intent.step, exc_info=True)
            error = _outcome(caught)
        self._post(CarriedOut(intent=intent, error=error))

    def _put_run_metadata(self) -> None:
        """With the first step: a run that is refused before has left nothing."""
        if self._run_metadata is None:
            return
        try:
            put_run_metadata(self._storage, self._run_metadata)
            self._run_metadata = None
        except StorageError as error:
            logger.warning("run_metadata was not written, the next durable step tries again: %s", error)

    def _retire(self, intent: Intent) -> None:
        error = ""
        try:
            StepFolder(self._storage, intent.step, intent.save).retire(aside=intent.aside)
            self._log.check_newest()  # while the folder is away every step is gone
        except Exception as caught:
            error = _outcome(caught)
        self._post(CarriedOut(intent=intent, error=error))

    def _wrote_in_vain(self, command: Write | BuildPackage) -> None:
        """If the save was given up meanwhile, its discard has come too early."""
        if command.save in self._given_up:
            self._packages.pop(command.save, None)
            self._discard_soon(command.save, command.step)

    def _discard_soon(self, save: SaveId, step: int) -> None:
        if save not in self._discarding:  # a thousand hosts need not be followed by as many
            self._discarding.add(save)
            with contextlib.suppress(RuntimeError):  # its thread has ended: `end` comes
                self._workers.clean.submit(self._discard, save, step)

    def _discard(self, save: SaveId, step: int) -> None:
        self._discarding.discard(save)  # before it looks: what is written from now on wants another one
        try:
            StepFolder(self._storage, step, save).discard()
        except Exception as error:
            logger.warning("left-overs of save %s stay for the end of the run or its next start: %s", save, error)

    def _collect_garbage(self, entry: LogEntry) -> None:
        try:
            collect_garbage(self._storage, {s.save for s in entry.live if s.save} | {i.save for i in entry.intents if i.save})
        except Exception as error:
            logger.warning("left-overs of earlier attempts stay for now: %s", error)

    def _look_for_dead(self) -> None:
        try:
            for attempt in assumed_dead(self._storage):
                self._post(AttemptDead(attempt=attempt))
        except Exception as error:
            logger.debug("attempts assumed dead could not be listed: %s", error)


def _packages_of(entry: LogEntry) -> list[str]:
    """The packages of what this entry commits."""
    return [package_name(one.step, one.save) for one in own_commits(entry) if one.save]


def _outcome(error: BaseException | None) -> str:
    """An error's kind and last line, for an event; "" for none. Of Ray's errors the last line is the one that tells."""
    if error is None:
        return ""
    cause = getattr(error, "cause", None) or error  # Ray wraps the HostActor's exception
    text = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {text[-1] if text else ''}"
