"""What the launcher tells people, and the run's Coordinator, if there is one now.

No answer is waited for, and nothing is lost if a message doesn't arrive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence, Set
from typing import Any

import ray
from ray.exceptions import RayError

from raystate.actors.naming import coordinator_name, find_actor
from raystate.actors.release import release_of
from raystate.core.formats.messages import HostId, StopAsked, TrainerExited
from raystate.core.formats.names import Lineage
from raystate.observe.ends import End
from raystate.waits import AT_ONCE_S


def _tell(run_hash: str, method: str, *args: Any) -> bool:
    coordinator = find_actor(coordinator_name(run_hash))
    if coordinator is not None:
        getattr(coordinator, method).remote(*args)
    return coordinator is not None


def expect(run_hash: str, nodes: Set[str]) -> bool:
    """Let the HostActors of nodes that are new to the run start while its trainers start there. Whether anybody was told."""
    return bool(nodes) and _tell(run_hash, "expect", tuple(sorted(nodes)))


def prepare(run_hash: str, nodes: Set[str]) -> None:
    """Let a HostActor wait on each of these nodes, which may be needed, and on no other."""
    _tell(run_hash, "prepare", tuple(sorted(nodes)))


def ask_to_grow(run_hash: str, group: str, reason: str) -> None:
    """Have the ranks of this worker group stop at one step, to go on with more. It is asked again if they don't."""
    _tell(run_hash, "tell", StopAsked(reason=reason, within_s=None, group=group))


def returned(run_hash: str, group: str, nodes: Sequence[str], statuses: Mapping[int, Any]) -> None:
    """On which ranks the training function has returned, while it runs on others, which may wait for them.

    At each poll: the Coordinator may not know the group yet.

    Args:
        nodes: by rank.
        statuses: Ray Train's, by rank.
    """
    lineage, why = str(Lineage(0, 0, group)), "its training function has returned"
    for rank in [rank for rank, status in statuses.items() if not status.running]:
        event = TrainerExited(host=HostId(nodes[rank]), lineage=lineage, rank=rank, clean=True, reason=why, returned=True)
        _tell(run_hash, "tell", event)


def not_started(run_hash: str, group: str, cause: str) -> None:
    """This worker group ended before any of its ranks trained."""
    _tell(run_hash, "ended", group, (End(rank=-1, kind="raised", reason=cause),), 0.0)


def stopped(run_hash: str, launch: str) -> None:
    """The driver ends: the run is released, also if it can't wait for that. Known when this returns, unless the Coordinator is slow."""
    coordinator = find_actor(coordinator_name(run_hash))
    if coordinator is not None:
        coordinator.release.remote(launch, release_of(launch, "the driver was stopped"))
        with contextlib.suppress(RayError):  # its calls come in order
            ray.get(coordinator.newest_step.remote(), timeout=AT_ONCE_S)
