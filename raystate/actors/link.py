"""A trainer's calls over Ray."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from raystate.actors.admission import enter, this_owner
from raystate.actors.blame import raised
from raystate.actors.calling import answer_of, call_all
from raystate.actors.coordinator import ensure_coordinator
from raystate.actors.exporting import this_process
from raystate.actors.naming import coordinator_name, find_actor, host_name, wait_until_gone
from raystate.config.state_config import StateConfig
from raystate.core.formats.errors import RaystateError
from raystate.core.formats.messages import HostId, Joined, Progress, Reply, TrainerExited
from raystate.machine.own_time import own_time
from raystate.runtime.host.doorbell import Bell, Hello
from raystate.runtime.link import Gone, HostCall, Unreachable
from raystate.waits import ENDS_S, RETRY_FIRST_S, SOON_S

logger = logging.getLogger("raystate")


class RayLink:
    """See `runtime.link.Link`.

    Args:
        config: of the run.
        run_hash: names its actors.
        launch: the same for all starts of one launcher; None: this process is its own.
        rank: for messages.
    """

    def __init__(self, config: StateConfig, run_hash: str, launch: str | None, rank: int):
        self.host = HostId(ray.get_runtime_context().get_node_id())
        self._config = config
        self._run_hash = run_hash
        self._rank = rank
        self._job = ray.get_runtime_context().get_job_id()
        this_process.begin(config.run)
        self._owner = this_owner(launch or f"{self.host}-{os.getpid()}")

    def check(self) -> None:
        if not ray.is_initialized() or ray.get_runtime_context().get_job_id() != self._job:
            raise RaystateError(
                f"rank {self._rank}: this process has left Ray (ray.shutdown()), and with it run {self._config.run!r}: call close() "
                "before that. A new StateManager begins at the newest step that is left",
                rank=self._rank,
            )

    def _find(self, name: str) -> Any | None:
        self.check()  # Ray's calls would join any cluster that there is, or start one
        return find_actor(name)

    def enter(self, *, takeover: bool) -> None:
        enter(self._config, self._run_hash, self._owner, takeover=takeover)

    def ask(self, event: Any, timeout_s: float) -> Reply:
        coordinator = self._find(coordinator_name(self._run_hash))
        if coordinator is None and not isinstance(event, Joined):
            # Ray starts a killed Coordinator again; one that was ended on purpose stays ended.
            raise Gone(f"the Coordinator of run {self._config.run!r} is gone (released or taken over)")
        if coordinator is None:
            coordinator = ensure_coordinator(self._config, self._run_hash, self._owner)
        try:
            return ray.get(coordinator.ask.remote(event), timeout=timeout_s)
        except (RayActorError, GetTimeoutError) as error:
            raise Unreachable(type(error).__name__) from None

    def bell(self, arena_path: Path, hello: Hello) -> Bell:
        return Bell(arena_path, hello)

    def failed(self, event: TrainerExited, error: BaseException) -> None:
        # With the exception: the launcher may find this process ended before it has read it there.
        coordinator = self._find(coordinator_name(self._run_hash))
        if coordinator is not None:
            coordinator.failed.remote(event, raised(event.rank, error))

    def tell(self, progress: Progress) -> None:
        coordinator = self._find(coordinator_name(self._run_hash))
        if coordinator is not None:
            coordinator.tell.remote(progress)

    def call_host(self, host: HostId, method: str, timeout_s: float, kwargs: dict[str, Any]) -> Any:
        actor = self._find(host_name(self._run_hash, host))
        if actor is None:
            raise Unreachable(f"no HostActor on node {host[:8]}")
        return answer_of(getattr(actor, method).remote(**kwargs), timeout_s)

    def call_hosts(self, calls: Sequence[HostCall], timeout_s: float) -> Iterator[tuple[int, Any]]:
        return call_all(calls, lambda host: self._find(host_name(self._run_hash, host)), timeout_s)

    def left(self, rank: int, world: int) -> None:
        coordinator = self._find(coordinator_name(self._run_hash))
        if coordinator is not None:
            coordinator.left.remote(rank, world)
        if rank == 0:
            wait_until_gone(self._run_hash, ENDS_S)

    def clock(self) -> float:
        return own_time()

    def node_clock(self) -> float:
        return time.monotonic()

    def rest(self, condition: threading.Condition | None = None, seconds: float = 0.002) -> None:
        if condition is None:
            time.sleep(seconds)
            return
        with condition:
            condition.wait(seconds)

    def spawn(
        self, turn: Callable[[], bool], condition: threading.Condition, name: str, pause_s: float = SOON_S
    ) -> Callable[[], None]:
        ended = threading.Event()

        def run() -> None:
            while not ended.is_set():
                try:
                    rest_s = 0.0 if turn() else pause_s
                except Exception:  # a thread that ended here would be missed only by the deadlines of saves
                    logger.exception("%s: a turn failed; the next one is in %g s", name, RETRY_FIRST_S)
                    rest_s = RETRY_FIRST_S
                if rest_s:
                    with condition:
                        if not ended.is_set():
                            condition.wait(rest_s)

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()

        def end() -> None:
            ended.set()
            with condition:
                condition.notify_all()
            thread.join(timeout=ENDS_S)

        return end
