"""A trainer's connection to the run: its Coordinator, its node's HostActor, the control words and the slots."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from raystate.actors.launch_context import ages
from raystate.arena import TrainerArena, arena_path, default_root
from raystate.arena.files import META
from raystate.arrays.monitoring import hear_compilation
from raystate.config.state_config import StateConfig
from raystate.core.formats.errors import BarrierTimeoutError, CapacityError, RaystateError, StaleAttemptError, error_from_name
from raystate.core.formats.messages import Ask, Failure, HostWord, Joined, JoinReply, Reply, TrainerExited, TrainerWord
from raystate.machine.load import load
from raystate.manager.control_words import ControlWords
from raystate.manager.spent import Spent
from raystate.runtime.host import stacks
from raystate.runtime.host.doorbell import Hello
from raystate.runtime.link import Gone, Link, Ringer, Unreachable
from raystate.storage import run_hash
from raystate.waits import AGAIN_S, REPLY_MARGIN_S

R = TypeVar("R", bound=Reply)
T = TypeVar("T")
_NO_WORD = HostWord()


class Slots(NamedTuple):
    """A set of slots that was allotted to this trainer."""

    arena: TrainerArena
    set_index: int


class Session:
    """One trainer, over all its lineages. Thread-safe.

    Args:
        link: how to reach the run; the process has been admitted to it.
        config: of the run.
        rank, world: of this JAX process.
        group: one token per start of the worker group, the same on all ranks.

    Raises:
        StorageError, BarrierTimeoutError (names the ranks that did not join), ConfigError.
    """

    def __init__(self, link: Link, config: StateConfig, *, rank: int, world: int, group: str):
        self.link = link
        self.config = config
        self.rank = rank
        self.world = world
        self.host = link.host
        self.incarnation = secrets.token_hex(8)
        self.words = ControlWords()
        self.unfinished_restore = False  # one has begun, and has neither ended nor failed
        self.leaver: int | None = None  # the thread that closes or fails: from then on no other one saves or restores
        self._pid = os.getpid()
        self._is_ending = False
        self.joined: JoinReply = self._join(group)
        self.lineage = self.joined.lineage
        self.spent = Spent(link.node_clock)
        self._hear_no_more = hear_compilation(self.spent.compiled)
        # Where the node's HostActor, which is perhaps just starting, has it.
        self.arena_path = arena_path(default_root(config.arena_dir), run_hash(config.storage, config.run), self.host)
        self._take_back_stacks: Callable[[], None] = lambda: None
        self._bell: Ringer | None = None

    def ring(self) -> None:
        """Tell the HostActor that this trainer is there. From here on it has to be closed, or the HostActor ends this process one day."""
        # Kept before it connects: an interruption may come between.
        self._bell = self.link.bell(self.arena_path, self._bell_hello())
        self._bell.connect(self.config.start_timeout_s)
        self._offer_stacks()

    def _offer_stacks(self) -> None:
        if self.config.hang_timeout_s is not None:
            self._take_back_stacks = stacks.offer(self.arena_path)

    def _join(self, group: str) -> JoinReply:
        give_up_s = self.link.clock() + self.config.start_timeout_s
        while True:
            try:
                return self.ask(
                    JoinReply,
                    lambda ask: Joined(ask=ask, group=group, rank=self.rank, world=self.world, host=self.host, ages=ages()),
                    timeout_s=self.config.start_timeout_s,
                    phase="start",
                )
            except StaleAttemptError as error:
                # The Coordinator of the start before is about to end: soon there is another one.
                if not error.released or self.link.clock() > give_up_s:
                    raise
            self.link.rest(seconds=AGAIN_S)

    def refuse_unfinished_restore(self) -> None:
        """Raises RaystateError in another thread's restore, and after an interrupted one.

        The other ranks may have gone on to another lineage then: no step of this one can become
        durable in it.
        """
        if self.unfinished_restore:
            raise RaystateError(
                f"rank {self.rank}: restore() has not ended: it was interrupted, and has to be called again before anything else, or "
                "another thread is in it",
                rank=self.rank,
            )

    def refuse_overtaken(self, lineage: str) -> None:
        """Raises RaystateError in a save that began in this lineage, if another thread restores, has restored or leaves.

        Also if this process can't reach its run any more.
        """
        self.link.check()
        self.refuse_unfinished_restore()
        self.refuse_left("save(): the step was not saved")
        if self.lineage != lineage:
            text = f"rank {self.rank}: another thread has called restore() during save(): the step was not saved"
            raise RaystateError(text, rank=self.rank)

    def refuse_left(self, what: str) -> None:
        """Raises RaystateError if nothing begins in this process any more, or another thread closes or fails."""
        if self.is_over or self.is_left:
            how = "was closed" if self.is_over else "is being closed by another thread"
            raise RaystateError(f"rank {self.rank}: this StateManager {how} during {what}", rank=self.rank)

    @property
    def is_left(self) -> bool:
        """Whether another thread than this one closes or fails, or has."""
        return self.leaver not in (None, threading.get_ident())

    @property
    def is_over(self) -> bool:
        """Nothing begins in this process any more."""
        return self._is_ending or self.is_the_parents

    @property
    def is_the_parents(self) -> bool:
        """This process was forked in the midst of it."""
        return os.getpid() != self._pid

    def end(self) -> None:
        """From here on, nothing begins."""
        self._is_ending = True

    def begin(self, lineage: str) -> None:
        """Go on in another lineage."""
        self.lineage = lineage
        self.spent.begin_anew()
        self._introduce()

    # ------------------------------------------------------------ the Coordinator

    def ask(self, kinds: type[R] | tuple[type[R], ...], make_event: Callable[[Ask], Any], *, timeout_s: float, phase: str) -> R:
        """Ask the Coordinator, again if it is killed meanwhile. A Failure is raised as the error it names.

        Args:
            kinds: what may be answered.

        Raises BarrierTimeoutError when no answer comes within `timeout_s` plus a margin.
        """
        ask = Ask(secrets.token_hex(8))
        return self._again(  # the event anew each time: the word that it names may be one that the HostActor can read no more
            lambda limit_s: self._ask_once(kinds, make_event(ask), limit_s, phase=phase),
            f"the Coordinator in phase {phase!r}",
            timeout_s + REPLY_MARGIN_S,
            phase=phase,
        )

    def _again(self, call: Callable[[float], T], whom: str, timeout_s: float, **details: Any) -> T:
        start_s = self.link.clock()
        while True:
            waited_s = self.link.clock() - start_s
            try:
                return call(max(0.1, timeout_s - waited_s))
            except Unreachable as error:
                waited_s = self.link.clock() - start_s
                if waited_s > timeout_s:
                    text = f"rank {self.rank}: no answer from {whom} for {waited_s:.0f} s ({error}); {load()}"
                    raise BarrierTimeoutError(text, rank=self.rank, waited_s=waited_s, **details) from None
            self.link.rest(seconds=AGAIN_S)

    def _ask_once(self, kinds: type[R] | tuple[type[R], ...], event: Any, limit_s: float, **details: Any) -> R:
        try:
            reply = self.link.ask(event, limit_s)
        except Gone as error:
            raise RaystateError(str(error), rank=self.rank, **details) from None
        if isinstance(reply, Failure):
            raise error_from_name(reply.error, reply.message, reply.details)
        assert isinstance(reply, kinds), reply
        return reply

    def ask_now(self, kind: type[R], make_event: Callable[[Ask], Any], *, timeout_s: float) -> R | None:
        """Ask the Coordinator once; None: it did not answer within `timeout_s`. A Failure is raised as the error it names."""
        try:
            return self._ask_once(kind, make_event(Ask(secrets.token_hex(8))), timeout_s)
        except Unreachable:
            return None

    def say_failed(self, reason: str, error: BaseException) -> None:
        """This rank's training failed: the others are stuck without it. Best effort."""
        event = TrainerExited(host=self.host, lineage=self.lineage, rank=self.rank, clean=False, reason=reason)
        self.link.failed(event, error)

    # ------------------------------------------------------------ the HostActor

    def call_host(self, method: str, *, timeout_s: float, **kwargs: Any) -> Any:
        """Call the node's HostActor, again if it is killed meanwhile."""
        return self._again(
            lambda limit_s: self.link.call_host(self.host, method, limit_s, kwargs),
            f"the HostActor of node {self.host[:8]} to {method!r}",
            timeout_s,
            phase=method,
            host=self.host,
        )

    def allot(self, *, data_bytes: int, table_bytes: int, buffer_bytes: int, slots: int) -> Slots | None:
        """Get slots for snapshots of `data_bytes`, to be used with `use`; None: those before will do.

        Raises:
            CapacityError: they don't fit; the slots before stay.
        """
        try:
            path, index = self.call_host(
                "allot",
                timeout_s=self.config.start_timeout_s,
                incarnation=self.incarnation,
                rank=self.rank,
                pid=os.getpid(),
                data_bytes=data_bytes,
                table_bytes=table_bytes,
                buffer_bytes=buffer_bytes,
                slots=slots,
                copies=min(self.config.replicas, self.joined.host_count - 1),
            )
        except CapacityError as error:
            error.details.setdefault("rank", self.rank)
            raise
        return None if index == self.words.set_index else Slots(TrainerArena.attach(Path(path), trainer=self.incarnation), index)

    def use(self, slots: Slots) -> None:
        """These from now on; those before go back once their contents aren't needed. Raises
        RaystateError: too late."""
        with self.words.lock:
            if self.is_over:  # leaving has let go of the slots: these would stay mapped
                slots.arena.close()
                self.refuse_left("save(): the step was not saved")
            self.words.move(*slots)
        self._introduce()

    def must_move(self) -> bool:
        """Whether somebody has removed the files of this trainer's slots, and its HostActor has made room for others."""
        return self.words.is_lost and (self.arena_path / META).exists()

    def move_out(self) -> None:
        """Let go of slots whose files were removed, and of what they hold."""
        self.words.move(None)
        self._take_back_stacks()
        self._offer_stacks()

    def _introduce(self) -> None:
        """The HostActor may have to know it by something new."""
        if self._bell is not None:
            self._bell.introduce(self._bell_hello())

    def _bell_hello(self) -> Hello:
        return Hello(
            rank=self.rank, world=self.world, lineage=self.lineage, incarnation=self.incarnation, set_index=self.words.set_index
        )

    # ------------------------------------------------------------ control words

    @property
    def fails(self) -> bool:
        """Whether the present lineage can't go on, as the Coordinator knows it: ranks hang."""
        return (self.words.host_word() or _NO_WORD).failure is not None

    def refuse_failed(self) -> None:
        """Raises the error that names them."""
        if failure := (self.words.host_word() or _NO_WORD).failure:
            raise error_from_name(failure.error, failure.message, dict(failure.details))

    def save_errors(self) -> tuple[str, ...]:
        """What has failed since the last durable step, as the HostActor told it last."""
        return (self.words.host_word() or _NO_WORD).save_errors

    def storage_fails(self) -> bool:
        """Whether storage has failed or stood still since the last durable step, as far as the HostActor has told."""
        return (self.words.host_word() or _NO_WORD).storage_fails

    def write_word(self, word: TrainerWord) -> None:
        """Tell the HostActor, and ring. The word says, too, what the time was spent on."""
        self.words.write(self.spent.told(word))
        if self._bell is not None:
            self._bell.ring()

    def hang_up(self) -> None:
        """Leave on purpose, as far as the HostActor is concerned."""
        if self._bell is not None:
            self._bell.close()

    def close(self) -> None:
        """Detach on purpose."""
        self._hear_no_more()
        self._take_back_stacks()
        self.hang_up()
        self.words.close()
