"""The HostActor: one per node and run, detached, pinned to its node. Neither jax nor orbax is imported here."""

from __future__ import annotations

import importlib
import logging
import os
import platform
import secrets
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import exit_actor
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raystate import log_lines
from raystate.actors.calling import answer_of
from raystate.actors.local_ray import at_own_priority
from raystate.actors.log_routing import show_to
from raystate.actors.naming import NAMESPACE, coordinator_name, find_actor, host_name, protocol
from raystate.actors.restarted import begin, is_restarted
from raystate.core.formats.errors import RaystateError
from raystate.core.formats.messages import Event, HostId, HostOrder, StopAsked, Write
from raystate.machine.priority import give_way
from raystate.runtime.link import Unreachable
from raystate.storage.url import storage_kind
from raystate.waits import RETRY_LAST_S, SIGTERM_S

if TYPE_CHECKING:
    from raystate.config.state_config import StateConfig
    from raystate.runtime.coordinator.one_storage import Claim
    from raystate.runtime.host.loop import HostLoop
    from raystate.runtime.host.notices import Notice

HOST_THREADS = 16  # calls served at once: writes and fetches take long, advice must not wait behind them

logger = logging.getLogger("raystate")


class HostActor:
    """A thin shell: the core machine decides, `HostLoop` carries out, this class makes it callable.

    It is no host of the run until somebody calls `open`, or what a host has to do. Everything it owns lies in the arena, so that Ray
    can restart it after a kill: the new process adopts what the old one held.
    """

    def __init__(
        self,
        *,
        run: str,
        run_hash: str,
        storage_url: str,
        host: HostId,
        host_memory: str | int,
        arena_dir: str | None,
        domain_labels: tuple[str, ...] = (),
        metadata_url: str | None = None,
    ):
        log_lines.begin(run)
        self._run = run
        self._run_hash = run_hash
        self._storage_url = storage_url
        self._host = host
        self._parameters = (host_memory, arena_dir, domain_labels, metadata_url)
        self._coordinator: Any = None
        self._opening = threading.Lock()
        self._opened: HostLoop | None = None
        self._first_index = 0  # of slot sets: trainers may still name those of an arena that was removed
        self._gives_up = False
        self._notice: Notice | None = None
        self._before_sigterm: Any = signal.signal(signal.SIGTERM, self._on_sigterm)  # here: only a process's main thread may
        if is_restarted():
            begin(self._take_up, on_failure=self._start_failed, pause_at_most_s=RETRY_LAST_S)

    def _take_up(self) -> None:
        """Open again what a killed one had opened."""
        from raystate.arena import arena_path, default_root

        if arena_path(default_root(self._parameters[1]), self._run_hash, self._host).exists():
            self.open()

    def _start_failed(self, error: BaseException, pause_s: float) -> None:
        logger.warning(
            "host %s is of no use to run %r yet: its HostActor was started again, and can't take up what it held (%s: %s); "
            "another try in %g s",
            self._host[:8], self._run, type(error).__name__, error, pause_s,
        )  # fmt: skip

    def open(self) -> None:
        """Be a host of the run; nothing, if it is one already.

        Raises:
            RaystateError: there is no room for an arena here, or the storage is unusable.
        """
        with self._opening:
            if self._gives_up:
                exit_actor()
            if self._opened is None:
                self._open()

    def preload(self, *, gives_way: bool = True) -> None:
        """Import what `open` needs, and see whether it can have an arena here. `gives_way`: to a training here; False: a caller waits.

        Raises:
            ConfigError: there is no such directory as arena_dir on this node.
        """
        with ThreadPoolExecutor(1, initializer=give_way if gives_way else None) as pool:
            pool.submit(_preload, self._storage_url, self._parameters[1]).result()

    def give_up(self) -> None:
        """End this actor for good, if it still only waits: not if somebody is opening it."""
        if not self._opening.acquire(blocking=False):
            return
        try:
            if self._opened is None:
                self._gives_up = True
                exit_actor()
        finally:
            self._opening.release()

    def _open(self) -> None:
        from raystate.arena import HostArena, arena_path, default_root, parse_memory, sweep
        from raystate.arena.vanished import why_files_may_vanish
        from raystate.runtime.host.loop import HostLoop
        from raystate.runtime.host.notices import Notice
        from raystate.storage import open_storage

        host = self._host
        host_memory, arena_dir, domain_labels, metadata_url = self._parameters
        root = default_root(arena_dir)
        if why := why_files_may_vanish(root):
            logger.info("host %s: %s", host[:8], why)
        sweep(root)  # what dead clusters left on this machine
        arena = HostArena.open(
            arena_path(root, self._run_hash, host),
            run=self._run,
            storage=self._storage_url,
            node_id=host,
            cap_bytes=parse_memory(host_memory),
            node_pid=os.getppid(),  # the raylet: while it lives, so may this arena's users
        )
        arena.first_index = self._first_index
        loop = None
        try:
            loop = HostLoop(
                arena=arena,
                storage=open_storage(self._storage_url),
                host=host,
                incarnation=secrets.token_hex(4),
                tell=self._tell,
                peers=RayPeers(self._run_hash),
                domain=_domain(domain_labels),
                machine=platform.node(),
                vanished=self._on_vanished,
            )
            loop.start()
            if self._notice is None:
                self._notice = Notice(
                    lambda within_s, why: self._tell(StopAsked(host=host, within_s=within_s, reason=why)),
                    metadata_url=metadata_url,
                )
                self._notice.start()
        except BaseException:  # it may be tried again in this process
            self._notice = None
            if loop is None:
                arena.close()
            else:
                loop.close(remove_arena=False)
            raise
        self._opened = loop

    def _on_vanished(self, path: Path) -> None:
        threading.Thread(target=self._begin_anew, args=(path,), name="raystate-anew", daemon=True).start()

    def _begin_anew(self, path: Path) -> None:
        """Somebody has removed that file of the arena: as after a death of this process, but with nothing to adopt."""
        from raystate.arena.vanished import vanished_text

        with self._opening:
            old, self._opened = self._opened, None
            if old is not None and not self._gives_up:
                logger.warning("host %s: %s", self._host[:8], vanished_text(path, old.arena.path))
                self._first_index = 1 + max((held.index for held in old.arena.sets), default=-1)
                old.close(remove_arena=False)
                try:
                    self._open()
                except Exception as error:
                    text = "host %s is of no use to run %r until a trainer or the Coordinator calls it again: %s: %s"
                    logger.warning(text, self._host[:8], self._run, type(error).__name__, error)

    def _on_sigterm(self, number: int, frame: Any) -> None:
        """All processes of a node that ends may get it. A host goes with its raylet: until then its
        memory is needed."""

        if self._notice is not None:
            self._notice.notice(SIGTERM_S, "its processes got SIGTERM")
        elif callable(self._before_sigterm):
            self._before_sigterm(number, frame)

    @property
    def _loop(self) -> HostLoop:
        if self._opened is None:
            self.open()
        assert self._opened is not None
        return self._opened

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
            self._coordinator = None  # dead; the next event goes to the one that has its name now

    def pid(self) -> int:
        return os.getpid()

    def protocol(self) -> str:
        return protocol()

    def show_to(self, job_id: str, level: int) -> None:
        show_to(job_id, level)

    def parameters(self) -> tuple[str | int, str | None, tuple[str, ...], str | None]:
        """What it was made with: (host_memory, arena_dir, domain_labels, metadata_url)."""
        return self._parameters

    def allot(self, **request: Any) -> tuple[str, int]:
        return self._loop.allot(**request)

    def piece_head(self, **request: Any) -> Any:
        return self._loop.serving.piece_head(**request)

    def piece_boxes(self, **request: Any) -> Any:
        return self._loop.serving.piece_boxes(**request)

    def piece_chunk(self, **request: Any) -> Any:
        return self._loop.serving.piece_chunk(**request)

    def order(self, order: HostOrder) -> None:
        self._loop.order(order)

    def trainers(self) -> int:
        """How many are connected at this moment. 0, while this is no host of the run."""
        return 0 if self._opened is None else self._opened.trainers()

    def sees(self, claim: Claim) -> bool:
        """Whether what the Coordinator has written appears here. Raises what `open` raises: a trainer needs both."""
        from raystate.runtime.coordinator.one_storage import sees

        self.open()
        return sees(self._storage_url, claim)

    def write(self, order: Write) -> Any:
        return self._loop.write(order).result()

    def close(self, remove_arena: bool) -> None:
        with self._opening:
            self._gives_up = self._opened is None
            if self._opened is not None:
                self._opened.close(remove_arena=remove_arena)

    def close_empty(self) -> None:
        """End this actor for good, and its arena, unless a trainer has or had slots in it."""
        with self._opening:
            if self._opened is not None and self._opened.arena.sets:
                return
            self._gives_up = True
            if self._opened is not None:
                self._opened.close(remove_arena=True)
            exit_actor()


