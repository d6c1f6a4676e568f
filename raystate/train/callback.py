"""RayTrainCallback: what raystate does inside Ray Train.

Ray Train v2 runs callbacks in its controller (one actor per `fit`) and copies them to the workers. The hooks, states and environment
variables used here belong to Ray's developer API or to its internals; tests/cluster/test_train_internals.py checks each of them.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from ray import get_runtime_context
from ray.train import get_context

from raystate import log_lines
from raystate.actors import launch_context
from raystate.actors.kv_store import check_travels
from raystate.actors.launch_context import GroupStart, LaunchContext, Restart
from raystate.actors.ray_version import is_tested, warn_if_untested
from raystate.actors.release import newest_step, release
from raystate.config.rehearsing import play
from raystate.config.state_config import StateConfig, check_config
from raystate.core.formats.errors import ConfigError, RaystateError, RunFailedError, RunInUseError, StaleAttemptError
from raystate.core.launcher.elastic import Newest, Sizes
from raystate.machine.own_time import own_time
from raystate.observe.delayed_line import DelayedLine
from raystate.storage import run_hash
from raystate.train import bundles, devices, endings, nodes, telling
from raystate.train.elastic import ElasticGroups
from raystate.train.launched_group import LaunchedGroup
from raystate.train.node_choice import NodeChoice
from raystate.train.policy import Ending, RetryPolicy
from raystate.train.rays import callbacks, states
from raystate.train.standby import SWITCH, Standby
from raystate.waits import ANSWER_S, TRAIN_POLL_S

logger = logging.getLogger(__name__)

MAX_FAILURES = 3
POLL_INTERVAL = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"  # the variable of Ray Train's setting


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What `fit` gets back through Ray Train's return value."""

    value: Any
    facts: dict[str, Any]
    restarts: tuple[Restart, ...] = ()


if TYPE_CHECKING:
    from ray.train import UserCallback as _Callback  # all that RunConfig(callbacks=…) says it takes
else:

    class _Callback(callbacks.WorkerGroupCallback, callbacks.WorkerCallback, callbacks.ControllerCallback):
        """What it takes."""


