"""Striking what runs on a Ray: its processes, its nodes and raystate's actors. The drill, the demo, the benchmarks and the tests share it.

It strikes; when, and what must hold afterwards, is the caller's.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import psutil

from jobs.arenas import remove_arenas

NAMESPACE = "raystate"  # Ray's, of the runs' actors
GONE_S = 1200.0  # for killed processes to be gone, and for a Ray to start, on a machine that does much else
ANSWER_S = 5.0

Started = TypeVar("Started")


def kill_all(doomed: Iterable[psutil.Process]) -> None:
    """SIGKILL; returns when they are gone."""
    doomed = list(doomed)
    for process in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(doomed, timeout=GONE_S)


def family(pid: int) -> list[psutil.Process]:
    """A process and all that it has started; none if it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            return [process, *process.children(recursive=True)]
    return []


def kill_family(pid: int) -> None:
    """SIGKILL a process and all that it has started."""
    kill_all(family(pid))


def start_ray(start: Callable[[], Started]) -> Started:
    """What `start` gives, which starts a cluster or a node; again if Ray took longer than it waits itself: 30 s, by no setting more."""
    import ray

    deadline_s = time.monotonic() + GONE_S
    here = psutil.Process()
    while True:
        before = here.children()
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error) or time.monotonic() > deadline_s:
                raise
            if not ray.is_initialized():
                ray.shutdown()
            for process in here.children():
                if process not in before:
                    kill_family(process.pid)


def raylet_of(node: Any) -> int:
    """The pid of a node of `ray.cluster_utils.Cluster`."""
    return node.all_processes["raylet"][0].process.pid


def lose_node(cluster: Any, node: Any, also: Iterable[psutil.Process] = ()) -> None:
    """What a vanished machine takes with it: the raylet, all that it has started, and what it had in shared memory.

    Args:
        also: processes of the node that its raylet no longer knows.
    """
    kill_all({*family(raylet_of(node)), *also})
    remove_arenas(node.node_id)
    cluster.remove_node(node, allow_graceful=False)


def drain(address: str, node_id: str, *, within_s: float) -> None:
    """What a preempted node's cloud has Ray do."""
    import ray._raylet as raylet  # as `ray drain-node` does, which takes seconds to start
    from ray.core.generated import autoscaler_pb2

    messages: Any = autoscaler_pb2
    gcs: Any = raylet
    reason = messages.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    until_ms = int((time.time() + within_s) * 1000)
    accepted, why = gcs.GcsClient(address=address).drain_node(node_id, reason, "preemption", until_ms)
    if not accepted:
        raise RuntimeError(f"Ray refuses to drain node {node_id}: {why}")


def actors() -> list[str]:
    """The names of the living actors of all runs."""
    from ray.util import list_named_actors

    found: Any = list_named_actors(all_namespaces=True)  # dicts then, although Ray's type says str
    return sorted(actor["name"] for actor in found if actor["namespace"] == NAMESPACE)


def place_of(name: str, timeout_s: float = ANSWER_S) -> tuple[str, int] | None:
    """(node, pid) of an actor of raystate's, if it answers."""
    import ray

    def where(_actor: object) -> tuple[str, int]:  # here, so that it travels by value: the actor can't import this file
        return ray.get_runtime_context().get_node_id(), os.getpid()

    try:
        actor: Any = ray.get_actor(name, namespace=NAMESPACE)
        return ray.get(actor.__ray_call__.remote(where), timeout=timeout_s)
    except Exception:  # dead, stopped, of an older version, or too busy
        return None