def _preload(storage_url: str, arena_dir: str | None) -> None:
    from raystate.arena import default_root

    for module in ("raystate.runtime.host.loop", "raystate.runtime.host.notices", "raystate.runtime.coordinator.one_storage"):
        importlib.import_module(module)
    storage_kind(storage_url)
    default_root(arena_dir)


def _domain(labels: tuple[str, ...]) -> str:
    """What this node is lost together with: the first of these labels that it has; "": nothing else."""
    here = ray.get_runtime_context().get_node_labels()
    return next((f"{name}={here[name]}" for name in labels if here.get(name)), "")


class RayPeers:
    """Calls of other HostActors of the run; see `runtime.copying.Peers`."""

    def __init__(self, run_hash: str):
        self._run_hash = run_hash

    def call(self, host: HostId, method: str, timeout_s: float, request: dict[str, Any]) -> Any:
        actor = find_actor(host_name(self._run_hash, host))
        if actor is None:
            raise RaystateError(f"no HostActor on node {host[:8]}")
        try:
            return answer_of(getattr(actor, method).remote(**request), timeout_s)
        except Unreachable as error:
            raise RaystateError(f"the HostActor of node {host[:8]} does not answer ({error})") from None


def create_host(config: StateConfig, run_hash: str, host: HostId) -> Any:
    """The node's HostActor of this run, made if there is none. It waits until somebody calls `open`."""
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
            **at_own_priority(),
        )
        .remote(
            run=config.run,
            run_hash=run_hash,
            storage_url=config.storage,
            host=host,
            host_memory=config.host_memory,
            arena_dir=config.arena_dir,
            metadata_url=config.metadata_url,
            domain_labels=config.domain_labels,
        )
    )
