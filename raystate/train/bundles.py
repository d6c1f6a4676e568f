"""Starting a worker group's processes, with deadlines.

Ray Train waits for the places of a new group with a deadline, and then for its workers' first
answers with none. When a node is lost in between, Ray looks for another place for its workers. If
there is none, that start would never end. Nor would one whose process hangs as it starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raystate.machine.own_time import own_time
from raystate.patching import patch
from raystate.train.rays import exceptions, worker_group
from raystate.waits import AGAIN_S, STARTS_S

START_TIMEOUT = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"  # the variable of Ray Train's setting
_SOMEWHERE = "CREATED"  # state of a placement group that has all of its places


def install(*, start_s: float) -> None:
    """Let this process's controller start its workers so.

    Args:
        start_s: so long it may take in places that are there: with what Ray downloads and installs before.
    """

    def placed(group: Any, num_workers: int, placement_group: Any, resources_per_worker: dict[str, float]) -> list[tuple[Any, Any]]:
        runtime_env = group._get_worker_runtime_env(group._train_run_context.run_config.worker_runtime_env)
        kind = ray.remote(runtime_env=runtime_env, **worker_group.bundle_to_remote_args(resources_per_worker))(group._worker_cls)
        actors: list[Any] = []
        for index in range(num_workers):
            place = PlacementGroupSchedulingStrategy(placement_group=placement_group, placement_group_bundle_index=index)
            actors.append(kind.options(scheduling_strategy=place).remote())
        timeout_s = float(os.environ.get(START_TIMEOUT, STARTS_S))
        answers = first_answers(actors, placement_group, timeout_s=timeout_s, start_s=start_s)
        return list(zip(actors, answers, strict=True))

    make_groups_from(placed)


def make_groups_from(made: Callable[[Any, int, Any, dict[str, float]], Sequence[tuple[Any, Any]] | None]) -> None:
    """Let this process's controller make the workers of a group from what this gives.

    Args:
        made: is asked with (the group, how many, their placement group, resources of each) for the actor of each place and its
            metadata. None: the group makes them as it did before.
    """
    groups: Any = worker_group.WorkerGroup

    def create_workers(
        self: Any, num_workers: int, placement_group: Any, resources_per_worker: dict[str, float], *args: Any, **kwargs: Any
    ) -> Any:
        given = made(self, num_workers, placement_group, resources_per_worker) if is_plain(args, kwargs) else None
        if given is None:
            return before(self, num_workers, placement_group, resources_per_worker, *args, **kwargs)
        workers = [
            worker_group.Worker(actor, metadata, resources_per_worker, placement_group_bundle_index=index)
            for index, (actor, metadata) in enumerate(given)
        ]
        return groups._assign_worker_ranks(workers)

    before = patch(groups, "_create_workers", create_workers)  # tests/cluster/test_train_internals.py


def is_plain(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether all workers of one group are to be made: Ray can also make some again, or groups of groups."""
    return not args and all(value is None for value in kwargs.values())


def first_answers(actors: Sequence[Any], placement_group: Any, *, timeout_s: float, start_s: float) -> list[Any]:
    """The metadata of workers that start in this placement group.

    Args:
        timeout_s: so long a place may be gone.
        start_s: so long a start may take.

    Raises:
        WorkerGroupStartupTimeoutError: a place was gone, and there was no other in time.
        WorkerGroupStartupFailedError: a worker died, or has not answered in time.
            All workers are ended then, and have no places any more.
    """
    answers = [actor.get_metadata.remote() for actor in actors]
    began_s = own_time()
    gone_s: float | None = None
    try:
        while True:
            ready, left = ray.wait(answers, num_returns=len(answers), timeout=AGAIN_S)
            ray.get(ready)  # one that has died is not waited for
            if not left:
                return ray.get(answers)
            now_s = own_time()
            table = placement_group_table(placement_group)
            if now_s > began_s + start_s:
                nodes = sorted({table["bundles_to_node_id"].get(answers.index(one), "")[:8] for one in left})
                raise exceptions.WorkerGroupStartupFailedError(
                    f"Ray has not started {len(left)} of {len(actors)} worker processes within {start_s:g} s, on nodes {', '.join(nodes)}: "
                    "see there what Ray installs or runs before (container, runtime_env, setup hook), or raise start_timeout_s"
                )
            if table["state"] == _SOMEWHERE:
                gone_s = None
            elif gone_s is None:
                gone_s = now_s
            elif now_s > gone_s + timeout_s:
                raise exceptions.WorkerGroupStartupTimeoutError(len(actors))
    except BaseException as error:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(placement_group)  # Ray Train drops it, and its resources would stay reserved
        if isinstance(error, RayActorError):
            raise exceptions.WorkerGroupStartupFailedError(f"a worker died while it started: {error}") from error
        raise
