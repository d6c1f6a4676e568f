"""The HostActor: one per node and run, detached, pinned to its node. Neither jax nor orbax is imported here."""

from __future__ import annotations

import os
import secrets
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raystate.actors.naming import NAMESPACE, PROTOCOL, coordinator_name, find_actor, host_name
from raystate.core.messages import Advice, EndTrainers, Event, HostId, Invalidate, Write

HOST_THREADS = 16  # calls served at once: writes and fetches take long, advice must not wait behind them


class HostActor:
    """A thin shell: the core machine decides, `HostLoop` carries out, this class makes it callable.

    Everything it owns lies in the arena, so that Ray can restart it after a kill: the new process adopts what the old one held.
    """

    def __init__(self, *, run: str, run_hash: str, storage_url: str, host: HostId, host_memory: str | int, arena_dir: str | None):
        from raystate.arena import HostArena, arena_path, default_root, parse_memory, sweep
        from raystate.runtime.host_loop import HostLoop
        from raystate.storage import open_storage

        self._run_hash = run_hash
        self._parameters = (host_memory, arena_dir)
        self._coordinator: Any = None
        root = default_root(arena_dir)
        sweep(root)  # what dead clusters left on this machine
        arena = HostArena.open(
            arena_path(root, run_hash, host),
            run=run,
            storage=storage_url,
            node_id=host,
            cap_bytes=parse_memory(host_memory),
            node_pid=os.getppid(),  # the raylet: while it lives, so may this arena's users
        )
        self._loop = HostLoop(
            arena=arena,
            storage=open_storage(storage_url),
            host=host,
            incarnation=secrets.token_hex(4),
            tell=self._tell,
        )
        self._loop.start()

    def _tell(self, event: Event) -> None:
        # Fire and forget: a report that gets lost is repeated at the next heartbeat.
        if self._coordinator is None:
            self._coordinator = find_actor(coordinator_name(self._run_hash))
        if self._coordinator is None:
            return
        try:
            self._coordinator.tell.remote(event).future().add_done_callback(self._told)
        except Exception:
            self._coordinator = None

    def _told(self, future: Future[Any]) -> None:
        if isinstance(future.exception(), RayActorError):
            self._coordinator = None  # dead; whoever has its name now is told next

    def pid(self) -> int:
        return os.getpid()

    def protocol(self) -> int:
        return PROTOCOL

    def parameters(self) -> tuple[str | int, str | None]:
        """What it was made with: (host_memory, arena_dir)."""
        return self._parameters

    def allot(self, **request: Any) -> tuple[str, int]:
        return self._loop.allot(**request)

    def fetch(self, **request: Any) -> Any:
        return self._loop.fetch(**request)

    def advise(self, advice: Advice) -> None:
        self._loop.advise(advice)

    def invalidate(self, order: Invalidate) -> None:
        self._loop.invalidate(order)

    def end_trainers(self, order: EndTrainers) -> None:
        self._loop.end_trainers(order)

    def write(self, order: Write) -> Any:
        return self._loop.write(order).result()

    def close(self, remove_arena: bool) -> None:
        self._loop.close(remove_arena=remove_arena)


def create_host(*, run: str, run_hash: str, storage_url: str, host: HostId, host_memory: str | int, arena_dir: str | None) -> Any:
    """The node's HostActor of this run, made if there is none."""
    return (
        ray.remote(HostActor)
        .options(
            name=host_name(run_hash, host),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=HOST_THREADS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=host, soft=False),
        )
        .remote(
            run=run,
            run_hash=run_hash,
            storage_url=storage_url,
            host=host,
            host_memory=host_memory,
            arena_dir=arena_dir,
        )
    )
