"""What the launcher tells people, and the run's Coordinator, if there is one now.

No answer is waited for, and nothing is lost if a message doesn't arrive.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from raystate.actors.naming import coordinator_name, find_actor
from raystate.core.formats.messages import StopAsked
from raystate.runtime.ends import End


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


def not_started(run_hash: str, group: str, cause: str) -> None:
    """This worker group ended before any of its ranks trained."""
    _tell(run_hash, "ended", group, (End(rank=-1, kind="raised", reason=cause),), 0.0)
