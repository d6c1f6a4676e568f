"""Processes that are ready before they are needed.

Most of a restart on CPU hosts is Python starting and importing Ray Train and JAX: 2 s of 3. So
while a group trains, each of its nodes holds one more worker process per trainer, which has done
this already and waits. So do a few nodes that have room for a trainer and none on them, for ranks
whose node goes away. When the group ends, the waiting processes become the workers of the next one.

They hold no resources of their own: the group's placement group is made as ever, and accounts for them. Three things differ in such a
worker: Ray's `get_current_placement_group()` is None, and `get_assigned_resources()` and
`get_accelerator_ids()` are empty. GPUs it gets from raystate (devices.py). On TPU no process waits.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import ceil
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raystate.actors.launch_context import saves_so_far
from raystate.machine.priority import give_way
from raystate.storage.url import storage_kind
from raystate.train import devices
from raystate.train.bundles import make_groups_from
from raystate.train.rays import worker_group
from raystate.waits import ANSWER_S, LOOK_EVERY_S, STANDBY_FIRST_S, STANDBY_LAST_S

logger = logging.getLogger(__name__)

SWITCH = "RAYSTATE_STANDBY"  # "0" in the driver's environment, or in the workers' runtime_env: no standby processes
# They start after the group's first steps, which need the cores: loading or compiling programs, the first copies (docs/performance.md).
FIRST_SAVES = 2
MOST_SPARES = 2  # nodes without a trainer on which processes wait: seldom more than one node is lost at once
# What a trainer imports until its first step. None of them initialises JAX's backends, which has to wait for jax.distributed.
_MODULES = (
    "jax", "jax.numpy", "jax.experimental.multihost_utils",
    "raystate.manager", "raystate.actors.link", "raystate.train.callback", "raystate.train.launch",
)  # fmt: skip
# What its script may import beside that takes long, and initialises no backends either. Those that the training has imported are.
_LIBRARIES = (
    "chex", "einops", "equinox", "flax", "flax.linen", "flax.nnx", "grain", "grain.python", "haiku", "jaxtyping", "optax",
    "orbax.checkpoint",
)  # fmt: skip
_ASKS = 20  # looks at which a trainer is asked for them: its script imports the rest late


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    actor: Any
    node: str


class Standby:
    """The waiting processes of one controller.

    Args:
        storage: the run's; its client library is loaded, too.
        placed: is told the nodes of the next group's ranks, before its processes start.
        room: for how many more workers there is room, by node, the group's own nodes left out.
        prepare: is told at each look the nodes without a trainer on which processes wait.
    """

    def __init__(
        self,
        storage: str,
        placed: Callable[[Sequence[str]], None],
        room: Callable[[], Mapping[str, int]],
        prepare: Callable[[frozenset[str]], None],
    ) -> None:
        self._storage = storage
        self._placed = placed
        self._room = room
        self._prepare = prepare
        self._waiting: list[_Waiting] = []
        self._due_s: float | None = None
        self._group: Any = None
        self._start_by_s = 0.0
        self._kind: Any = None  # the class of the waiting actors; None: none are made for this group
        self._gpus = 0  # of each worker
        self._own: Counter[str] = Counter()  # ranks of the group by node
        self._libraries: list[str] = []  # that a process which waits imports, too
        self._trainer: Any = None
        self._answer: Any = None  # of it: how often it has saved; then, which of them it has imported
        self._asks_left = 0
        # More of Ray's internals, needed only here.
        from raystate.train.group_actors import GroupActors

        self._group_actors = GroupActors()

    def install(self) -> None:
        """Let this process's controller make its worker groups from waiting processes, where there are any."""
        self._group_actors.install()
        make_groups_from(lambda _group, *wanted: self.take(*wanted))

    def group_started(self, group: Any, now_s: float) -> None:
        self._group, self._due_s, self._start_by_s = group, now_s + STANDBY_FIRST_S, now_s + STANDBY_LAST_S
        self._trainer, self._answer = group.get_workers()[0].actor, None

    def tick(self, now_s: float) -> None:
        """Start the processes once the group has trained for a while, and on other nodes as they come."""
        try:
            self._look(now_s)
        except Exception as error:  # Ray's head is out of reach for a moment: the training is fine
            logger.warning("can't look after standby processes: %s: %s", type(error).__name__, error)

    def _look(self, now_s: float) -> None:
        if self._due_s is None or now_s < self._due_s:
            return
        if self._group is not None and now_s < self._start_by_s and not self._trains():
            return
        self._due_s = now_s + LOOK_EVERY_S  # also if this look fails
        if self._group is not None:
            self._begin(self._group, self._due_s)
        else:
            self._look_for_spares()
            self._look_for_libraries()

    def _begin(self, group: Any, due_s: float) -> None:
        """One more process for each of the group's workers. `due_s`: of the next look."""
        self._gpus = ceil(group.get_resources_per_worker().get(devices.GPU, 0))
        kind = self._kind_for(group)
        self._group_actors.group_trains(ahead=kind is not None)
        _kill(self._let_go())  # of an earlier group, if this one was not made by `take`
        if kind is None:
            return
        self._kind, self._due_s = kind, due_s
        workers = group.get_workers()
        self._answer, self._asks_left = None, _ASKS
        self._own = Counter(worker.metadata.node_id for worker in workers)
        for node, count in self._own.items():
            self._start(node, count)

    def _look_for_spares(self) -> None:
        """Nodes may have come or gone."""
        room, most = self._room(), max(self._own.values())
        stay = [each for each in self._waiting if each.node in self._own or room.get(each.node, 0)]
        _kill([each for each in self._waiting if each not in stay])
        self._waiting = stay
        spares = {each.node for each in stay} - self._own.keys()
        for node in sorted(node for node, count in room.items() if count and node not in spares)[: MOST_SPARES - len(spares)]:
            self._start(node, min(most, room[node]))
        self._prepare(frozenset(self.spares()))  # each time: who was told before may be gone

    def _trains(self) -> bool:
        """Whether the group has done its first steps."""
        return (self._ask(saves_so_far) or 0) >= FIRST_SAVES

    def _look_for_libraries(self) -> None:
        if self._answer is None:
            if not self._asks_left:
                return
            self._asks_left -= 1
        new = [name for name in self._ask(imported_libraries) or () if name not in self._libraries]
        self._libraries += new
        for each in self._waiting if new else ():
            each.actor.execute.remote(_ahead, import_libraries, new)

    def _ask(self, question: Callable[[], Any]) -> Any:
        """A trainer's answer, once it is there; None: not yet. It is asked the same at each look until it has answered.

        This never waits for the trainer: it may hang.
        """
        if self._answer is None:
            self._answer = self._trainer.execute.remote(question)
            return None
        if not ray.wait([self._answer], timeout=0)[0]:
            return None
        answer, self._answer = self._answer, None
        try:
            return ray.get(answer)
        except RayError:  # the group ends
            return None

    def spares(self) -> list[str]:
        """The nodes without a trainer on which processes wait, each as often as one waits there."""
        return [each.node for each in self._waiting if each.node not in self._own]

    def _kind_for(self, group: Any) -> Any:
        """The class of actors that can become this group's workers; None: standby is switched off, or Ray doesn't set up JAX on its
        GPUs."""
        runtime_env = worker_group.WorkerGroup._get_worker_runtime_env(group._train_run_context.run_config.worker_runtime_env)
        variables = dict(runtime_env.get("env_vars") or {})
        if variables.get(SWITCH, "1") == "0":
            return None
        sets_up = getattr(group._train_run_context.backend_config, "use_gpu", False)
        if self._gpus and not (sets_up and "cuda" in (variables.get("JAX_PLATFORMS") or "cuda")):
            return None
        cpus = int(group.get_resources_per_worker().get("CPU", 1))
        variables.setdefault("OMP_NUM_THREADS", str(max(cpus, 1)))  # as Ray sets it by the CPUs that a worker holds
        return ray.remote(num_cpus=0, runtime_env={**runtime_env, "env_vars": variables})(worker_group.RayTrainWorker)

    def _start(self, node: str, count: int) -> None:
        for _ in range(count):
            actor: Any = self._kind.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
            if self._gpus:
                actor.execute.remote(devices.choose_cuda)
            actor.execute.remote(_ahead, preload, self._storage)
            if self._gpus:
                actor.execute.remote(_ahead, devices.load_plugin)
            if self._libraries:
                actor.execute.remote(_ahead, import_libraries, self._libraries)
            self._waiting.append(_Waiting(actor=actor, node=node))

    def take(self, num_workers: int, placement_group: Any, resources: Mapping[str, float]) -> list[tuple[Any, Any]] | None:
        """(actor, metadata) for each bundle, if a ready process waits on every bundle's node; else none is kept."""
        waiting = self._let_go()
        self._group_actors.group_ended()
        try:
            where = placement_group_table(placement_group)["bundles_to_node_id"]
            places: list[str] = [where[index] for index in range(num_workers)]
            self._placed(places)
            chosen = _match(waiting, places) if waiting else None
            if chosen is not None:
                # In order after the import: what answers this now is alive and ready.
                actors = [each.actor for each in chosen]
                metadata = ray.get([actor.get_metadata.remote() for actor in actors], timeout=ANSWER_S)
                if gpus := ceil(resources.get(devices.GPU, 0)):
                    metadata = devices.give(actors, metadata, gpus, placement_group)
                _kill([each for each in waiting if each not in chosen])
                return list(zip(actors, metadata, strict=True))
        except Exception as error:  # not ready, dead, or Ray's table looks otherwise: start new ones
            logger.debug("standby processes are not used: %s: %s", type(error).__name__, error)
        _kill(waiting)
        return None

    def drop(self) -> None:
        """End them: no group comes any more."""
        self._group_actors.close()
        _kill(self._let_go())

    def _let_go(self) -> list[_Waiting]:
        """What has waited for the present group's end; no look is due for it any more."""
        waiting, self._waiting = self._waiting, []
        self._group = self._due_s = self._kind = None
        return waiting


