"""Nodes that Ray drains: a preemption that a cloud announces to Ray, `ray drain-node`, SIGTERM to `ray start --block`.

Ray has no public call for it. Ray Train's own watch and Ray Serve use this one; tests/cluster/test_train_internals.py checks it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from raystate.actors.rays import state
from raystate.core.formats.messages import HostId, StopAsked
from raystate.waits import LOOK_EVERY_S, SAID_AGAIN_S

logger = logging.getLogger("raystate.coordinator")


def draining_nodes() -> dict[HostId, int]:
    """Node id -> when Ray takes the node for gone, milliseconds since 1970; 0: it has no deadline."""
    found: dict[str, int] = state.state.get_draining_nodes()
    return {HostId(node): at_ms for node, at_ms in found.items()}


class DrainWatch:
    """Tells of each node that begins to drain, or gets another deadline, from a thread, until `ended`.

    Args:
        post: takes the news.
        ended: whether its owner has ended, and wants no more news.
    """

    def __init__(self, post: Callable[[StopAsked], None], ended: Callable[[], bool]):
        self._post = post
        self._ended = ended
        self._told: dict[HostId, int] = {}
        self._trouble_s = float("-inf")

    def start(self) -> None:
        threading.Thread(target=self._run, name="raystate-drain", daemon=True).start()

    def _run(self) -> None:
        while not self._ended():
            try:
                self.look()
            except Exception as error:  # Ray's head is out of reach for a while, say
                if time.monotonic() - self._trouble_s >= SAID_AGAIN_S:
                    self._trouble_s = time.monotonic()
                    logger.warning("Ray does not say which nodes it drains: %s: %s", type(error).__name__, error)
            time.sleep(LOOK_EVERY_S)

    def look(self) -> None:
        """Look once."""
        draining, now_ms = draining_nodes(), time.time() * 1000
        for node, at_ms in draining.items():
            if self._told.get(node) != at_ms:
                left_s = (at_ms - now_ms) / 1000
                # The deadline was set by another node's clock: one that is over says nothing, the node is still there.
                within_s = left_s if at_ms and left_s > 0 else None
                self._post(StopAsked(host=node, within_s=within_s, reason="Ray drains it"))
        self._told = draining  # one that is not drained any more may be drained again
