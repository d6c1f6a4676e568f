"""A restore: ask for the choice, begin its lineage, read, and settle with the other ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard, TypeVar

from raystate.arena import format_bytes
from raystate.config.errors import check_flag
from raystate.core.formats.errors import (
    BarrierTimeoutError,
    ConfigError,
    CorruptCheckpointError,
    RaystateError,
    ReferenceMismatchError,
    StepNotFoundError,
    StorageError,
)
from raystate.core.formats.messages import Ask, Reply, RestoreAsked, RestoreChoice, RestoreSettled, RestoreTried
from raystate.inspection import open_step
from raystate.machine import fault_points
from raystate.manager.memory_snapshot import MemorySnapshot, content_from_memory
from raystate.manager.pipeline import Pipeline
from raystate.manager.session import Session
from raystate.observe.counted import process_counts, requests_in
from raystate.observe.progress import Share
from raystate.restored import ReadOptions, Restored, StepContent, content_from_storage
from raystate.storage import Storage
from raystate.waits import SHOWN_AFTER_S

logger = logging.getLogger("raystate")

R = TypeVar("R", bound=Reply)

# What is wrong with the step, or with reaching it; anything else that a restore raises is the caller's mistake.
_PROBLEMS = (CorruptCheckpointError, StepNotFoundError, StorageError, BarrierTimeoutError)


def _is_problem(error: Exception) -> TypeGuard[RaystateError]:
    return isinstance(error, _PROBLEMS) and not error.of_caller


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """What one process asks a restore for. `older_form`: `transforms` are not for a step that fits as it is."""

    reference: Any
    items: Mapping[str, Any] | None
    options: ReadOptions
    step: int | None = None
    rollback: bool = False
    older_form: bool = False

    def __post_init__(self) -> None:
        check_flag("rollback", self.rollback)
        if self.rollback and self.step is None:
            text = "restore(rollback=True) needs the step to go back to: restore(step=…, rollback=True)"
            raise ConfigError(text, field="rollback")

    @property
    def plain(self) -> ReadOptions:
        """The options for a step that fits as it is."""
        return dataclasses.replace(self.options, transforms=None) if self.older_form else self.options

    def options_for(self, content: StepContent) -> ReadOptions:
        """How this step is to be read. The next start of a run meets the steps that this one saves, with the same `transforms`."""
        if self.options.transforms is not None and self.older_form:
            try:
                content.check(self.reference, None, dataclasses.replace(self.plain, partial=False))
            except ReferenceMismatchError:
                return self.options
        return self.plain


class Restoring:
    """One trainer's restores.

    Args:
        on_settled: called with how a restore has ended, also if this process can't use it: all ranks go on from there.
    """

    def __init__(self, session: Session, pipeline: Pipeline, storage: Storage, on_settled: Callable[[RestoreSettled], None]):
        self._session = session
        self._pipeline = pipeline
        self._storage = storage
        self._on_settled = on_settled
        self._requests = requests_in(process_counts())  # of this process, up to the last restore
        self._undo = contextlib.ExitStack()  # puts iterators back that a restore has moved in vain

    def restore(self, wanted: Wanted) -> Restored | None:
        """Collective. What was staged, held or promised before is given up, unless it is what is restored.

        Raises:
            StepNotFoundError, BarrierTimeoutError, StorageError, CorruptCheckpointError; and for a
                mistake of this process, ReferenceMismatchError, ConfigError or what the caller's own
                code raised: nothing was given up, and no rank has restored the step. The others get
                a RaystateError that names this rank.
        """
        self._check_beforehand(wanted)
        with self._undo as undo:
            restored = self._restore(wanted)
            if restored is not None:
                undo.pop_all()
        return restored

    def _restore(self, wanted: Wanted) -> Restored | None:
        session = self._session
        with self._pipeline.paused():
            if session.unfinished_restore:  # the word of the lineage that one has begun may not be written
                self._pipeline.speak()
            session.unfinished_restore = True
            reply: RestoreChoice | RestoreSettled = self._ask(
                RestoreChoice,
                lambda ask: RestoreAsked(
                    ask=ask,
                    lineage=session.lineage,
                    rank=session.rank,
                    step=wanted.step,
                    rollback=wanted.rollback,
                    word=session.words.number,
                ),
                timeout_s=session.config.barrier_timeout_s + session.config.restore_timeout_s,
            )
            set_aside: list[tuple[int, str]] = []
            restored: Restored | None = None
            mistake: Exception | None = None
            choice = reply
            while isinstance(reply, RestoreChoice):
                choice = reply
                set_aside = list(choice.set_aside) or set_aside
                problem: RaystateError | None = None
                try:
                    restored = self._read(choice, wanted) if mistake is None else None
                except Exception as error:
                    if _is_problem(error):
                        problem = error
                    else:
                        # The caller's: every rank will tell its own, nothing is wrong with the step.
                        mistake = error
                        if isinstance(error, ReferenceMismatchError) and wanted.step is None:
                            url = self._storage.url
                            error.add(
                                f"This is step {choice.step} of {url}. A model that was changed on purpose begins anew with another "
                                f"storage, or after `raystate rm {url}`."
                            )
                try:
                    reply = self._settle(choice, restored, problem, mistaken=mistake is not None)
                except RaystateError:
                    if mistake is not None:
                        raise mistake from None  # it is why no rank restores the step
                    raise
            self._pipeline.begin(choice.begins, choice.origin)
            self._settled(reply)
        self._pipeline.check.restores = True
        if wanted.step is None:
            self._pipeline.check.asked(wanted.reference, wanted.items, wanted.plain)
        if restored is None:
            return None
        logger.debug("rank %d has restored step %d: %s", session.rank, restored.step, _taken(restored.bytes_from))
        self._pipeline.check.got(restored)
        for bad_step, reason in set_aside:
            logger.log(logging.DEBUG if session.rank else logging.WARNING, "step %d was set aside: %s", bad_step, reason)
        return dataclasses.replace(restored, tier=reply.tier or restored.tier, set_aside=set_aside)

    def _check_beforehand(self, wanted: Wanted) -> None:
        """A reference that does not fit the durable step that was asked for is refused before anything is given up for it."""
        if wanted.step is None:
            return
        try:
            content = content_from_storage(open_step(self._storage, wanted.step), wanted.step)
        except _PROBLEMS:
            return  # whether there is such a step, and a whole one, is decided with the other ranks
        content.check(wanted.reference, wanted.items, wanted.options)

    def _settled(self, reply: RestoreSettled) -> None:
        self._pipeline.settled(reply)
        self._on_settled(reply)
        self._requests = requests_in(process_counts())
        self._session.unfinished_restore = False

    def _settle(
        self, choice: RestoreChoice, restored: Restored | None, problem: RaystateError | None, *, mistaken: bool
    ) -> RestoreChoice | RestoreSettled:
        session = self._session
        requests = requests_in(process_counts())
        return self._ask(
            (RestoreChoice, RestoreSettled),
            lambda ask: RestoreTried(
                ask=ask,
                lineage=session.lineage,
                rank=session.rank,
                step=choice.step,
                begins=choice.begins,
                ok=problem is None,
                error=str(problem or ""),
                damaged=isinstance(problem, CorruptCheckpointError | StepNotFoundError),
                tier=restored.tier if restored is not None else "init",
                mistaken=mistaken,
                requests=tuple((name, value - self._requests.get(name, 0.0)) for name, value in requests.items()),
            ),
            timeout_s=session.config.restore_timeout_s,
        )

    def _ask(self, kinds: type[R] | tuple[type[R], ...], make_event: Callable[[Ask], Any], *, timeout_s: float) -> R:
        """As the session's; any error of it ends the restore."""
        try:
            return self._session.ask(kinds, make_event, timeout_s=timeout_s, phase="restore")
        except RaystateError:
            self._session.unfinished_restore = False
            raise

    def _read(self, choice: RestoreChoice, wanted: Wanted) -> Restored | None:
        if choice.tier == "none":
            return None
        fault_points.reached("restoring")
        if choice.tier == "memory":
            return self._read_memory(choice, wanted)
        if choice.in_memory is not None:
            try:
                return self._read_memory(choice, wanted)
            except Exception as error:
                if not _is_problem(error):
                    raise
                # A fault of the memory is none of the step in storage.
                logger.warning("step %d is read from storage alone: %s", choice.step, error)
        return self._take(content_from_storage(open_step(self._storage, choice.step), choice.step), choice, wanted)

    def _take(self, content: StepContent, choice: RestoreChoice, wanted: Wanted) -> Restored:
        """Read, and tell the Coordinator now and then how far this process is."""
        session = self._session
        share = Share(f"rank {session.rank}", session.link.tell, lambda: sum(content.bytes_from().values()), session.link.clock)

        def turn() -> bool:
            share.turn()
            return False

        stop = session.link.spawn(turn, threading.Condition(), "raystate-progress", SHOWN_AFTER_S)
        try:
            watched = dataclasses.replace(
                content, on_plan=functools.partial(share.began, choice.begins), on_moved=self._undo.callback
            )
            options = wanted.options_for(content)
            return watched.restore(wanted.reference, wanted.items, options, world=session.world, process_index=session.rank)
        finally:
            stop()

    def _read_memory(self, choice: RestoreChoice, wanted: Wanted) -> Restored:
        """What is in memory from there, the rest from storage, if it is there."""
        snapshot = MemorySnapshot(self._session, choice, lambda: open_step(self._storage, choice.step))
        try:
            return self._take(content_from_memory(snapshot, choice), choice, wanted)
        finally:
            snapshot.close()


def _taken(bytes_from: Mapping[str, int]) -> str:
    """Where the arrays of this process came from."""
    places = {"memory": "this node's memory", "peer": "other nodes' memory", "storage": "storage"}
    found = [f"{format_bytes(bytes_from[tier])} from {place}" for tier, place in places.items() if bytes_from.get(tier)]
    return ", ".join(found) or "no arrays"
