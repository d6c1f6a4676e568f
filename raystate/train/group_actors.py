"""The two actors that Ray Train starts with each worker group on the controller's node, so that they don't cost a restart its cores.

One is the barrier of `ray.train.report` and of Ray Train's collectives, the other watches for nodes that are drained. Each is a Python
process that imports Ray Train: together 1.5 to 2 s of a core, just when a restarted group loads its programs and its state. So the
next group's barrier is started ahead, and a group's watch once the group trains. A node that is
drained before is seen when the watch starts. A run with a `StateManager` has a watch of raystate's
own, in the Coordinator.
"""

from __future__ import annotations

import functools
import logging
from types import SimpleNamespace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError

from raystate.patching import patch
from raystate.train.rays import preemption_callback, worker_group
from raystate.waits import MOMENT_S

logger = logging.getLogger(__name__)

_start_watch = preemption_callback.PreemptionCallback.after_worker_group_start


class GroupActors:
    """One controller's waiting barrier, and the watch that it has yet to start."""

    def __init__(self) -> None:
        self._barriers = _Barriers(worker_group.SynchronizationActor)
        self._watch: tuple[Any, Any] | None = None  # not started yet: the callback and its group

    def install(self) -> None:
        """Patch Ray Train in this process, the controller's."""

        def later(callback: Any, group: Any) -> None:
            callback._stop_watcher()  # an earlier group's
            self._watch = callback, group

        # tests/cluster/test_train_internals.py
        patch(preemption_callback.PreemptionCallback, "after_worker_group_start", later)
        patch(worker_group, "SynchronizationActor", self._barriers)  # what Ray Train's start of a group asks for one

    def group_trains(self, *, ahead: bool) -> None:
        """The newest group has done its first steps: start its watch and, with `ahead`, the next group's barrier."""
        if self._watch is not None:
            _start_watch(*self._watch)
            self._watch = None
        if ahead:
            self._barriers.start_ahead()

    def group_ended(self) -> None:
        """It ended, perhaps before its watch started."""
        self._watch = None

    def close(self) -> None:
        """No group comes any more."""
        self.group_ended()
        self._barriers.close()


class _Barriers:
    """In the place of Ray Train's class of actors: `options(…).remote(…)` gives the one that waits, if it has the same options and
    arguments."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._asked: tuple[dict[str, Any], dict[str, Any]] | None = None  # the newest request's options and arguments
        self._waiting: Any = None

    def options(self, **options: Any) -> Any:
        return SimpleNamespace(remote=functools.partial(self._give, options))

    def _give(self, options: dict[str, Any], **arguments: Any) -> Any:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and self._asked == (options, arguments) and _is_alive(waiting):
            return waiting
        _end(waiting)
        self._asked = options, arguments
        return self._start()

    def _start(self) -> Any:
        assert self._asked is not None
        options, arguments = self._asked
        return self._kind.options(**options).remote(**arguments)

    def start_ahead(self) -> None:
        """Let one like the newest wait."""
        if self._waiting is None and self._asked is not None:
            self._waiting = self._start()

    def close(self) -> None:
        """End the one that waits."""
        waiting, self._waiting = self._waiting, None
        _end(waiting)


def _is_alive(barrier: Any) -> bool:
    try:
        ray.get(barrier.get_counter.remote(), timeout=MOMENT_S)
    except GetTimeoutError:
        return True
    except Exception as error:
        logger.debug("the barrier that waits is not used: %s: %s", type(error).__name__, error)
        return False
    return True


def _end(barrier: Any) -> None:
    if barrier is not None:
        ray.kill(barrier)