def _match(waiting: Sequence[_Waiting], nodes: Sequence[str]) -> list[_Waiting] | None:
    left = list(waiting)
    chosen: list[_Waiting] = []
    for node in nodes:
        found = next((each for each in left if each.node == node), None)
        if found is None:
            return None
        left.remove(found)
        chosen.append(found)
    return chosen


def _kill(waiting: Sequence[_Waiting]) -> None:
    for each in waiting:
        ray.kill(each.actor)


def _ahead(work: Callable[..., None], *given: Any) -> None:
    """In the waiting process. User code is not imported: it may use JAX, which has to wait for jax.distributed."""
    if os.environ.get("JAX_PLATFORMS"):
        # On a thread of its own that gives way: on few cores these imports would make the running training skip snapshots.
        with ThreadPoolExecutor(1, initializer=give_way) as pool:
            pool.submit(work, *given).result()


def preload(storage: str) -> None:
    """Import all that any trainer of a run with this storage needs."""
    for module in _MODULES:
        importlib.import_module(module)
    storage_kind(storage)


def imported_libraries() -> list[str]:
    """Which of the libraries that a process may import ahead this one has imported."""
    return [name for name in _LIBRARIES if name in sys.modules]


def import_libraries(names: Sequence[str]) -> None:
    """Import these, as far as that works: what fails is the script's own to tell."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            logger.debug("%s can't be imported ahead: %s", name, error)
