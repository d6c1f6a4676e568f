"""The Coordinator actor: one per run, detached and named. It holds no accelerator and nothing that it can't rebuild."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pickle
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray

from raystate.actors.host import create_host
from raystate.actors.naming import NAMESPACE, PROTOCOL, coordinator_name, find_actor, find_hosts, host_name
from raystate.config import StateConfig
from raystate.core.messages import Advice, EndTrainers, Event, Failure, HostId, Invalidate, Reply, Write
from raystate.ray_version import ray_internals
from raystate.runtime.ledger import Recovery

with ray_internals():
    from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

GOODBYE_S = 5.0  # how long the ended Coordinator waits for its last replies to be read
CLOSE_HOST_TIMEOUT_S = 20.0
STARTING_S = 10.0  # an owner's trainers start, or start again: nobody else gets in between


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who uses the run.

    Attributes:
        job_id: the Ray job.
        node: where its process runs.
        launch: stays the same over the restarts of one `fit`; tells apart two uses of a run within one job, such as trials of a sweep
            that were given the same storage.
    """

    job_id: str
    node: str
    launch: str

    @property
    def identity(self) -> tuple[str, str]:
        return self.job_id, self.launch


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    attempt: int
    pid: int
    protocol: int
    newest_step: int


class RayHosts:
    """`Hosts` over Ray actors: every call returns at once."""

    def __init__(self, config: StateConfig, run_hash: str):
        self._config = config
        self._run_hash = run_hash
        self._handles: dict[HostId, Any] = {}

    def _handle(self, host: HostId) -> Any | None:
        if host not in self._handles:
            handle = find_actor(host_name(self._run_hash, host))
            if handle is None:
                return None
            self._handles[host] = handle
        return self._handles[host]

    def ensure(self, host: HostId, on_error: Callable[[str], None]) -> None:
        if self._handle(host) is not None:
            return
        handle = self._handles[host] = create_host(
            run=self._config.run,
            run_hash=self._run_hash,
            storage_url=self._config.storage,
            host=host,
            host_memory=self._config.host_memory,
            arena_dir=self._config.arena_dir,
        )

        def check(future: Future[Any]) -> None:
            error = future.exception()
            if error is not None:
                on_error(str(error).strip().splitlines()[-1])

        handle.hello.remote().future().add_done_callback(check)

    def _send(self, host: HostId, method: str, *args: Any) -> None:
        handle = self._handle(host)
        if handle is not None:
            getattr(handle, method).remote(*args)

    def advise(self, host: HostId, advice: Advice) -> None:
        self._send(host, "advise", advice)

    def invalidate(self, order: Invalidate) -> None:
        self._send(order.host, "invalidate", order)

    def end_trainers(self, order: EndTrainers) -> None:
        self._send(order.host, "end_trainers", order)

    def write(self, order: Write) -> Future[Any]:
        handle = self._handle(order.host)
        if handle is None:
            failed: Future[Any] = Future()
            failed.set_exception(RuntimeError(f"host {order.host[:8]} has no HostActor"))
            return failed
        return handle.write.remote(order).future()

    def close_all(self, *, remove_arena: bool) -> None:
        handles = {host: self._handle(host) for host in {*self._handles, *find_hosts(self._run_hash)}}
        refs = [handle.close.remote(remove_arena) for handle in handles.values() if handle is not None]
        ray.wait(refs, num_returns=len(refs), timeout=CLOSE_HOST_TIMEOUT_S)
        for handle in handles.values():
            if handle is not None:
                ray.kill(handle, no_restart=True)


