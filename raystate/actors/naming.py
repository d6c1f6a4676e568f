"""Names of the actors of a run, and how to find them.

All live in the Ray namespace `raystate`, named by the run's hash (of canonical storage URL and run name), HostActors also by node.
"""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.util import list_named_actors

from raystate.core.formats.messages import HostId
from raystate.machine.own_time import own_time
from raystate.observe.record_codec import messages_format
from raystate.waits import AGAIN_S

NAMESPACE = "raystate"
# Raise it when an actor's methods or their other arguments change, or a message changes only its meaning. (tests/house/test_messages.py)
CALLS = 42


def protocol() -> str:
    """What this version's trainers, HostActors and Coordinators say to each other. Actors that speak another are replaced."""
    return f"{CALLS}.{messages_format()}"


def coordinator_name(run_hash: str) -> str:
    return f"coordinator-{run_hash}"


def host_name(run_hash: str, host: HostId) -> str:
    return f"host-{run_hash}-{host}"


def find_actor(name: str) -> Any | None:
    """The actor's handle, or None if Ray knows no living actor of that name."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def find_hosts(run_hash: str) -> tuple[HostId, ...]:
    """The nodes on which a HostActor of this run is alive (or being restarted by Ray)."""
    prefix = host_name(run_hash, HostId(""))
    return tuple(HostId(name.removeprefix(prefix)) for name in _living() if name.startswith(prefix))


def find_coordinators() -> list[str]:
    """Names of the living Coordinators of all runs of the cluster."""
    prefix = coordinator_name("")
    return sorted(name for name in _living() if name.startswith(prefix))


def run_actors(run_hash: str) -> list[str]:
    """Names of all living actors of this run."""
    coordinator, prefix = coordinator_name(run_hash), host_name(run_hash, HostId(""))
    return sorted(name for name in _living() if name == coordinator or name.startswith(prefix))


def _living() -> list[str]:
    """Names of all living actors of all runs."""
    actors: list[Any] = list_named_actors(all_namespaces=True)  # dicts then, although Ray's type says str
    return [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]


def wait_until_gone(run_hash: str, timeout_s: float) -> bool:
    """Whether all actors of the run are gone within `timeout_s`."""
    deadline_s = own_time() + timeout_s
    while run_actors(run_hash):
        if own_time() > deadline_s:
            return False
        time.sleep(AGAIN_S)
    return True
