"""The network of a schedule: messages are late, lost, doubled and overtaken by others, and nodes can be cut off."""

from __future__ import annotations

import heapq
from random import Random
from typing import Any

from raystate.core.formats.messages import Answer, HostOrder, Settings, Write
from tests.sim.coordinators import CoordinatorProc
from tests.sim.nodes import HEARTBEAT_S, HostProc, Node, Proc
from tests.sim.storage import Storage
from tests.sim.truth import Truth


class Network(Truth):
    """Who hears what, and when."""

    def __init__(self, storage: Storage, settings: Settings, rng: Random):
        super().__init__(storage, settings)
        self.random = rng.random
        self.healed = False
        self.lossy = 0.05  # chance that a message is lost; as much for a double
        self.coordinators: list[CoordinatorProc] = []
        self.heap: list[tuple[float, int, Proc | None, Any, tuple[Any, ...]]] = []
        self.pushed = 0

    def at(self, delay_s: float, fn: Any, *args: Any) -> None:
        """Later."""
        self._push(delay_s, None, fn, args)

    def on(self, proc: Proc, delay_s: float, fn: Any, *args: Any) -> None:
        """Later, in that process: never if it is dead by then, later still if it sleeps."""
        self._push(delay_s, proc, fn, args)

    def _push(self, delay_s: float, proc: Proc | None, fn: Any, args: tuple[Any, ...]) -> None:
        self.pushed += 1
        heapq.heappush(self.heap, (self.now_s + delay_s, self.pushed, proc, fn, args))

    def _deliveries(self) -> int:
        """0: lost, 2: doubled."""
        if self.healed:
            return 1
        chance = self.random()
        return 0 if chance < self.lossy else 2 if chance > 1.0 - self.lossy else 1

    def _delay(self) -> float:
        chance = self.random()
        return 0.01 + 0.1 * chance if chance < 0.9 or self.healed else 1.2 * chance

    def tell(self, actor: HostProc, event: Any) -> None:
        """From a HostActor to the Coordinator."""
        node = actor.node
        if self.cut(node):
            return
        deliveries = self._deliveries()
        if deliveries:
            node.heard_s = self.now_s
        elif self.now_s + HEARTBEAT_S - node.heard_s >= self.settings.host_timeout_s:
            self.weaken(node)  # by its next heartbeat it will be held for dead
        for _ in range(deliveries):
            self.at(self._delay(), self._deliver, event)

    def to_coordinator(self, node: Node, event: Any) -> None:
        if not self.cut(node):
            for _ in range(self._deliveries()):
                self.at(self._delay(), self._deliver, event)

    def _deliver(self, event: Any) -> None:
        current = self.current
        if current is not None and current.alive:
            if current.wake_s > self.now_s:
                self.on(current, 0.0, current.feed, event)
            else:
                current.feed(event)
        if len(self.coordinators) > 1 and not hasattr(event, "ask"):
            # One that was replaced without knowing it still hears some.
            for old in self.coordinators:
                if old is not current and old.alive and not old.over and self.random() < 0.3:
                    self.on(old, 0.0, old.feed, event)

    def hello(self, coordinator: CoordinatorProc, node: Node) -> None:
        """A new Coordinator finds the HostActor by name and asks it to report."""
        actor = node.actor
        if actor is not None:
            self.on(actor, self._delay(), self._hello, actor, coordinator)

    def _hello(self, actor: HostProc, coordinator: CoordinatorProc) -> None:
        if actor.alive and not self.cut(actor.node):
            actor.look()

    def order(self, coordinator: CoordinatorProc, command: HostOrder | Write) -> None:
        """From a Coordinator to a HostActor."""
        node = self.nodes_by_id.get(command.host)
        if node is None or self.cut(node) or node.actor is None or not node.actor.alive:
            return
        for _ in range(self._deliveries()):
            self.on(node.actor, self._delay(), node.actor.feed, command)

    def answer(self, command: Answer) -> None:
        caller = self.callers.get(command.ask)
        if caller is None or not caller.alive or self.cut(caller.node):
            return
        for _ in range(self._deliveries()):
            self.on(caller, self._delay(), caller.reply, command.ask, command.reply)