class CoordinatorActor:
    """A thin shell: the core machine decides, `CoordinatorLoop` carries out, this class makes it callable."""

    def __init__(self, config: StateConfig, run_hash: str, owner: Owner):
        # Orbax imports JAX here, for small files only: it must never take an accelerator.
        os.environ["JAX_PLATFORMS"] = "cpu"
        for name in [name for name in os.environ if name.startswith("TPU_")]:
            del os.environ[name]
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        from raystate.runtime.coordinator_loop import CoordinatorLoop
        from raystate.runtime.retention import orbax_keep
        from raystate.storage import open_storage

        _log_to_stderr()
        self._kept_owner = _Kept(f"raystate:owner:{run_hash}")
        # A killed Coordinator comes back with the arguments of its first start: the run may have changed hands since.
        if ray.get_runtime_context().was_current_actor_reconstructed:
            owner = self._kept_owner.get() or owner
        self._kept_owner.put(owner)
        self._owner = owner
        self._owner_s = time.monotonic()  # when it last said hello
        self._lefts: set[int] = set()
        self._left_all = threading.Event()
        self._world = 1
        self._kill_me = ray.get_runtime_context().current_actor
        cluster = cluster_token()
        identity = f"{cluster}.{run_hash}"
        self._service = CoordinatorLoop(
            settings=config.core_settings(),
            keep=orbax_keep(config),
            storage=open_storage(config.storage),
            hosts=RayHosts(config, run_hash),
            known_hosts=find_hosts(run_hash),
            writer=f"{identity}.{secrets.token_hex(4)}",
            # This actor's name is unique in its cluster: whoever had it before is dead.
            is_dead=lambda writer: writer.startswith(f"{identity}."),
            on_end=self._on_end,
        )
        self._service.start()

    def _on_end(self, _reason: str) -> None:
        threading.Thread(target=self._end, name="raystate-end", daemon=True).start()

    def _end(self) -> None:
        self._left_all.wait(GOODBYE_S)
        self._kept_owner.delete()
        ray.kill(self._kill_me, no_restart=True)

    async def hello(self, owner: Owner, takeover: bool) -> Hello | Failure:
        """Who is asking. RunInUseError while somebody else's trainers are alive or about to join, unless `takeover`."""
        service = self._service
        if service.failed is not None:
            return service.failed
        now_s, old = time.monotonic(), self._owner
        if owner.identity != old.identity and not takeover:
            training = service.in_use
            if training or now_s - max(self._owner_s, service.last_in_use_s) < STARTING_S:
                return Failure(
                    error="RunInUseError",
                    message=f"the run is in use by Ray job {old.job_id} on node {old.node[:8]}; pass takeover=True to end it",
                    details={**dataclasses.asdict(old), "starting": not training},
                )
        if owner != old:
            self._kept_owner.put(owner)
        self._owner, self._owner_s = owner, now_s
        return Hello(attempt=service.attempt, pid=os.getpid(), protocol=PROTOCOL, newest_step=service.ledger.newest_step)

    async def ask(self, event: Any) -> Reply:
        return await asyncio.wrap_future(self._service.ask(event))

    async def tell(self, event: Event) -> None:
        self._service.post(event)

    async def left(self, rank: int, world: int) -> None:
        """A trainer, or the driver that asked for a release (as 0 of 1), has read its last reply."""
        self._lefts.add(rank)
        if len(self._lefts) >= world:
            self._left_all.set()

    async def protocol(self) -> int:
        return PROTOCOL

    async def pid(self) -> int:
        return os.getpid()

    async def recoveries(self) -> list[Recovery]:
        return self._service.ledger.recoveries

    async def newest_step(self) -> int:
        return self._service.ledger.newest_step


def _log_to_stderr() -> None:
    """Ray shows an actor's stderr in the driver: calm, one line each."""
    import logging

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("raystate %(levelname)s %(message)s"))
    root = logging.getLogger("raystate")
    root.handlers = [handler]
    root.setLevel(logging.INFO)
    root.propagate = False


class _Kept:
    """A value in Ray's key-value store: it outlives the actor's process, and goes with the cluster."""

    def __init__(self, key: str):
        self._key = key.encode()

    def get(self) -> Any | None:
        raw = _internal_kv_get(self._key)
        return None if raw is None else pickle.loads(raw)

    def put(self, value: Any, *, overwrite: bool = True) -> None:
        _internal_kv_put(self._key, pickle.dumps(value), overwrite=overwrite)

    def delete(self) -> None:
        _internal_kv_del(self._key)


def cluster_token() -> str:
    """A random name of this Ray cluster incarnation, the same in all its processes.

    Ray has no public id of a cluster, so one is kept in its key-value store (tests/cluster notices if that changes).
    """
    kept = _Kept("raystate:cluster")
    kept.put(secrets.token_hex(6), overwrite=False)
    return str(kept.get())


def ensure_coordinator(config: StateConfig, run_hash: str, owner: Owner) -> Any:
    """The run's Coordinator, made if there is none. Its process starts while the caller goes on."""
    return (
        ray.remote(CoordinatorActor)
        .options(
            name=coordinator_name(run_hash),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
        )
        .remote(config, run_hash, owner)
    )


def this_owner(launch: str) -> Owner:
    context = ray.get_runtime_context()
    return Owner(job_id=context.get_job_id(), node=context.get_node_id(), launch=launch)
