"""A trainer's connection to the run: its Coordinator, its node's HostActor, the control words and the slots."""

from __future__ import annotations

import dataclasses
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from raystate.actors.blame import raised
from raystate.actors.coordinator import ensure_coordinator, this_owner
from raystate.actors.doorbell import Bell, Hello
from raystate.actors.entering import enter
from raystate.actors.host_service import host_word_from_json, trainer_word_to_json
from raystate.actors.naming import coordinator_name, find_actor, host_name, wait_until_gone
from raystate.arena import TrainerArena
from raystate.config import StateConfig
from raystate.core.errors import BarrierTimeoutError, CapacityError, RaystateError, error_from_name
from raystate.core.messages import (
    Ask,
    Failure,
    HostId,
    HostWord,
    Joined,
    JoinReply,
    Reply,
    TrainerExited,
    TrainerWord,
)
from raystate.storage import run_hash

RETRY_S = 0.1
RECOVERIES_TIMEOUT_S = 5.0
END_TIMEOUT_S = 20.0  # for the actors to go; fit and the next start look after what is left
REPLY_MARGIN_S = 30.0  # the Coordinator's own deadlines come first: they can name who is missing


class Session:
    """One trainer in one lineage. Thread-safe.

    Args:
        config: of the run.
        rank, world: of this JAX process.
        group: one token per start of the worker group, the same on all ranks.
        launch: the same for all starts of one launcher; None: this process is its own.
        takeover: end another job's use of the run.

    Raises:
        RunInUseError, StorageError, BarrierTimeoutError (names the ranks that did not join), ConfigError.
    """

    def __init__(self, config: StateConfig, *, rank: int, world: int, group: str, launch: str | None, takeover: bool):
        self.config = config
        self.rank = rank
        self.world = world
        self.run_hash = run_hash(config.storage, config.run)
        self.host = HostId(ray.get_runtime_context().get_node_id())
        self.incarnation = secrets.token_hex(8)
        self.arena: TrainerArena | None = None
        self._word_lock = threading.Lock()
        self._host_word_seq = -1
        self._host_word: HostWord | None = None
        self._owner = this_owner(launch or f"{self.host}-{os.getpid()}")
        self._hello(takeover)
        self.join_reply = self._join(group)
        self.lineage = self.join_reply.lineage
        self.host_of_rank = dict(self.join_reply.hosts)
        _, path = self.call_host("hello", timeout_s=config.start_timeout_s)
        self.arena_path = Path(path)
        self._bell = Bell(self.arena_path, self._bell_hello(-1))

    # ------------------------------------------------------------ the Coordinator

    def _hello(self, takeover: bool) -> None:
        enter(self.config, self.run_hash, self._owner, takeover=takeover)

    def _join(self, group: str) -> JoinReply:
        nonce = secrets.token_hex(4)
        reply = self.ask(
            lambda ask: Joined(ask=ask, group=group, rank=self.rank, world=self.world, host=self.host, nonce=nonce),
            timeout_s=self.config.start_timeout_s,
            phase="start",
        )
        assert isinstance(reply, JoinReply), reply
        return reply

    def ask(self, make_event: Callable[[Ask], Any], *, timeout_s: float, phase: str) -> Reply:
        """Ask the Coordinator, again if it is killed meanwhile. A Failure is raised as the error it names.

        Raises BarrierTimeoutError when no answer comes within `timeout_s` plus a margin.
        """
        event = make_event(Ask(secrets.token_hex(8)))
        start_s = time.monotonic()
        deadline_s = start_s + timeout_s + REPLY_MARGIN_S
        while True:
            coordinator = find_actor(coordinator_name(self.run_hash))
            if coordinator is None and not isinstance(event, Joined):
                # Nobody restarts a Coordinator that was ended on purpose; a killed one is Ray's to restart.
                raise RaystateError(
                    f"the Coordinator of run {self.config.run!r} is gone (released or taken over)", rank=self.rank, phase=phase
                )
            if coordinator is None:
                coordinator = ensure_coordinator(self.config, self.run_hash, self._owner)
            try:
                reply: Any = ray.get(coordinator.ask.remote(event), timeout=max(0.1, deadline_s - time.monotonic()))
            except (RayActorError, GetTimeoutError) as error:
                if time.monotonic() > deadline_s:
                    waited_s = time.monotonic() - start_s
                    raise BarrierTimeoutError(
                        f"rank {self.rank}: no answer from the Coordinator in phase {phase!r} for {waited_s:.0f} s "
                        f"({error.__class__.__name__})",
                        phase=phase, rank=self.rank, waited_s=waited_s,
                    ) from None  # fmt: skip
                time.sleep(RETRY_S)
                continue
            if isinstance(reply, Failure):
                raise error_from_name(reply.error, reply.message, reply.details)
            return reply

    def say_failed(self, reason: str, error: BaseException) -> None:
        """This rank's training failed: the others are stuck without it. Best effort.

        With the exception: the launcher may find this process ended before it has read it there.
        """
        coordinator = find_actor(coordinator_name(self.run_hash))
        if coordinator is not None:
            event = TrainerExited(host=self.host, lineage=self.lineage, rank=self.rank, clean=False, reason=reason)
            coordinator.failed.remote(event, raised(self.rank, error))

    def recoveries(self) -> list[dict[str, Any]]:
        """The ledger so far. Empty if the Coordinator can't say."""
        coordinator = find_actor(coordinator_name(self.run_hash))
        try:
            found = ray.get(coordinator.recoveries.remote(), timeout=RECOVERIES_TIMEOUT_S) if coordinator is not None else []
        except (RayActorError, GetTimeoutError):
            return []
        return [dataclasses.asdict(recovery) for recovery in found]

    def leave(self) -> None:
        """After the LeaveReply: the Coordinator may end. Rank 0 returns when all actors of the run are gone."""
        coordinator = find_actor(coordinator_name(self.run_hash))
        if coordinator is not None:
            coordinator.left.remote(self.rank, self.world)
        if self.rank == 0:
            wait_until_gone(self.run_hash, END_TIMEOUT_S)

    # ------------------------------------------------------------ the HostActor

    def call_host(self, method: str, *, timeout_s: float, host: HostId | None = None, **kwargs: Any) -> Any:
        """Call a HostActor, again if it is killed meanwhile."""
        host = host or self.host
        deadline_s = time.monotonic() + timeout_s
        while True:
            actor = find_actor(host_name(self.run_hash, host))
            try:
                if actor is not None:
                    return ray.get(getattr(actor, method).remote(**kwargs), timeout=max(0.1, deadline_s - time.monotonic()))
            except (RayActorError, GetTimeoutError):
                pass
            except RayTaskError as error:
                raise (error.cause if isinstance(error.cause, RaystateError) else error) from None
            if time.monotonic() > deadline_s:
                raise BarrierTimeoutError(
                    f"rank {self.rank}: the HostActor of node {host[:8]} did not answer {method!r} within {timeout_s:.0f} s",
                    rank=self.rank, host=host, phase=method, waited_s=timeout_s,
                )  # fmt: skip
            time.sleep(RETRY_S)

    def allot(self, *, data_bytes: int, table_bytes: int, buffer_bytes: int, slots: int) -> None:
        """Get slots for snapshots of `data_bytes`. CapacityError when they don't fit."""
        if self.arena is not None:
            self.arena.close()
            self.arena = None
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
            )
        except CapacityError as error:
            error.details.setdefault("rank", self.rank)
            raise
        self.arena = TrainerArena.attach(Path(path), trainer=self.incarnation)
        self._host_word_seq = -1
        self._bell.introduce(self._bell_hello(index))

    def _bell_hello(self, set_index: int) -> Hello:
        return Hello(rank=self.rank, world=self.world, lineage=self.lineage, incarnation=self.incarnation, set_index=set_index)

    # ------------------------------------------------------------ control words

    def host_word(self) -> HostWord | None:
        """What the HostActor last told this trainer. A read of shared memory, decoded only when it has changed."""
        if self.arena is None:
            return None
        with self._word_lock:
            cell = self.arena.host_cell.read()
            if cell is not None and cell[0] != self._host_word_seq:
                self._host_word_seq = cell[0]
                self._host_word = host_word_from_json(cell[1])
            return self._host_word

    def write_word(self, word: TrainerWord) -> None:
        """Tell the HostActor, and ring."""
        if self.arena is not None:
            with self._word_lock:
                self.arena.trainer_cell.write(trainer_word_to_json(word))
        self._bell.ring()

    def close(self) -> None:
        """Detach on purpose."""
        self._bell.close()
        if self.arena is not None:
            self.arena.close()
            self.arena = None
