"""How a trainer leaves: a clean end, an interruption, or an exception. And waiting for what was promised."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Generator, Mapping

from raystate.actors.launch_context import leave_unseen
from raystate.core.formats.errors import (
    BarrierTimeoutError,
    RaystateError,
    StaleAttemptError,
    StorageError,
    although_promised,
    lost_steps,
)
from raystate.core.formats.messages import Ask, FlushAsked, FlushReply, LeaveAsked, LeaveReply, ReleaseAsked, SnapshotId
from raystate.machine.sigterm import Stopped, tell_stop
from raystate.manager.pipeline import Pipeline
from raystate.manager.session import Session
from raystate.waits import AGAIN_S, QUICK_ANSWER_S, TOLD_AFTER_S

logger = logging.getLogger("raystate")


def is_clean_exit(error: BaseException | None) -> bool:
    """Whether a `with` block that is left with this ends well, as at its last line.

    `docs/howto/ends.md` has all ways. A user's `sys.exit(0)` is the end of a script that is
    content; Ray ends a process in the same way, with a reason. A generator is closed once its
    consumer wants no more steps, as a loop is left by a `break`.
    """
    if isinstance(error, SystemExit):
        return error.code in (None, 0) and not hasattr(error, "ray_terminate_msg")
    return error is None or isinstance(error, GeneratorExit)


class Departure:
    """One trainer's.

    Args:
        launched: somebody starts this script again when it fails or is interrupted, and releases its run.
    """

    def __init__(self, session: Session, pipeline: Pipeline, *, launched: bool):
        self._session = session
        self._pipeline = pipeline
        self.launched = launched
        self._has_let_go = False
        self._leaves_since_s = 0.0
        self._decided: frozenset[SnapshotId] = frozenset()  # promises that are durable or lost, and whose user may not know it yet
        self._ask_at_s = 0.0

    @property
    def detached(self) -> bool:
        """Whether it has ended, as far as this process is concerned."""
        return self._session.is_over

    def begin(self) -> bool:
        """Whether this thread leaves: from here on no other one saves or restores.

        False: another thread does. It has left when this returns.

        Raises:
            BarrierTimeoutError: it does not come to its end.
        """
        session, config = self._session, self._session.config
        if session.is_the_parents:
            return False
        with self._pipeline.lock:  # a save that is being decided still counts
            if session.leaver is None:
                session.leaver, self._leaves_since_s = threading.get_ident(), session.link.clock()
        if session.is_left and not self._pipeline.wait_until(lambda: self._has_let_go, TOLD_AFTER_S):
            logger.warning("%s", self._who_leaves(), extra={"run": config.run})
            limit_s = 2 * (config.save_timeout_s + config.barrier_timeout_s)
            if not self._pipeline.wait_until(lambda: self._has_let_go, limit_s):
                text = f"rank {session.rank}: {self._who_leaves()}, and has not come to its end"
                raise BarrierTimeoutError(text, rank=session.rank, phase="close", waited_s=limit_s)
        return not session.is_left

    def _who_leaves(self) -> str:
        leaver = next((one.name for one in threading.enumerate() if one.ident == self._session.leaver), "that has died")
        return f"another thread ({leaver}) has been closing this StateManager for {self._session.link.clock() - self._leaves_since_s:.0f} s"

    def closes(self, error: BaseException | None) -> bool:
        """Whether a `with` block that is left with this closes. One process that is stopped does, too; several would wait for those
        that are not."""
        session = self._session
        return is_clean_exit(error) or (isinstance(error, Stopped) and session.world == 1 and not session.unfinished_restore)

    @contextlib.contextmanager
    def ends_well(self, error: BaseException | None) -> Generator[None, None, None]:
        """Around the close at the end of a `with` block.

        A generator that is dropped can't raise what goes wrong: its launcher hears of it.
        """
        is_stopped = isinstance(error, Stopped)
        if is_stopped:
            tell_stop(str(error), self._session.config.run)
        try:
            yield
        except RaystateError as failure:
            if is_stopped:  # the signal is what ends this process
                logger.error("%s", failure, extra={"run": self._session.config.run})
                return
            if self.launched and isinstance(error, GeneratorExit):
                leave_unseen(failure)
            raise

    def is_saving(self) -> bool:
        """Whether a promise is neither durable nor known to be lost. The Coordinator is asked only where one may be, and seldom."""
        session = self._session
        promised, lost = self._pipeline.promises()
        if not {*promised, *lost} - self._decided:
            return False
        now_s = session.link.clock()
        if now_s < self._ask_at_s:
            return True
        open_ones = tuple(one for one in promised if one not in self._decided)
        try:
            reply = session.ask_now(
                FlushReply, lambda ask: self._question(ask, open_ones, lost, wait=False), timeout_s=QUICK_ANSWER_S
            )
        except StaleAttemptError:
            if not session.unfinished_restore:
                raise
            return False  # a restore is giving up what was promised
        self._ask_at_s = session.link.clock() + AGAIN_S
        if reply is None:
            return True
        self._decided = frozenset({*promised, *lost} - set(reply.undecided))
        return bool(reply.undecided)

    def flush(self) -> FlushReply:
        """Return when everything that was promised is durable.

        Raises:
            StorageError: names what isn't, each once.
        """
        session, pipeline = self._session, self._pipeline
        pipeline.drain()
        promised, lost = pipeline.promises()
        reply = session.ask(
            FlushReply,
            lambda ask: self._question(ask, promised, lost),
            timeout_s=session.config.save_timeout_s + session.config.barrier_timeout_s,
            phase="flush",
        )
        pipeline.told(promised, lost)
        if (error := lost_steps(reply.errors, durable_step=reply.durable_step)) is not None:
            raise error
        return reply

    def missing_at(self, step: int | None, error: StorageError) -> str:
        """The words of an interruption at this step, the newest, on promised steps that a flush has found not durable. None if the
        newest is: an end is judged by that, and the older ones are a warning."""
        session, lost = self._session, although_promised(error.errors) if error.errors else error.message
        if step is None or error.details.get("durable_step", -1) < step:
            return lost
        if session.rank == 0:
            logger.warning("step %d, at which the training stops, is durable; %s", step, lost, extra={"run": session.config.run})
        return ""

    def _question(
        self, ask: Ask, promised: tuple[SnapshotId, ...], lost: Mapping[SnapshotId, str], *, wait: bool = True
    ) -> FlushAsked:
        session = self._session
        return FlushAsked(
            ask=ask,
            lineage=session.lineage,
            rank=session.rank,
            promised=promised,
            broken=tuple(lost.items()),
            word=session.words.number,
            wait=wait,
        )

    def leave(self, before_leaving: Callable[[LeaveReply], None]) -> None:
        """Collective, a clean end: the newest step becomes durable, then the run is released.

        Raises:
            StorageError: the last step could not be made durable, and the run is not released. Or
                (`released`) the run has ended, and the newest step that was promised to this group is lost.
        """
        session, pipeline = self._session, self._pipeline
        pipeline.drain()
        with pipeline.lock:
            promised, lost = pipeline.promises()
            last = pipeline.machine.kept
        reply = session.ask(
            LeaveReply,
            lambda ask: LeaveAsked(
                ask=ask,
                lineage=session.lineage,
                rank=session.rank,
                last=last,
                promised=promised,
                broken=tuple(lost.items()),
                word=session.words.number,
            ),
            timeout_s=session.config.save_timeout_s + session.config.barrier_timeout_s,
            phase="close",
        )
        before_leaving(reply)
        self.detach()
        session.link.left(session.rank, session.world)
        if reply.newest_lost and (error := lost_steps(reply.errors, released=True)) is not None:
            raise error
        if reply.errors and session.rank == 0:
            logger.warning("run %r ends well, with step %d; %s", session.config.run, reply.step, although_promised(reply.errors))

    def detach(self, failed: str = "") -> None:
        """Let go of the slots; staged steps stay where they are. Called again, it goes on where it
        was interrupted: a trainer that stays attached is ended with those of an earlier group."""
        if self._has_let_go or not self.begin():
            return
        self._session.end()
        try:
            self._pipeline.close()
        finally:
            try:
                self._say_phase(failed)
            finally:
                self._session.close()
        self._has_let_go = True

    def _say_phase(self, failed: str) -> None:
        with self._pipeline.lock:
            if failed:
                self._pipeline.machine.failed(failed)
            else:
                self._pipeline.machine.closing()
        with contextlib.suppress(Exception):
            self._pipeline.speak()

    def fail(self, error: BaseException) -> None:
        """The training failed here. The others must not wait for this rank; saved steps stay."""
        session = self._session
        what = f"was stopped: {error}" if isinstance(error, Stopped) else f"failed: {type(error).__name__}: {error}"
        reason = f"rank {session.rank} {what}".splitlines()[0]
        try:
            if not self.begin():
                return
        except BarrierTimeoutError as failure:
            self._name(error, failure.message)
            return
        if self.detached:
            self.detach(failed=reason)
            return
        if isinstance(error, KeyboardInterrupt) and not self.launched:
            tell_stop("Ctrl-C", session.config.run)
        # Its word says so before anybody hears of it: a trainer that leaves by itself is not ended with the others of its group. And the
        # others hear of it before a copy, which may wait for a computation that never ends, is waited for.
        try:
            self._say_phase(reason)
            if session.words.arena is None:
                session.hang_up()  # it has no word yet that could say so
            with contextlib.suppress(Exception):
                session.say_failed(reason, error)
            # No launcher restarts this script: its memory becomes durable now.
            if not self.launched:
                self._pipeline.close()
                with contextlib.suppress(Exception):
                    self._pipeline.speak()
                    self._release(reason, error)
        finally:
            self.detach(failed=reason)

    def _release(self, reason: str, error: BaseException) -> None:
        """Note lost steps on the error that ends the run, and log them: code above may swallow
        it."""
        session = self._session
        try:
            reply = session.ask(
                LeaveReply,
                lambda ask: ReleaseAsked(
                    ask=ask, reason=reason, lineage=session.lineage, rank=session.rank, word=session.words.number
                ),
                timeout_s=session.config.save_timeout_s,
                phase="release",
            )
        except StorageError as failure:
            self._name(error, str(failure))
            return
        _, broken = self._pipeline.promises()
        if lost := dict.fromkeys((*(f"step {key.step}: {why}" for key, why in broken.items()), *reply.errors)):
            self._name(error, although_promised(lost))
        session.link.left(session.rank, session.world)

    def _name(self, error: BaseException, lost: str) -> None:
        error.add_note(lost)
        logger.error("%s", lost, extra={"run": self._session.config.run})
