"""The run's HostActors, as its Coordinator calls them."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError

from raystate.actors.host import create_host
from raystate.actors.naming import find_actor, find_hosts, host_name
from raystate.config import StateConfig
from raystate.core.messages import Advice, Copy, EndTrainers, HostId, Invalidate, Write

CLOSE_HOST_TIMEOUT_S = 20.0
CLOSE_AGAIN_S = 0.1
WAITS_S = 0.5  # a HostActor says within it whether it only waits


class RayHosts:
    """`Hosts` over Ray actors: every call returns at once."""

    def __init__(self, config: StateConfig, run_hash: str, job: Callable[[], str]):
        self._config = config
        self._run_hash = run_hash
        self._job = job  # whose driver shows their lines
        self._handles: dict[HostId, Any] = {}
        self._lock = threading.Lock()  # `prepare` beside `close_all`
        self._waiting: set[HostId] = set()  # of whose HostActors nobody has wanted more than that they wait
        self._closed = False
        self._writes: dict[tuple[HostId, str], Future[Any]] = {}  # by save: an order is given again, and takes one call

    def _handle(self, host: HostId) -> Any | None:
        if host not in self._handles:
            handle = find_actor(host_name(self._run_hash, host))
            if handle is None:
                return None
            self._handles[host] = handle
        return self._handles[host]

    def _create(self, host: HostId, *, waits: bool = False) -> Any:
        return create_host(
            run=self._config.run,
            run_hash=self._run_hash,
            storage_url=self._config.storage,
            host=host,
            host_memory=self._config.host_memory,
            arena_dir=self._config.arena_dir,
            metadata_url=self._config.metadata_url,
            domain_labels=self._config.domain_labels,
            waits=waits,
        )

    def prepare(self, hosts: Collection[HostId]) -> None:
        """Have HostActors wait on these nodes, and on no others. Not for an event loop: it waits for answers."""
        with self._lock:
            if self._closed:
                return
            idle = {host: handle for host in self._waiting.difference(hosts) if (handle := self._handle(host)) is not None}
            for host in _who_says_yes({host: handle.give_up.remote() for host, handle in idle.items()}):
                ray.kill(idle[host], no_restart=True)
                self._handles.pop(host, None)
            self._waiting.intersection_update(hosts)
            for host in hosts:
                if self._handle(host) is None:
                    self._waiting.add(host)
                    self._create(host, waits=True).preload.remote()

    def known(self) -> tuple[HostId, ...]:
        """The hosts that were the run's when this process started: those whose HostActors don't say that they only wait."""
        hosts = find_hosts(self._run_hash)
        handles = {host: self._handle(host) for host in hosts}
        # One that an older raystate has left can't wait.
        asked = {host: one.waits.remote() for host, one in handles.items() if one is not None and hasattr(one, "waits")}
        self._waiting = _who_says_yes(asked)
        return tuple(host for host in hosts if host not in self._waiting)

    def ensure(self, host: HostId, on_error: Callable[[str], None]) -> None:
        self._waiting.discard(host)
        # Each time: the one that was there may have been ended, or have failed to start.
        handle = self._handles[host] = self._create(host)

        def check(future: Future[Any]) -> None:
            error = future.exception()
            if error is not None:
                self._handles.pop(host, None)
                on_error((str(error).strip().splitlines() or [type(error).__name__])[-1])

        if hasattr(handle, "show_to"):  # one that an older raystate has left has none
            handle.show_to.remote(self._job())
        start = handle.open if hasattr(handle, "open") else handle.pid
        start.remote().future().add_done_callback(check)

    def _send(self, host: HostId, method: str, *args: Any) -> None:
        handle = self._handle(host)
        if handle is not None:
            getattr(handle, method).remote(*args)

    def advise(self, host: HostId, advice: Advice) -> None:
        self._send(host, "advise", advice)

    def invalidate(self, order: Invalidate) -> None:
        self._send(order.host, "invalidate", order)

    def copy(self, order: Copy) -> None:
        self._send(order.host, "copy", order)

    def end_trainers(self, order: EndTrainers) -> None:
        self._send(order.host, "end_trainers", order)

    def write(self, order: Write) -> Future[Any]:
        handle = self._handle(order.host)
        if handle is None:
            failed: Future[Any] = Future()
            failed.set_exception(RuntimeError(f"host {order.host[:8]} has no HostActor"))
            return failed
        key = (order.host, order.save)
        if key not in self._writes:
            # A call takes a thread of the HostActor's until the share is written.
            self._writes[key] = under_way = handle.write.remote(order).future()
            under_way.add_done_callback(lambda _: self._writes.pop(key, None))
            return under_way
        return self._writes[key]

    def close_all(self, *, remove_arena: bool) -> None:
        with self._lock:
            self._closed = True
        found = {host: self._handle(host) for host in {*self._handles, *find_hosts(self._run_hash)}}
        for host in self._waiting & found.keys():  # it has nothing to close
            if (handle := found.pop(host)) is not None:
                ray.kill(handle, no_restart=True)
        handles = [handle for handle in found.values() if handle is not None]
        deadline_s = time.monotonic() + CLOSE_HOST_TIMEOUT_S
        left = handles
        while left and (wait_s := deadline_s - time.monotonic()) > 0:
            calls = {handle.close.remote(remove_arena).future(): handle for handle in left}
            done, _ = concurrent.futures.wait(calls, timeout=wait_s)
            # One that was killed a moment ago is being started again: until then its arena has nobody who removes it.
            left = [calls[call] for call in done if isinstance(call.exception(), ActorUnavailableError)]
            if left:
                time.sleep(CLOSE_AGAIN_S)
        for handle in handles:
            ray.kill(handle, no_restart=True)


def _who_says_yes(asked: dict[HostId, Any]) -> set[HostId]:
    """Not by ray.get, of which Ray warns in an async actor. `asked`: host -> its answer's ObjectRef."""
    answers = {host: ref.future() for host, ref in asked.items()}
    concurrent.futures.wait(answers.values(), timeout=WAITS_S)
    return {host for host, one in answers.items() if one.done() and one.exception() is None and one.result() is True}
