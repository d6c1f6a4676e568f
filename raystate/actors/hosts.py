"""The run's HostActors, as its Coordinator calls them."""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from raystate.actors.calling import future_of, own_error
from raystate.actors.host import create_host
from raystate.actors.kv_store import Kept
from raystate.actors.naming import find_actor, find_hosts, host_name
from raystate.config.state_config import StateConfig
from raystate.core.formats.messages import HostId, HostOrder, Write
from raystate.machine.own_time import own_time
from raystate.runtime.link import Unreachable
from raystate.waits import AGAIN_S, AT_ONCE_S, ENDS_S, HOST_RESTARTS_S, UNFIT_NODE_S

logger = logging.getLogger("raystate")


def waiting_key(run_hash: str) -> str:
    """Of the nodes whose HostActors only wait, in Ray's key-value store."""
    return f"raystate:waiting:{run_hash}"


class RayHosts:
    """`Hosts` over Ray actors: every call returns at once.

    Args:
        job: whose driver shows their lines.
        ahead: nodes that had no HostActor; the process that has made this Coordinator makes one
            there meanwhile, which waits.
    """

    def __init__(self, config: StateConfig, run_hash: str, job: Callable[[], str], ahead: Collection[HostId] = ()):
        self._config = config
        self._run_hash = run_hash
        self._job = job
        self._found = frozenset(find_hosts(run_hash)).difference(ahead)  # when this process started
        self._handles: dict[HostId, Any] = {}
        self._lock = threading.Lock()  # `prepare` runs beside everything else
        self._closed = False
        # Nodes whose HostActors only wait so far: no trainer of the run has needed them. Kept for a
        # Coordinator that is started again: it must not take them for hosts of the run, and one
        # whose node is gone can't be asked.
        self._kept_waiting = Kept(waiting_key(run_hash))
        self._waiting: frozenset[HostId] = (self._kept_waiting.get() or frozenset()).union(ahead)
        self._giving_up: set[HostId] = set()  # of those
        self._unfit: dict[HostId, float] = {}  # until when none is made to wait there
        self._writes: dict[tuple[HostId, str], Future[Any]] = {}  # by save: an order is given again, and takes one call

    def keep_waiting(self) -> None:
        """This Coordinator has the run: if it is killed, the one that comes back has to know those that were made ahead."""
        if self._waiting:
            self._kept_waiting.put(self._waiting)

    def _set_waiting(self, waiting: frozenset[HostId]) -> None:
        if waiting != self._waiting:
            self._kept_waiting.put(waiting)
            self._waiting = waiting  # not before it is kept

    def _handle(self, host: HostId) -> Any | None:
        if host not in self._handles:
            handle = find_actor(host_name(self._run_hash, host))
            if handle is None:
                return None
            self._handles[host] = handle
        return self._handles[host]

    def prepare(self, hosts: Collection[HostId]) -> None:
        """Have HostActors wait on these nodes, and on no others. To be said again and again: what fails once is done the next time."""
        with self._lock:
            if self._closed:
                return
            for host in (self._waiting - {*hosts}) | self._giving_up:
                self._handles.pop(host, None)
                if (idle := find_actor(host_name(self._run_hash, host))) is not None:
                    self._giving_up.add(host)
                    idle.give_up.remote()
                else:
                    self._giving_up.discard(host)
                    self._set_waiting(self._waiting - {host})
            now_s = own_time()
            free = [host for host in hosts if host not in self._giving_up and now_s >= self._unfit.get(host, 0.0)]
            missing = [host for host in free if self._handle(host) is None]
            self._set_waiting(self._waiting.union(missing))  # before they are there
            for host in missing:
                made = create_host(self._config, self._run_hash, host)
                made.preload.remote().future().add_done_callback(functools.partial(self._prepared, host, made))

    def _prepared(self, host: HostId, made: Any, preloaded: Future[Any]) -> None:
        error = preloaded.exception()
        if isinstance(error, (ActorDiedError, RayTaskError)) and host in self._waiting - self._giving_up and not self._closed:
            self._handles.pop(host, None)
            made.give_up.remote()
            if host not in self._unfit:
                logger.warning("no HostActor can wait on node %s: %s", host[:8], last_line(error))
            self._unfit[host] = own_time() + UNFIT_NODE_S

    def _waits_no_more(self, host: HostId) -> None:
        """It is a host of the run."""
        if host not in self._waiting:
            return
        with self._lock:
            self._giving_up.discard(host)
            self._set_waiting(self._waiting - {host})

    def known(self) -> tuple[HostId, ...]:
        """The hosts that were the run's when this process started."""
        return tuple(host for host in find_hosts(self._run_hash) if host not in self._waiting)

    def ensure(self, host: HostId, on_error: Callable[[str], None]) -> None:
        self._waits_no_more(host)
        self._open(host, on_error, own_time() + HOST_RESTARTS_S)

    def _open(self, host: HostId, on_error: Callable[[str], None], until_s: float, *, anew: bool = False) -> None:
        """Until then. `anew`: not the actor that is there now; it ends."""

        def later(*, anew: bool) -> None:
            timer = threading.Timer(AGAIN_S, self._open, (host, on_error, until_s), {"anew": anew})
            timer.daemon = True
            timer.start()

        if anew and own_time() < until_s and find_actor(host_name(self._run_hash, host)) is not None:
            later(anew=True)
            return
        with self._lock:  # `close_all` ends it, or it is not made
            if self._closed:
                return
            # Each time: the one that was there may have been ended, or have failed to start.
            handle = self._handles[host] = create_host(self._config, self._run_hash, host)
        handle.show_to.remote(self._job(), logger.level)

        def check(future: Future[Any]) -> None:
            error = future.exception()
            if error is None or self._handles.get(host) not in (handle, None):
                return
            self._handles.pop(host, None)
            restarts = isinstance(error, ActorUnavailableError)  # killed, and being started again
            gave_up = isinstance(error, ActorDiedError) and not anew  # it waited, in vain until now
            if (restarts or gave_up) and own_time() < until_s:
                later(anew=anew or gave_up)
            elif restarts:
                on_error(f"its HostActor has been starting again for {HOST_RESTARTS_S:g} s; its own lines in the log say why")
            else:
                on_error(last_line(error))

        handle.open.remote().future().add_done_callback(check)

    def order(self, order: HostOrder) -> None:
        # It may have found what it held before it was killed: then it opened by itself.
        self._waits_no_more(order.host)
        handle = self._handle(order.host)
        if handle is not None:
            handle.order.remote(order)

    def write(self, order: Write) -> Future[Any]:
        handle = self._handle(order.host)
        if handle is None:
            failed: Future[Any] = Future()
            failed.set_exception(Unreachable(f"host {order.host[:8]} has no HostActor"))
            return failed
        key = (order.host, order.save)
        if key not in self._writes:
            # A call takes a thread of the HostActor's until the share is written.
            self._writes[key] = under_way = future_of(handle.write.remote(order))
            under_way.add_done_callback(lambda _: self._writes.pop(key, None))
            return under_way
        return self._writes[key]

    def _close(self) -> dict[HostId, Any]:
        """Make no more of them. Returns all that there are."""
        with self._lock:
            self._closed = True
        found = {host: self._handle(host) for host in {*self._handles, *find_hosts(self._run_hash)}}
        return {host: handle for host, handle in found.items() if handle is not None}

    def close_empty(self) -> None:
        handles = self._close()
        calls = {host: handle.close_empty.remote().future() for host, handle in handles.items()}
        concurrent.futures.wait(calls.values(), timeout=AT_ONCE_S)
        # Those that were made for this start may still be starting, and would not hear it after our
        # end. No trainer has slots in them.
        own = {call: host for host, call in calls.items() if host not in self._found}
        for call in concurrent.futures.wait(own, timeout=ENDS_S).not_done:
            ray.kill(handles[own[call]], no_restart=True)

    def end_waiting(self) -> None:
        """End those that only wait, at once: this Coordinator has not got the run, and ends."""
        with self._lock:
            self._closed = True
        for host in self._waiting:
            if (idle := find_actor(host_name(self._run_hash, host))) is not None:
                ray.kill(idle, no_restart=True)
        self._kept_waiting.delete()

    def close_all(self, *, remove_arena: bool) -> None:
        handles = self._close()
        deadline_s = own_time() + ENDS_S
        left = [handle for host, handle in handles.items() if host not in self._waiting]
        # They have nothing to close, unless one was made a host behind our back.
        idle = [handles[host].close.remote(remove_arena).future() for host in self._waiting & handles.keys()]
        while left and (wait_s := deadline_s - own_time()) > 0:
            calls = {handle.close.remote(remove_arena).future(): handle for handle in left}
            done, _ = concurrent.futures.wait(calls, timeout=wait_s)
            # One that was killed a moment ago is being started again: only then it can remove its
            # arena.
            left = [calls[call] for call in done if isinstance(call.exception(), ActorUnavailableError)]
            if left:
                time.sleep(AGAIN_S)
        concurrent.futures.wait(idle, timeout=AT_ONCE_S)
        for handle in handles.values():
            ray.kill(handle, no_restart=True)
        # Once these calls have ended, no host writes any more.
        concurrent.futures.wait(list(self._writes.values()), timeout=AT_ONCE_S)
        self._kept_waiting.delete()  # only here: HostActors that are not ended go on waiting, and the next Coordinator has to know


def last_line(error: BaseException) -> str:
    """Why a call failed: raystate's own words, or Ray's on why an actor is dead, whose last line is the exception where it raised."""
    if (own := own_error(error)) is not None:
        return own.message
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
