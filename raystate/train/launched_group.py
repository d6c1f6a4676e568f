"""The worker group that trains now: its workers, and how it ends."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group, remove_placement_group

from raystate.observe.ends import End, Told
from raystate.train import endings
from raystate.waits import MOMENT_S

logger = logging.getLogger(__name__)
_NOTHING = Told(has_joined=False)


class LaunchedGroup:
    """The newest worker group of a run.

    Attributes:
        name: a token that no other group has; "": there is no group.
        workers: Ray Train's handles, by rank.
        before: pids of the workers of the group before, by node.
        failures: by rank, as Ray Train's poll and the workers tell them.
        told: what the Coordinator knew of them.
    """

    def __init__(self, run_hash: str, name: str = "", before: Mapping[str, Sequence[int]] | None = None):
        self._run_hash = run_hash
        self.name = name
        self.before = before or {}
        self.workers: list[Any] = []
        self.failures: dict[int, End] = {}
        self.told = _NOTHING
        self._placement: Any = None  # ObjectRef of its placement group

    def begin(self, workers: Sequence[Any]) -> None:
        """Its processes are there."""
        self.forget()
        pids: dict[str, list[int]] = {}
        for worker in self.workers:
            pids.setdefault(worker.metadata.node_id, []).append(worker.metadata.pid)
        self.before = pids
        self.name, self.workers = secrets.token_hex(4), list(workers)
        self._placement = workers[0].execute_async(get_current_placement_group)

    def forget(self) -> None:
        """It has ended, and that is dealt with."""
        self.name, self.failures, self.told = "", {}, _NOTHING

    def has_failed(self, statuses: Mapping[int, Any]) -> bool:
        """Whether a worker has, by Ray Train's poll."""
        self.failures |= endings.failures(statuses)
        return bool(self.failures)

    def ask_who_failed(self) -> None:
        """Of the workers, and of the Coordinator, before the workers that live are ended."""
        if all(end.error is not None for end in self.failures.values()):
            self.failures |= endings.late_failures(self.workers, set(self.failures), grace_s=MOMENT_S)
        self.ask()
        if all(end.kind == "missing" for end in self.told.ends):
            # On a busy machine the Coordinator may be late; a survivor may have raised what led to a death.
            late = endings.late_failures(self.workers, set(self.failures), grace_s=MOMENT_S, once=True)
            if late:
                self.failures |= late
                self.ask(within_s=0.0)

    def ask(self, *, within_s: float = MOMENT_S) -> None:
        """The Coordinator. A question without time to look who leaves keeps what an earlier one has learnt of that."""
        leaving = self.told.leaving
        told = endings.told(self._run_hash, self.name, self.failures, within_s=within_s)
        self.told = dataclasses.replace(told, leaving=told.leaving | leaving)

    def end_workers(self) -> None:
        """Kill them all: they wait for the dead rank in a collective, and Ray would wait for them (5 s, or 30 s)."""
        for worker in self.workers:
            ray.kill(worker.actor)

    def remove_placement(self) -> None:
        """Ray keeps the resources of a group that fails before its start."""
        placement, self._placement = self._placement, None
        if placement is not None:
            try:
                remove_placement_group(ray.get(placement, timeout=MOMENT_S))
            except Exception as error:  # the worker was dead before it could say; or the group is gone already
                logger.debug("could not release a placement group: %s", error)