class RayTrainCallback(_Callback):
    """Connects a JaxTrainer with raystate: `RunConfig(callbacks=[RayTrainCallback(config)])`.

    Each worker hears its run and its place, so `StateManager()` needs no arguments. A death is
    noticed within a fraction of a second, and the survivors are ended at once. Each rank returns to
    the node that holds its snapshots. The run ends when trying again can't help.

    Args:
        config: the run's `StateConfig`.
        max_failures: give up after so many failed starts in a row without a new step, or with the same exception at nearly the same
            step; 0: at the first failure; -1: never, but if there is no room for `idle_timeout_s`. Interruptions don't count, and a mistake
            of the caller (a bad config, reference or item) is final at once. Ray's own `FailureConfig` counts every failure, even one
            after a week of progress: set its `max_failures=-1`, and leave its other limits as they are.
        global_batch: as in `fit`: with `ScalingConfig(num_workers=(fewest, most))` the run has only sizes that divide it.

    Raises:
        ConfigError: `max_failures` is below -1 or no int, or `config` is no StateConfig.
    """

    def __init__(self, config: StateConfig, *, max_failures: int = MAX_FAILURES, global_batch: int | None = None):
        if isinstance(max_failures, bool) or not isinstance(max_failures, int) or max_failures < -1:
            allowed = "-1 (never give up), 0 or more"
            raise ConfigError(f"max_failures = {max_failures!r}: must be {allowed}", field="max_failures", expected=allowed)
        self._config = check_travels(check_config(config, "RayTrainCallback()"))
        self._max_failures = max_failures if play() is None else 0  # a rehearsal wants to see each failure
        Sizes.of(1, global_batch)
        self._global_batch = global_batch
        self._returns_outcome = False  # set by fit: its training function returns an Outcome
        warn_if_untested()
        # Standby processes reach deepest into Ray, and are only a matter of speed.
        self._wants_standby = os.environ.get(SWITCH, "1") != "0" and is_tested()
        self._launch = secrets.token_hex(8)
        self._restarts: tuple[Restart, ...] = ()
        self._start = GroupStart()
        self._reset()

    def _reset(self, group: str = "", before: Mapping[str, Sequence[int]] | None = None) -> None:
        """Fields that only the controller's copy uses, but for the group's name and the pids of the one before."""
        self._group = LaunchedGroup(self._run_hash, group, before)
        self._places = NodeChoice()
        self._first: Newest | None = None  # the newest step when the first group began to train
        self._groups = 0
        self._policy = RetryPolicy(self._max_failures, self._config.idle_timeout_s)
        self._threads: ThreadPoolExecutor | None = None
        self._pending: tuple[Ending, float] | None = None  # why the next group starts, and when that was noticed (monotonic)
        self._elastic: ElasticGroups | None = None
        self._standby: Standby | None = None
        self._starting = DelayedLine()

    def __getstate__(self) -> dict[str, Any]:
        names = "config max_failures global_batch returns_outcome wants_standby launch restarts start"
        fields = {f"_{name}": getattr(self, f"_{name}") for name in names.split()}
        return {"fields": fields, "group": (self._group.name, self._group.before), "log_level": logger.getEffectiveLevel()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state["fields"])
        log_lines.begin(self._config.run, state["log_level"])
        self._reset(*state["group"])
        # The controller unpickles its callbacks before it reads this; a value that the user set has arrived already.
        os.environ.setdefault(POLL_INTERVAL, str(TRAIN_POLL_S))

    # ------------------------------------------------------------ in the worker

    def after_init_train_context(self) -> None:
        endings.prepare_worker()
        if is_tested():
            devices.prepare_worker(self._group.before.get(get_runtime_context().get_node_id(), ()))
        nodes.reach_directly()
        context = get_context()
        launch_context.set_context(
            LaunchContext(
                config=self._config,
                group=self._group.name,
                rank=context.get_world_rank(),
                world=context.get_world_size(),
                launch=self._launch,
                restarts=self._restarts,
                start=self._start,
            )
        )

    # ------------------------------------------------------------ in the controller: a group starts

    def after_controller_start(self, train_run_context: Any) -> None:
        if not self._returns_outcome:  # a sweep's trials may share one RunConfig
            self._launch = secrets.token_hex(8)
        self._start.asked()
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="raystate-probe")
        scaling = train_run_context.scaling_config
        self._places.begin(scaling)
        endings.quiet_ray_train()
        sizes = Sizes.of(scaling.num_workers, self._global_batch)
        if isinstance(scaling.num_workers, tuple):
            self._elastic = ElasticGroups(scaling, sizes, leaving=self._places.all_leaving, grow=self._ask_to_grow)
            self._elastic.install()
            if self._max_failures == -1:  # never gives up the run, but a size
                self._policy = RetryPolicy(MAX_FAILURES, self._config.idle_timeout_s)
        if is_tested():
            bundles.install(start_s=max(self._config.start_timeout_s, self._config.idle_timeout_s))
        if self._wants_standby and not scaling.use_tpu:
            prepare = partial(telling.prepare, self._run_hash)
            self._standby = Standby(self._config.storage, self._expect, self._places.room_elsewhere, prepare)
            self._standby.install()
        if is_tested():  # last, so that it is asked first
            bundles.make_groups_from(self._start.placed)

    def before_controller_execute_resize_decision(self, resize_decision: Any) -> None:
        self._places.choose(resize_decision.num_workers, spares=[] if self._standby is None else self._standby.spares())

    def before_worker_group_start(self, worker_group_context: Any) -> None:
        self._places.wait_for_room(worker_group_context.resources_per_worker)
        endings.tell_of_start(self._starting, worker_group_context, again=self._pending is not None)

    def before_init_train_context(self, workers: list[Any]) -> dict[str, list[Any]]:
        self._groups += 1
        self._group.begin(workers)
        self._expect(nodes := [worker.metadata.node_id for worker in workers])
        self._places.nodes = nodes
        if self._pending is not None:
            self._restarts = (*self._restarts, self._restart(self._pending[0]))
        if self._elastic is not None:
            self._elastic.holds(nodes)
        return {}

    def _restart(self, ending: Ending) -> Restart:
        resized = "" if self._elastic is None else self._elastic.outcome(self._places.nodes)
        interrupted = ending.kind == "interrupted"
        if resized:
            logger.log(logging.INFO if interrupted else logging.WARNING, "the run %s", resized)
        return Restart(
            start=self._groups,
            group=self._group.name,
            cause=f"{ending.cause}; the run {resized}" if resized else ending.cause,
            is_known=ending.is_known,
            interrupted=interrupted,
            workers=len(self._places.nodes),
        )

    def after_worker_group_training_start(self, worker_group: Any) -> None:
        now_s = own_time()
        if self._standby is not None:
            self._standby.group_started(worker_group, now_s)
        if self._pending is not None:
            self._restarts = (*self._restarts[:-1], dataclasses.replace(self._restarts[-1], seconds=now_s - self._pending[1]))
            self._pending = None
        self._starting.end()
        self._places.pins_failed = False
        self._first = self._first or self._probe()
        self._policy.started(self._first, now_s)
        if self._elastic is not None:
            self._elastic.started(self._first)

    # ------------------------------------------------------------ in the controller: a group ends

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        statuses = worker_group_status.worker_statuses
        if self._group.has_failed(statuses):
            self._group.ask_who_failed()
            self._places.leaving_hosts = self._group.told.leaving
            self._group.end_workers()
            return
        if not worker_group_status.finished:
            if self._standby is not None:
                self._standby.tick(own_time())
            telling.returned(self._run_hash, self._group.name, self._places.nodes, statuses)
        if worker_group_status.finished and self._returns_outcome:
            # The controller takes rank 0's value from this object next: the only way to hand it something of the controller's.
            outcome = statuses[0].return_value
            statuses[0].return_value = dataclasses.replace(outcome, restarts=self._restarts)

    def before_controller_abort(self) -> None:
        """The driver ends. The run knows it before the workers end, and recovers none of them."""
        telling.stopped(self._run_hash, self._launch)

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:  # noqa: ARG002
        if isinstance(current_state, (states.RestartingState, states.ReschedulingState)):
            if isinstance(current_state, states.ReschedulingState):
                self._release_half_started()
            self._decide(current_state.training_failed_error)
        elif isinstance(current_state, (states.ShuttingDownState, states.ErroredState)):
            self._starting.end()
            if self._standby is not None:
                self._standby.drop()
            if isinstance(current_state, states.ErroredState) and not self._returns_outcome:
                self._release(current_state.training_failed_error)
            if self._threads is not None:
                self._threads.shutdown(wait=False, cancel_futures=True)

    def _decide(self, error: Any) -> None:
        self._starting.end()
        self._places.leaving |= endings.leaving_nodes(error)
        ending = endings.classify(error, self._group.told)
        if ending.kind == "waiting" and self._places.pins:
            self._places.pins_failed = True  # not the cluster's fault yet: next time without pins
            return
        if ending.kind == "waiting" and self._elastic is not None:
            self._elastic.not_placed()
        probe = self._probe(self._group.told.newest_step)
        reason = self._policy.ended(ending, probe, own_time())
        if self._elastic is not None and ending.kind != "waiting":
            self._elastic.ended(probe, failed=ending.kind != "interrupted")
        if reason is not None and self._goes_on(ending, reason):
            self._policy.begin_again()
            reason = None
        if reason is None:
            self._again(ending)
            return
        if not ending.is_known:  # nothing is started again: there is time to ask
            self._group.ask(within_s=ANSWER_S)
            ending = endings.classify(error, self._group.told)
        given_up = "" if self._elastic is None else self._elastic.given_up
        if ending.kind == "final" and isinstance(ending.error, RaystateError):
            if not isinstance(ending.error, (RunInUseError, StaleAttemptError)):  # those are nothing in the caller's lines
                ending.error.details |= {"rank": ending.rank, "traceback": ending.traceback}
            if given_up:
                ending.error.add_note(given_up)
            raise ending.error
        raise RunFailedError(
            f"gave up, {reason}: {ending.cause}{given_up and f' ({given_up})'}",
            rank=ending.rank,
            error=ending.error,
            traceback=ending.traceback,
            restarts=self._restarts,
        ) from ending.error

    def _goes_on(self, ending: Ending, reason: str) -> bool:
        """Whether the run does, although this group is given up: with fewer workers, or because its user never gives up."""
        shrinks = self._elastic is not None and endings.may_depend_on_size(ending) and self._elastic.take_back(reason, ending.cause)
        return shrinks or (self._max_failures == -1 and ending.kind == "failed")

    def _again(self, ending: Ending) -> None:
        if self._pending is None or ending.kind != "waiting":  # a wait for room doesn't hide what led to it
            self._pending = (ending, own_time())
            self._start.asked()
        if ending.kind != "interrupted":  # the Coordinator tells what came back, if there is one
            self._starting.begin(
                f"{ending.cause}; starting again", at_once=ending.kind == "waiting" or not self._group.told.has_joined
            )
        if ending.kind == "failed" and not self._group.failures and self._group.name:
            telling.not_started(self._run_hash, self._group.name, ending.cause)
        self._group.forget()  # a group that finds no place has no failures of its own

    def _release(self, error: BaseException | None) -> None:
        """The newest snapshot durable, no actor left: what `fit` does, for a JaxTrainer of the user's own."""
        assert self._threads is not None
        how = {"launch": self._launch, "after": endings.ours(error)}
        try:
            self._threads.submit(release, self._config, f"failed: {error}".splitlines()[0], **how).result()
        except Exception as failure:  # the training's own error is what the user has to see
            logger.warning("%s", endings.release_text(failure))

    def _release_half_started(self) -> None:
        """A group that failed between its workers' creation and their start: Ray drops it and keeps its resources reserved."""
        self._group.end_workers()
        if self._elastic is not None:
            self._elastic.holds([])
        self._group.remove_placement()

    # ------------------------------------------------------------ how far the run is

    def _expect(self, nodes: Sequence[str]) -> None:
        if self._returns_outcome or self._places.nodes:  # by then the run is let in
            self._places.expect(self._run_hash, nodes)

    def _ask_to_grow(self, reason: str) -> None:
        telling.ask_to_grow(self._run_hash, self._group.name, reason)

    @property
    def _run_hash(self) -> str:
        return run_hash(self._config.storage, self._config.run)

    def _probe(self, known: int | None = None) -> Newest:
        if self._threads is None or (self._max_failures == -1 and self._elastic is None):
            return lambda: None
        future = self._threads.submit(newest_step, self._config, known)

        def result() -> int | None:
            try:
                return future.result(timeout=ANSWER_S)  # more than the Coordinator and storage are given
            except Exception as error:  # storage or the Coordinator doesn't answer: no progress that we know of
                logger.warning("cannot tell the newest step: %s: %s", type(error).__name__, error)
                return None

        return result
