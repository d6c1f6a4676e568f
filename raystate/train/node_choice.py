"""Where the workers of a run go: to the nodes that hold its snapshots, and to none that goes away."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from raystate.actors.draining import draining_nodes
from raystate.train import bundles, nodes, telling
from raystate.train.policy import pinned_nodes
from raystate.waits import MOMENT_S, PINNED_START_S


class NodeChoice:
    """The nodes of a run's worker groups.

    Attributes:
        nodes: node id by rank, of the newest group.
        leaving: nodes that Ray Train was told would go away.
        leaving_hosts: the same by the Coordinator, when the last group ended.
        pins: node id by rank for the next group; None: any node. Empty: nothing is said.
        pins_failed: the last group found no place with its pins.
    """

    def __init__(self) -> None:
        self.nodes: list[str] = []
        self.leaving: frozenset[str] = frozenset()
        self.leaving_hosts: frozenset[str] = frozenset()
        self.pins: list[str | None] = []
        self.pins_failed = False
        self._expected: frozenset[str] = frozenset()  # nodes that the Coordinator was told of before
        self._scaling: Any = None  # the controller's ScalingConfig
        self._own_selector: Any = None  # the user's label selector in it
        self._start_timeout: str | None = None  # the user's setting

    def begin(self, scaling: Any) -> None:
        """The controller starts with this ScalingConfig."""
        self._scaling, self._own_selector = scaling, scaling.label_selector
        self._start_timeout = os.environ.get(bundles.START_TIMEOUT)

    def choose(self, num_workers: int, *, spares: Sequence[str]) -> None:
        """Pin the next group's workers.

        Args:
            spares: nodes with processes that wait.
        """
        self.pins = []
        self._scaling.label_selector = self._own_selector
        if self.nodes and not self._scaling.use_tpu and not self.pins_failed:
            leaving = self.all_leaving()
            usable = nodes.reachable(frozenset(self.nodes)) - leaving
            ready = nodes.reachable(frozenset(spares)) - leaving
            self.pins = pinned_nodes(self.nodes, usable, num_workers, [node for node in spares if node in ready])
            avoid = (frozenset(self.nodes) - usable) | leaving
            self._scaling.label_selector = nodes.selectors(self.pins, own=self._own_selector, avoid=avoid)
        if self.pins:
            allowed_s = float(self._start_timeout or PINNED_START_S)
            os.environ[bundles.START_TIMEOUT] = str(min(allowed_s, PINNED_START_S))
        elif self._start_timeout is None:
            os.environ.pop(bundles.START_TIMEOUT, None)
        else:
            os.environ[bundles.START_TIMEOUT] = self._start_timeout

    def wait_for_room(self, resources: Mapping[str, float]) -> None:
        """A moment, on the nodes that the next group is pinned to: the last one's processes are just ending there."""
        if pinned_to := [node for node in self.pins if node is not None]:
            nodes.wait_for_room(pinned_to, resources, deadline_s=MOMENT_S)

    def room_elsewhere(self) -> dict[str, int]:
        """How many workers have room on each node without one."""
        return nodes.places_elsewhere(self._scaling._resources_per_worker_not_none, group=self.nodes, own=self._own_selector)

    def expect(self, run_hash: str, places: Sequence[str]) -> None:
        """Tell the Coordinator of nodes that are new to the run."""
        new = frozenset(places) - frozenset(self.nodes) - self._expected
        if telling.expect(run_hash, new):
            self._expected |= new

    def all_leaving(self) -> frozenset[str]:
        """Nodes that are known to go away."""
        return self.leaving | self.leaving_hosts | draining_nodes().keys()
