"""The two actors that Ray Train starts with each worker group on the controller's node, so that they don't cost a restart its cores.

One is the barrier of `ray.train.report` and of Ray Train's collectives, the other watches for nodes that are drained. Each is a Python
process that imports Ray Train: together 1.5 to 2 s of a core, just when a restarted group loads its programs and its state. So the
next group's barrier is started ahead, and a group's watch once the group trains. What drains before is seen then, and raystate's own
watch, in the Coordinator, runs all the time.
"""

from __future__ import annotations

import logging
from typing import Any

import ray

from raystate.ray_version import ray_internals

with ray_internals():
    from ray.train.v2._internal.callbacks.preemption_callback import PreemptionCallback
    from ray.train.v2._internal.execution.checkpoint.sync_actor import SynchronizationActor
    from ray.train.v2._internal.execution.worker_group import worker_group as ray_worker_group

logger = logging.getLogger(__name__)

_ALIVE_S = 5.0  # for an answer of the barrier that waits
_start_watch = PreemptionCallback.after_worker_group_start


class GroupActors:
    """Of one controller."""

    def __init__(self) -> None:
        self._barriers = _Barriers(SynchronizationActor)
        self._watch: tuple[PreemptionCallback, Any] | None = None  # that is to be started, with its group

    def install(self) -> None:
        """Let this process's controller start them so."""
        actors = self

        def later(callback: PreemptionCallback, group: Any) -> None:
            callback._stop_watcher()  # an earlier group's
            actors._watch = callback, group

        watching: Any = PreemptionCallback
        starting: Any = ray_worker_group
        watching.after_worker_group_start = later
        starting.SynchronizationActor = self._barriers  # what Ray Train's start of a group asks for one

    def group_trains(self) -> None:
        """The newest group has done its first steps: start its watch, and the next group's barrier."""
        watch, self._watch = self._watch, None
        if watch is not None:
            _start_watch(*watch)
        self._barriers.start_ahead()

    def group_ended(self) -> None:
        """It needs no watch any more."""
        self._watch = None

    def close(self) -> None:
        """No group comes any more."""
        self._watch = None
        self._barriers.close()


class _Barriers:
    """In the place of Ray Train's class of actors: `options(…).remote(…)` gives the one that waits, where it was made alike."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._options: dict[str, Any] = {}
        self._asked: tuple[dict[str, Any], dict[str, Any]] | None = None  # for the newest: options and arguments
        self._waiting: Any = None

    def options(self, **options: Any) -> _Barriers:
        self._options = options
        return self

    def remote(self, **arguments: Any) -> Any:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and self._asked == (self._options, arguments) and _is_alive(waiting):
            return waiting
        _end(waiting)
        self._asked = self._options, arguments
        return self._kind.options(**self._options).remote(**arguments)

    def start_ahead(self) -> None:
        if self._waiting is None and self._asked is not None:
            options, arguments = self._asked
            self._waiting = self._kind.options(**options).remote(**arguments)

    def close(self) -> None:
        waiting, self._waiting = self._waiting, None
        _end(waiting)


def _is_alive(barrier: Any) -> bool:
    try:
        ray.get(barrier.get_counter.remote(), timeout=_ALIVE_S)
    except Exception as error:
        logger.debug("the barrier that waits is not used: %s: %s", type(error).__name__, error)
        return False
    return True


def _end(barrier: Any) -> None:
    if barrier is not None:
        ray.kill(barrier)
