"""Somebody's own cluster: only processes of the drill's run are struck there, by an actor on each node that sends signals."""

from __future__ import annotations

import os
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

ANSWER_S = 60.0


class Hand:
    """On one node."""

    def send(self, pid: int, number: int) -> bool:
        """A signal; False: there is no such process."""
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    def is_alive(self, pid: int) -> bool:
        """Whether the process is there, and not one that nobody has buried yet."""
        try:
            with open(f"/proc/{pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] not in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return False


class Given:
    """A cluster that runs already.

    Attributes:
        address: of it.
        storage: where the drill's run is kept: a directory that all nodes share, or a bucket.
    """

    simulated = False

    def __init__(self, address: str, storage: str):
        self.address = address
        self.storage = storage
        self._hands: dict[str, Any] = {}

    def start(self) -> None:
        """It has started."""

    def send(self, node: str, pid: int, number: int) -> bool:
        """A signal to a process on that node; False: there is no such process."""
        return ray.get(self._hand(node).send.remote(pid, number), timeout=ANSWER_S)

    def is_alive(self, node: str, pid: int) -> bool:
        """Whether the process runs, or is stopped."""
        return ray.get(self._hand(node).is_alive.remote(pid), timeout=ANSWER_S)

    def _hand(self, node: str) -> Any:
        if node not in self._hands:
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            self._hands[node] = ray.remote(Hand).options(num_cpus=0, max_restarts=-1, scheduling_strategy=there).remote()
        return self._hands[node]

    def left_behind(self, _run_hash: str) -> list[str]:
        """Nobody looks into other machines' shared memory."""
        return []

    def close(self) -> None:
        """Leave it as it was."""
        ray.shutdown()
