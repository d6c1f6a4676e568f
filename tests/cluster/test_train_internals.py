"""Ray Train's internals that raystate.train relies on. If one of these fails after an upgrade of Ray, read raystate/train first."""

# Stand-ins for Ray's internals are passed on purpose, and its lazily loaded submodules are unknown to type checkers.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOptionalMemberAccess=false, reportIndexIssue=false
from __future__ import annotations

import dataclasses
import functools
import gc
import importlib.util
import inspect
import logging
import os
import pickle
import re
import signal
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2._internal import constants
from ray.train.v2._internal.callbacks import datasets, placement_group_callback, preemption_callback
from ray.train.v2._internal.data_integration.interfaces import DatasetShardMetadata
from ray.train.v2._internal.exceptions import (
    UserExceptionWithTraceback,
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
)
from ray.train.v2._internal.execution import scaling_policy
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.checkpoint import sync_actor
from ray.train.v2._internal.execution.controller import state as states
from ray.train.v2._internal.execution.worker_group import worker_group as ray_worker_group
from ray.train.v2._internal.execution.worker_group.poll import WorkerGroupPollStatus, WorkerStatus
from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker
from ray.train.v2.api.exceptions import ControllerError, PreemptionError, WorkerGroupError
from ray.train.v2.api.preemption import PreemptionInfo
from ray.train.v2.jax import JaxTrainer

import raystate
from jobs.striking import lose_node
from raystate.actors import release as release_module
from raystate.actors.blame import raised, unpacked
from raystate.cli import story
from raystate.config.state_config import StateConfig
from raystate.core.launcher.elastic import Sizes
from raystate.machine.sigterm import Sigterm, Stopped
from raystate.observe.ends import End, Told
from raystate.train import bundles, devices, elastic, endings, group_actors, jax_backend, launch, nodes, standby, telling
from raystate.train import callback as callback_module
from raystate.train import trainer as trainer_module
from raystate.train.callback import RayTrainCallback
from tests.cluster.training import wait_for
from tests.patience import PATIENCE_S
from tests.processes import job_environment, run_python

CONFIG = raystate.StateConfig(storage="/nonexistent/lm", run="lm")


@pytest.mark.parametrize(
    ("base", "hook"),
    [
        (WorkerGroupCallback, "before_worker_group_start"),
        (WorkerGroupCallback, "before_init_train_context"),
        (WorkerGroupCallback, "after_worker_group_training_start"),
        (WorkerGroupCallback, "after_worker_group_poll_status"),
        (WorkerCallback, "after_init_train_context"),
        (ControllerCallback, "after_controller_start"),
        (ControllerCallback, "after_controller_state_update"),
        (ControllerCallback, "before_controller_execute_resize_decision"),
    ],
)
def test_hooks_exist_and_take_the_same_arguments(base: type, hook: str) -> None:
    theirs = list(inspect.signature(getattr(base, hook)).parameters)
    ours = list(inspect.signature(getattr(RayTrainCallback, hook)).parameters)
    assert ours == theirs


def test_the_callback_pickles_without_the_controllers_state() -> None:
    callback = RayTrainCallback(CONFIG, max_failures=2)
    callback._group.name, callback._group.workers, callback._group.before = "token", [threading.Lock()], {"node": [7]}
    before = os.environ.pop(constants.HEALTH_CHECK_INTERVAL_S_ENV_VAR, None)
    try:
        copied = pickle.loads(pickle.dumps(callback))
        assert (copied._group.name, copied._max_failures, copied._group.workers) == ("token", 2, [])
        assert copied._group.before == {"node": [7]}, "whom the new workers wait for"
        assert os.environ[constants.HEALTH_CHECK_INTERVAL_S_ENV_VAR] == str(callback_module.TRAIN_POLL_S)
        os.environ[constants.HEALTH_CHECK_INTERVAL_S_ENV_VAR] = "5"
        pickle.loads(pickle.dumps(callback))
        assert os.environ[constants.HEALTH_CHECK_INTERVAL_S_ENV_VAR] == "5", "the user's value stays"
    finally:
        os.environ.pop(constants.HEALTH_CHECK_INTERVAL_S_ENV_VAR, None)
        if before is not None:
            os.environ[constants.HEALTH_CHECK_INTERVAL_S_ENV_VAR] = before


def test_trainers_that_share_a_callback_are_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep makes its RunConfig once: its trials must not take each other for a restart. A `fit` releases what its own has made."""
    monkeypatch.setattr(callback_module, "is_tested", lambda: False)
    monkeypatch.setenv(callback_module.SWITCH, "0")
    callback = RayTrainCallback(CONFIG)

    def launch_of() -> str:
        copied = pickle.loads(pickle.dumps(callback))
        copied.after_controller_start(SimpleNamespace(scaling_config=ScalingConfig(num_workers=1)))
        copied._threads.shutdown()
        return copied._launch

    assert launch_of() != launch_of()
    callback._returns_outcome = True
    assert launch_of() == launch_of() == callback._launch


@pytest.mark.parametrize("limit", [-2, 1.5, None, True])
def test_the_callbacks_limit_is_checked(limit: Any) -> None:
    with pytest.raises(raystate.ConfigError, match="max_failures"):
        RayTrainCallback(CONFIG, max_failures=limit)


def test_states_carry_the_error() -> None:
    error = ControllerError(RuntimeError("x"))
    for kind in (states.RestartingState, states.ReschedulingState):
        assert kind(training_failed_error=error).training_failed_error is error
    assert {"ShuttingDownState", "ErroredState"} <= set(dir(states))


def test_a_poll_can_be_read_and_its_value_replaced() -> None:
    failed = WorkerStatus(running=False, error=UserExceptionWithTraceback(KeyError("k"), "the text"))
    finished = WorkerStatus(running=False, return_value=1)
    poll = WorkerGroupPollStatus(worker_statuses={0: finished, 1: failed})
    assert poll.finished
    assert poll.errors
    poll.worker_statuses[0].return_value = 2
    assert poll.worker_statuses[0].return_value == 2
    found = endings.failures(poll.worker_statuses)
    assert set(found) == {1}
    assert (found[1].kind, found[1].traceback) == ("raised", "the text")
    assert isinstance(unpacked(found[1].error), KeyError)
    assert {"poll_status", "execute", "init_train_context"} <= set(dir(RayTrainWorker))


def test_deaths_and_preemptions_are_recognized() -> None:
    from ray.exceptions import ActorDiedError, RayActorError, RaySystemError

    death = WorkerHealthCheckFailedError("no answer", failure=ActorDiedError())
    assert endings.failures({0: WorkerStatus(running=False, error=death)})[0].kind == "missing"
    preempted = endings.failures({0: WorkerStatus(running=False, error=RayActorError(preempted=True))})
    assert endings.classify(WorkerGroupError("x", {}), told(*preempted.values())).cause == "rank 0 lost its node, as announced"
    unread = endings.failures({0: WorkerStatus(running=False, error=RaySystemError("no module"))})
    assert endings.classify(WorkerGroupError("x", {}), told(*unread.values())).cause.startswith(
        "the answer of rank 0 cannot be read: "
    )
    info = PreemptionInfo(deadline_ms=None, preempted_node_to_ranks={"n1": [1]})
    assert endings.leaving_nodes(PreemptionError(info)) == {"n1"}
    assert endings.classify(PreemptionError(info), told()).kind == "interrupted"


def told(*ends: End, has_joined: bool = True) -> Told:
    return Told(ends=ends, has_joined=has_joined)


def missing(rank: int) -> End:
    return End(rank=rank, kind="missing", reason=f"the process of rank {rank} died")


def test_what_an_ending_amounts_to() -> None:
    def of(**errors: BaseException) -> Any:
        return endings.classify(WorkerGroupError("x", {}), told(*(raised(int(rank[1:]), error) for rank, error in errors.items())))

    gloo = ValueError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer")
    assert of(r0=gloo, r1=KeyError("k")).cause == "rank 1 raised KeyError: 'k'"
    assert of(r0=KeyError("k"), r1=raystate.Interrupted("stop")).kind == "interrupted"
    assert of(r0=raystate.Interrupted("stop"), r1=raystate.ConfigError("bad")).kind == "final"
    assert of(r0=gloo).kind == "failed"
    assert "another process dies" in of(r0=gloo).cause
    died = endings.classify(WorkerGroupError("x", {}), told(raised(0, gloo), missing(3)))
    assert died.cause == "the process of rank 3 died"
    for mistake in (raystate.ReferenceMismatchError("r"), raystate.ItemTopologyError("i"), raystate.StepOrderError("s")):
        assert of(r0=gloo, r1=mistake).kind == "final"
    assert of(r1=raystate.RaystateError("state can't be saved", item="state", path="a/b")).kind == "final"
    assert of(r1=raystate.RaystateError("the Coordinator is gone", rank=1)).kind == "failed"
    assert of(r1=raystate.StaleAttemptError("s", replaced=True)).kind == "failed"
    assert of(r0=gloo, r1=raystate.StaleAttemptError("s")).kind == "final"
    assert of(r0=raystate.StorageError("not durable: step 2: …", released=True)).kind == "final"
    assert of(r0=raystate.StorageError("step 9 could not be made durable")).kind == "failed", "memory has it"


def test_what_other_ranks_raise_beside_an_interruption_is_told() -> None:
    """A disk that is full while the script saves what is its own before its node goes."""
    ending = endings.classify(
        WorkerGroupError("x", {}), told(raised(0, OSError("disk full")), raised(1, raystate.Interrupted("told")))
    )
    assert ending.kind == "interrupted"
    assert ending.cause.endswith("; rank 0 raised OSError: disk full")


@pytest.mark.parametrize(("workers", "told"), [(5, ["no room yet for 5 workers"]), (2, [])])
def test_a_group_that_is_larger_than_the_cluster_is_told_of_before_ray_train_waits(
    workers: int, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endings.ray, "cluster_resources", lambda: {"CPU": 2.0, "memory": 1e9})
    callback = RayTrainCallback(CONFIG)
    lines: list[str] = []
    monkeypatch.setattr(callback._starting, "begin", lambda text, *, at_once=False: lines.append(text) if at_once else None)
    callback.before_worker_group_start(SimpleNamespace(num_workers=workers, resources_per_worker={"CPU": 1}))
    assert [line.split(" (")[0] for line in lines] == told


def test_rays_traceback_of_a_group_without_a_place_is_not_shown() -> None:
    for failure, shown in ((WorkerGroupStartupTimeoutError(5), False), (ValueError("boom"), True)):
        record = logging.LogRecord("ray", logging.ERROR, "", 0, "Error", (), (type(failure), failure, None))
        assert endings._not_ours(record) is shown


def test_a_group_without_a_place_has_no_failures_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an interruption it counted as another one, and nobody ever gave up."""
    callback = RayTrainCallback(CONFIG)
    monkeypatch.setattr(RayTrainCallback, "_probe", lambda *_: lambda: None)
    monkeypatch.setattr(RayTrainCallback, "_release_half_started", lambda _self: None)
    callback._group.failures = {0: raised(0, raystate.Interrupted("told"))}
    callback._group.told = told(*callback._group.failures.values())
    decided: list[Any] = []
    monkeypatch.setattr(callback._policy, "ended", lambda ending, *_: decided.append(ending.kind))
    callback.after_controller_state_update(None, states.RestartingState(training_failed_error=WorkerGroupError("x", {})))
    no_room = ControllerError(WorkerGroupStartupTimeoutError(2))
    callback.after_controller_state_update(None, states.ReschedulingState(training_failed_error=no_room))
    assert decided == ["interrupted", "waiting"]


def test_ctrl_c_is_the_callers_own_in_fit() -> None:
    """Ray Train's handler stayed, which ends the process at the third as if all were well, and gave the script a SystemExit."""
    before, trainer = signal.getsignal(signal.SIGINT), object.__new__(trainer_module.QuietJaxTrainer)
    assert inspect.isfunction(JaxTrainer._register_sigint_handler), "else another method sets it"
    trainer._register_sigint_handler("the controller")
    assert (signal.getsignal(signal.SIGINT), trainer.controller) == (before, "the controller")


def test_who_stops_a_fit_is_told_at_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Seven seconds were silent, and the prompt came back without a word."""
    released: list[str] = []

    def stopped() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "_enter", lambda *_, **__: None)
    monkeypatch.setattr(launch, "_release", lambda _config, _launch, reason, **_: released.append(caplog.messages[-1] + reason))
    trainer: Any = SimpleNamespace(fit=stopped, abort=lambda: None)
    with pytest.raises(KeyboardInterrupt), caplog.at_level(logging.WARNING, "raystate"):
        launch._run(trainer, CONFIG, "launch", Sigterm(), takeover=False)
    (line,) = released
    assert re.match("stopped by Ctrl-C: the newest step becomes durable first; .*the driver was stopped: Ctrl-C", line)


def test_sigterm_while_ray_is_waited_for_is_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray puts an exit of its own in the place of ours: a driver of `fit` ended with exit code 1."""
    sigterm, of_the_tests = Sigterm(), signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sigterm.take()
    released: list[str] = []

    def release(_config: StateConfig, _launch: str, reason: str, **_: object) -> None:
        signal.raise_signal(signal.SIGTERM)  # the second one: it must not end this
        released.append(reason)

    def fit() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except SystemExit:
            rays = SystemExit(1)
            vars(rays)["ray_terminate_msg"] = "as ray._raylet.check_signals does"
            raise rays from None

    monkeypatch.setattr(launch, "_enter", lambda *_, **__: None)
    monkeypatch.setattr(launch, "_release", release)
    trainer: Any = SimpleNamespace(fit=fit, abort=lambda: None)
    try:
        with pytest.raises(Stopped) as caught:
            launch._run(trainer, CONFIG, "launch", sigterm, takeover=False)
        with pytest.raises(Stopped):  # a script that goes on all the same hears the next one
            signal.raise_signal(signal.SIGTERM)
    finally:
        sigterm.give_back()
        signal.signal(signal.SIGTERM, of_the_tests)
    assert released == ["the driver was stopped: SIGTERM"]
    assert (caught.value.code, str(caught.value)) == (143, "SIGTERM")


def test_the_newest_step_in_an_outage_of_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knew it, and three failures with progress between them ended the run."""

    given: list[float] = []

    def out(storage: Any) -> Any:
        given.append(storage._timeout_s)
        raise raystate.StorageError("out")

    coordinator = SimpleNamespace(newest_step=SimpleNamespace(remote=lambda: 57))
    monkeypatch.setattr(release_module, "find_actor", lambda _name: coordinator)
    monkeypatch.setattr(release_module.ray, "get", lambda got, **_: got)
    monkeypatch.setattr(release_module, "visible_steps", out)
    assert release_module.newest_step(CONFIG) == 57
    # A bucket's operations are retried until then: the answer came when nobody waited for it any more.
    assert given[0] + release_module.QUICK_ANSWER_S < callback_module.ANSWER_S


def test_an_exception_that_ray_train_has_not_read_is_told_by_the_coordinator() -> None:
    ended = End(rank=0, kind="ended", reason="trainer rank 0 was ended")
    ending = endings.classify(WorkerGroupError("x", {}), told(raised(1, ValueError("bad batch 7")), ended))
    assert (ending.rank, ending.cause) == (1, "rank 1 raised ValueError: bad batch 7")
    assert isinstance(ending.error, ValueError)
    assert "ValueError: bad batch 7" in ending.traceback
    assert ending.signature == "ValueError: bad batch #"
    final = endings.classify(WorkerGroupError("x", {}), told(raised(1, raystate.ConfigError("bad field")), ended))
    assert final.kind == "final"
    still_running = endings.classify(WorkerGroupError("x", {}), told(End(rank=1, kind="died", reason=""), ended))
    assert still_running.cause == "the process of rank 1 died"


def test_who_is_not_known_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Coordinator knows that it was rank 1, and is slow to say so."""
    both = (missing(0), missing(1))
    unknown = endings.classify(WorkerGroupError("x", {}), told(*both))
    assert (unknown.is_known, unknown.rank) == (False, None)
    assert unknown.cause == "the processes of ranks 0 and 1 died; which of them was first is not known yet"
    alone = endings.classify(WorkerGroupError("x", {}), told(*both, has_joined=False))
    assert alone.cause == "the process of rank 0 died", "nothing better will be known"

    asked: list[float] = []
    first = End(rank=1, kind="died", reason="trainer rank 1 died")
    answer = Told(ends=(first, End(rank=0, kind="ended", reason="")), newest_step=7)
    monkeypatch.setattr(endings, "told", lambda *_, within_s: asked.append(within_s) or answer)
    callback = raystate.RayTrainCallback(CONFIG, max_failures=0)
    callback._group.told = told(*both)
    with pytest.raises(raystate.RunFailedError, match="the process of rank 1 died"):
        callback._decide(WorkerGroupError("x", {}))
    assert len(asked) == 1


def test_where_all_hang_the_stacks_of_all_are_told() -> None:
    hung = (End(rank=rank, kind="hung", reason="no step for 30 s", traceback=f"in f{rank}") for rank in (1, 0))
    ending = endings.classify(WorkerGroupError("x", {}), told(*hung))
    assert ending.traceback == "rank 0 was at\nin f0\n\nrank 1 was at\nin f1"


def test_ended_because_a_node_goes_away_is_no_failure() -> None:
    ends = (End(rank=rank, kind="interrupted", reason=f"rank {rank} was ended: a node goes away") for rank in (0, 1))
    ending = endings.classify(WorkerGroupError("x", {}), told(*ends))
    assert (ending.kind, ending.cause) == ("interrupted", "rank 0 was ended: a node goes away")


def test_the_error_inside_ray_trains() -> None:
    ours = endings.ours(ControllerError(raystate.RunFailedError("gave up", rank=1)))
    assert ours is not None
    assert ours.rank == 1


def test_rays_jax_setup_names_rank_0s_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks' set-up is delayed until that address answers."""
    asked: list[tuple[int, Any, dict[str, Any]]] = []

    class Group:
        def __len__(self) -> int:
            return 2

        def execute_single(self, rank: int, fn: Any) -> Any:
            return ("localhost", 1234)

        def execute_single_async(self, rank: int, fn: Any, *args: Any, **kwargs: Any) -> Any:
            asked.append((rank, fn, kwargs))

        def get_resources_per_worker(self) -> dict[str, float]:
            return {}

    monkeypatch.setattr("ray.get", lambda refs: refs)
    config = jax_backend.QuickJaxConfig(use_gpu=True)
    group: Any = Group()
    config.backend_cls().on_start(group, config)
    assert [rank for rank, _, _ in asked] == [0, 1]
    assert asked[0][1] is not jax_backend._when_listening
    assert asked[1][1] is jax_backend._when_listening
    assert asked[1][2][jax_backend._ADDRESS] == "localhost:1234"


def test_a_worker_finds_our_function_under_the_name_of_rays_jax_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray sends it by name. The worker's own GPUs are set behind it, where JAX runs on them; on real workers: tests/gpu."""
    setup = devices.jax_setup
    shown: list[str] = []
    monkeypatch.setattr(setup, "_setup_jax_distributed_environment", setup._setup_jax_distributed_environment)
    sent = pickle.dumps(setup._setup_jax_distributed_environment)
    monkeypatch.setattr(setup, "_setup_jax_distributed_environment", lambda: shown.append(os.environ["CUDA_VISIBLE_DEVICES"]))
    waited: list[Any] = []
    monkeypatch.setattr(devices, "wait_until_free", lambda *what: waited.append(what))
    devices.prepare_worker([7])
    for platforms, own, after in (("cuda,cpu", ["2", "5"], "2,5"), ("cuda", [], "0,1"), ("cpu", ["2"], "0,1"), ("", ["2"], "0,1")):
        monkeypatch.setattr(devices, "given", lambda own=own: own)
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        pickle.loads(sent)()
        assert (shown.pop(), os.environ["CUDA_VISIBLE_DEVICES"]) == ("0,1", after)
    assert waited == [([7], ["2", "5"])]


def test_waiting_for_a_listener() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        assert not jax_backend.wait_for_listener("127.0.0.1", port, deadline_s=0.05)
        server.listen()
        assert jax_backend.wait_for_listener("127.0.0.1", port, deadline_s=5.0)


def test_the_users_run_config_is_completed_and_left_alone() -> None:
    from ray.train.v2.api.callback import UserCallback

    own = UserCallback()
    theirs = RunConfig(
        callbacks=[own],
        worker_runtime_env={"env_vars": {"A": "1"}, "working_dir": "w"},
        failure_config=FailureConfig(max_failures=7, preemption_grace_s=3.0),
    )
    limits = ("max_preemption_failures", "controller_failure_limit")  # not every Ray has them
    for limit in limits:
        if hasattr(theirs.failure_config, limit):
            setattr(theirs.failure_config, limit, 0)
    ours = RayTrainCallback(CONFIG)
    run = launch._run_config(theirs, ours, on_cpu=True)
    assert run.callbacks == [own, ours]
    assert run.worker_runtime_env == {
        "env_vars": {"JAX_PLATFORMS": "cpu", "RAY_TRAIN_ENABLE_PRINT_PATCH": "0", "A": "1"},  # or every print() comes twice
        "working_dir": "w",
    }
    assert run.failure_config is not None
    assert theirs.failure_config is not None
    assert (run.failure_config.max_failures, run.failure_config.preemption_grace_s) == (-1, 3.0)
    assert {getattr(run.failure_config, limit, -1) for limit in limits} == {-1}, "Ray's own limits are all off"
    assert (theirs.callbacks, theirs.failure_config.max_failures) == ([own], 7)
    assert theirs.worker_runtime_env == {"env_vars": {"A": "1"}, "working_dir": "w"}


class _Looks(RayTrainCallback):
    """Writes what the controller that runs it looks like."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        os.environ.pop(constants.HEALTH_CHECK_INTERVAL_S_ENV_VAR, None)  # the test cluster's nodes have it
        super().__setstate__(state)

    def after_controller_start(self, train_run_context: Any) -> None:
        super().after_controller_start(train_run_context)
        (controller,) = [each for each in gc.get_objects() if type(each).__name__ == "TrainController"]
        facts = [controller._health_check_interval_s, controller._train_run_context.scaling_config is self._scaling]
        Path(self._config.out).write_text(repr(facts))


@pytest.mark.long
def test_the_controller_takes_our_settings(ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The poll interval is read after the callbacks are unpickled; the ScalingConfig we change is the one that places workers."""
    import sys

    from ray.train import ScalingConfig
    from ray.train.v2.jax import JaxTrainer

    monkeypatch.delenv(constants.HEALTH_CHECK_INTERVAL_S_ENV_VAR, raising=False)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        out = str(tmp_path / "facts")
        looks: Any = _Looks(StateConfig(storage=f"{out}-run", run="looks"))
        looks._config = SimpleNamespace(  # no run begins
            out=out, idle_timeout_s=60.0, start_timeout_s=60.0, storage=str(tmp_path / "none"), run="none"
        )
        callbacks: Any = [looks]  # Ray also takes internal callbacks
        run_config = RunConfig(name="looks", storage_path=str(tmp_path), callbacks=callbacks)
        JaxTrainer(lambda: None, scaling_config=ScalingConfig(num_workers=1), run_config=run_config).fit()
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert Path(out).read_text() == repr([callback_module.TRAIN_POLL_S, True])


def test_where_there_is_no_dashboard_nobody_asks_it_every_second(ray_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:

    def cleaners() -> int:
        trainer = trainer_module.QuietJaxTrainer(print, scaling_config=ScalingConfig(num_workers=1))
        return sum(
            isinstance(one, placement_group_callback.PlacementGroupCleanerCallback) for one in trainer._create_default_callbacks()
        )

    assert cleaners() == 0
    monkeypatch.setattr(trainer_module, "has_dashboard", lambda: True)
    assert cleaners() == 1


def test_the_actor_that_frees_places_asks_its_own_ray(ray_cluster: Any, by_value: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where several Rays run on a machine, it found another's dashboard, or none, and said so in thirty lines."""
    del by_value
    monkeypatch.setattr(placement_group_callback, "PlacementGroupCleaner", None)
    import ray

    callback = trainer_module._CleanerCallback()
    callback.after_controller_start(SimpleNamespace(run_id="run"))
    try:
        address = callback._cleaner.__ray_call__.remote(lambda _: os.environ["RAY_ADDRESS"])
        assert ray.get(address, timeout=PATIENCE_S) == ray_cluster.address
    finally:
        callback.before_controller_abort()


def test_rays_log_monitor_follows_our_mark() -> None:
    from ray._private.ray_constants import LOG_PREFIX_JOB_ID

    from raystate.actors.log_routing import MARK

    assert MARK == LOG_PREFIX_JOB_ID


def test_nodes_are_found_and_can_be_named_in_a_selector(ray_cluster: Any) -> None:
    import ray
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    ids = sorted(info["NodeID"] for info in ray.nodes() if info["Alive"])
    assert nodes.reachable(frozenset([*ids, "f" * 56])) == frozenset(ids)
    gone = "e" * 56
    chosen = nodes.selectors([ids[1], None], own={"ray.io/node-id": ids[1]}, avoid=frozenset({gone}))
    assert chosen == [{nodes.NODE_LABEL: ids[1]}, {nodes.NODE_LABEL: ids[1]}], "the user's own selector is stronger"
    assert nodes.selectors([ids[1], None], own=None, avoid=frozenset()) == [{nodes.NODE_LABEL: ids[1]}, {}]
    chosen = nodes.selectors([ids[1], None], own=None, avoid=frozenset({ids[0]}))
    assert chosen == [{nodes.NODE_LABEL: ids[1]}, {nodes.NODE_LABEL: f"!in({ids[0]})"}]
    assert nodes.wait_for_room(ids, {"CPU": 1.0}, deadline_s=5.0)
    assert not nodes.wait_for_room(ids, {"CPU": 99.0}, deadline_s=0.0)
    group = placement_group([{"CPU": 1}, {"CPU": 1}], bundle_label_selector=chosen)
    try:
        assert group.wait(20)
        where = placement_group_table(group)["bundles_to_node_id"]
        assert where[0] == ids[1]
        assert where[1] != ids[0]
    finally:
        remove_placement_group(group)


def test_room_for_workers_on_each_node(ray_cluster: Any) -> None:
    """What a running group has is room for the next one, also where it has all of a node."""
    import ray
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    ids = sorted(info["NodeID"] for info in ray.nodes() if info["Alive"])
    each = {"CPU": 1.0, "trainer": 1.0, "GPU": 0.0}

    def room(**more: Any) -> dict[str, int]:
        return nodes.places(each, **{"held": [], "own": None, "most": 9, **more})

    wait_for(lambda: room() == dict.fromkeys(ids, 1), "nothing else to run on this cluster")
    assert nodes.places({"CPU": 1.0}, held=[], own=None, most=9) == dict.fromkeys(ids, 2)
    assert nodes.places({"CPU": 0.5}, held=[], own=None, most=3) == dict.fromkeys(ids, 3)
    assert nodes.places({"CPU": 3.0}, held=[], own=None, most=9) == dict.fromkeys(ids, 0)
    group = placement_group([each], bundle_label_selector=[{nodes.NODE_LABEL: ids[0]}])
    try:
        assert group.wait(20)
        assert placement_group_table(group)["bundles_to_node_id"] == {0: ids[0]}
        wait_for(lambda: room()[ids[0]] == 0, "its place to be taken")
        assert room(held=[ids[0]]) == dict.fromkeys(ids, 1)
    finally:
        remove_placement_group(group)
    wait_for(lambda: room()[ids[0]] == 1, "its place to be free")
    assert room(held=[ids[0]]) == dict.fromkeys(ids, 1), "a place that is counted twice is still one"
    one, others = {nodes.NODE_LABEL: ids[0]}, {nodes.NODE_LABEL: f"!in({ids[0]})"}
    assert set(room(own=one)) == {ids[0]}
    assert set(room(own=others)) == set(ids[1:])
    assert set(room(own=[one, {nodes.NODE_LABEL: f"in({ids[1]}, none)"}])) == {ids[0], ids[1]}
    assert room(own={"market-type": "spot"}) == {}
    assert set(room(own={"market-type": "!spot"})) == set(ids)


def test_rays_elastic_policy_can_be_answered_for() -> None:
    """Its two decisions, the places of what they are made of, and that a running group is left alone by our answer."""
    policy = scaling_policy.ElasticScalingPolicy
    assert list(inspect.signature(policy.make_decision_for_non_running_worker_group).parameters) == ["self"]
    running = list(inspect.signature(policy.make_decision_for_running_worker_group).parameters)
    assert running == ["self", "worker_group_state", "worker_group_status"]
    assert {"_maybe_send_resource_request", "_get_strict_tpu_worker_count"} <= set(dir(policy))
    assert [one.name for one in dataclasses.fields(scaling_policy.ResizeDecision)] == ["num_workers", "resources_per_worker"]
    scaling = ScalingConfig(num_workers=(1, 2))
    assert type(scaling_policy.create_scaling_policy(scaling)) is policy
    assert scaling._resources_per_worker_not_none == {"CPU": 1}
    assert (scaling.placement_strategy, scaling.elastic_resize_monitor_interval_s) == ("PACK", 60.0)


def test_rays_autoscaler_is_asked_for_the_most_workers_wherever_they_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the present, smaller group has to be is no request: Ray refuses one selector for two workers, and then adds no node."""
    policy = scaling_policy.ElasticScalingPolicy
    monkeypatch.setattr(policy, "make_decision_for_running_worker_group", policy.make_decision_for_running_worker_group)
    monkeypatch.setattr(policy, "make_decision_for_non_running_worker_group", policy.make_decision_for_non_running_worker_group)
    monkeypatch.setattr(elastic.ElasticGroups, "_look", lambda self, policy, now_s: None)
    asked = list[Any]()
    for own in (None, {"zone": "a"}, [{"zone": "a"}, {"zone": "b"}]):
        scaling = ScalingConfig(num_workers=(1, 2), label_selector=own)
        elastic.ElasticGroups(scaling, Sizes.of((1, 2)), leaving=frozenset, grow=lambda reason: None).install()
        rays = scaling_policy.create_scaling_policy(scaling)
        rays._coordinator_client = SimpleNamespace(
            maybe_send_resource_request=lambda config, most: asked.append((most, config._label_selector_per_worker(most)))
        )
        scaling.label_selector = nodes.selectors(["node"], own=own, avoid=frozenset())  # as the callback says where ranks go
        rays.make_decision_for_running_worker_group(worker_group_state=None, worker_group_status=None)
        assert asked.pop() == (2, [own, own] if isinstance(own, dict) else own)


def test_what_the_policy_answers(ray_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    policy = scaling_policy.ElasticScalingPolicy
    for name in ("make_decision_for_non_running_worker_group", "make_decision_for_running_worker_group"):
        monkeypatch.setattr(policy, name, getattr(policy, name))  # restores them
    monkeypatch.setattr(policy, "_maybe_send_resource_request", lambda self: None)
    now_s = 0.0
    ids = sorted(info["NodeID"] for info in ray.nodes() if info["Alive"])
    each = {"CPU": 1, "trainer": 1}
    scaling = ScalingConfig(num_workers=(1, 3), resources_per_worker=each, elastic_resize_monitor_interval_s=5.0)
    leaving, wanted = set(ids[1:]), list[str]()
    groups = elastic.ElasticGroups(
        scaling, Sizes.of((1, 3)), leaving=lambda: frozenset(leaving), grow=wanted.append, clock=lambda: now_s
    )
    groups.install()
    asked = scaling_policy.create_scaling_policy(scaling)
    wait_for(lambda: asked.make_decision_for_non_running_worker_group().num_workers == 1, "the one node that stays to be free")
    decision = asked.make_decision_for_non_running_worker_group()
    assert decision == scaling_policy.ResizeDecision(num_workers=1, resources_per_worker=each)
    groups.started(lambda: None)

    def a_second_later() -> None:
        nonlocal now_s
        now_s += 1.0
        running = asked.make_decision_for_running_worker_group(worker_group_state=None, worker_group_status=None)
        assert type(running) is scaling_policy.NoopDecision, "the group ends by its ranks' agreement, not by Ray Train's hand"

    for _ in range(50):
        a_second_later()
    assert not wanted, "nodes that go away are no room"
    leaving.clear()
    for _ in range(7):
        a_second_later()
    assert wanted == ["there has been room for 3 workers for 5 s: the run grows from 1"]
    assert asked.make_decision_for_non_running_worker_group().num_workers == 3


@pytest.mark.long
@pytest.mark.parametrize("code", [None, 0])
def test_a_training_function_may_end_with_sys_exit(code: Any) -> None:
    assert launch._entry(lambda: sys.exit(code))().value is None
    for bad in (1, "the data are gone"):
        with pytest.raises(SystemExit):
            launch._entry(functools.partial(sys.exit, bad))()


def test_the_coordinator_hears_once_of_nodes_that_are_new_to_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, ...]] = []
    coordinator = SimpleNamespace(expect=SimpleNamespace(remote=told.append))
    monkeypatch.setattr(telling, "find_actor", lambda _: coordinator)
    callback = RayTrainCallback(CONFIG)
    callback._expect(["a", "b"])  # the first group: nobody has been let into the run yet
    assert told == []
    callback._places.nodes = ["a", "b"]
    for _ in range(2):  # when they are placed, and when their processes are there
        callback._expect(["a", "c"])
    assert told == [("c",)]


def test_a_process_that_waits_has_all_that_a_trainer_imports_and_no_devices() -> None:
    program = (
        "import sys; from raystate.train.standby import preload; preload('file:///runs/a'); have = set(sys.modules);"
        "import raystate.train.callback, raystate.train.launch, raystate.actors.link, raystate.actors.compiled, raystate.compilation;"
        "from raystate.storage import open_storage; open_storage('file:///runs/a');"
        "from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized();"
        "new = [name for name in set(sys.modules) - have if name.startswith('raystate')]; assert not new, new"
    )
    run_python("-c", program, env=job_environment(1))


def test_a_library_that_is_imported_ahead_initialises_no_devices() -> None:
    there = [name for name in standby._LIBRARIES if importlib.util.find_spec(name.partition(".")[0])]
    program = (
        "from raystate.train import standby; from jax._src import xla_bridge\n"
        f"for name in {there}:\n"
        "    standby.import_libraries(['no_such_library', name])\n"
        "    assert not xla_bridge.backends_are_initialized(), name\n"
        "    assert name in standby.imported_libraries(), name\n"
    )
    run_python("-c", program, env=job_environment(1))


def test_the_barrier_that_waits_is_the_next_groups_if_it_lives(ray_cluster: Any) -> None:
    import ray

    assert vars(ray_worker_group)["SynchronizationActor"] is sync_actor.SynchronizationActor
    assert "SynchronizationActor.options(" in inspect.getsource(ray_worker_group.WorkerGroup), "a group's start asks there"
    barriers = group_actors._Barriers(sync_actor.SynchronizationActor)

    def asked(timeout_s: float) -> Any:
        return barriers.options(label_selector={}).remote(timeout_s=timeout_s, warn_interval_s=5.0)

    def ahead() -> Any:
        barriers.start_ahead()
        assert ray.get(barriers._waiting.get_world_size.remote(), timeout=PATIENCE_S) == 0, "started, and nobody has come to it"
        return barriers._waiting

    first = asked(60.0)
    waiting = ahead()
    second = asked(60.0)
    assert second is waiting and barriers._waiting is None
    other = asked(60.0)
    assert other not in (first, second), "nothing waited"
    dead = ahead()
    ray.kill(dead)
    wait_for(lambda: not group_actors._is_alive(dead), "the end of the one that waits")
    third = asked(60.0)
    assert third is not dead
    with_other_settings = ahead(), asked(30.0)
    assert with_other_settings[0] is not with_other_settings[1]
    last = ahead()
    barriers.close()
    assert barriers._waiting is None
    wait_for(lambda: not group_actors._is_alive(last), "the end of the last")
    for one in (first, second, other, third, with_other_settings[1]):
        ray.kill(one)


def test_a_groups_watch_starts_once_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = preemption_callback.PreemptionCallback
    monkeypatch.setattr(kind, "after_worker_group_start", kind.after_worker_group_start)  # which puts it back
    monkeypatch.setattr(ray_worker_group, "SynchronizationActor", sync_actor.SynchronizationActor)
    done: list[Any] = []
    monkeypatch.setattr(kind, "_stop_watcher", lambda callback: done.append("stop"))
    actors = group_actors.GroupActors()
    actors.install()
    callback = kind()
    callback.after_worker_group_start("first")
    assert done == ["stop"]

    def failing(_callback: Any, _group: Any) -> None:
        raise ConnectionError("Ray's head is out of reach")

    monkeypatch.setattr(group_actors, "_start_watch", failing)
    with pytest.raises(ConnectionError):
        actors.group_trains(ahead=False)
    monkeypatch.setattr(group_actors, "_start_watch", lambda callback, group: done.append(group))
    for _ in range(2):  # it is tried again, and started once
        actors.group_trains(ahead=False)
    assert done == ["stop", "first"]
    callback.after_worker_group_start("second")
    actors.group_ended()
    actors.group_trains(ahead=False)
    assert done == ["stop", "first", "stop"], "the watch of a group that has ended"


def test_a_start_ends_when_its_place_is_gone(ray_cluster: Any) -> None:
    """A node is lost between the placement of a group and its workers' first answers: Ray Train has no deadline there."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    class Late:
        def get_metadata(self) -> None:
            """It never starts."""

    doomed = ray_cluster.add_node(num_cpus=1, resources={"doomed": 1}, object_store_memory=100 << 20)
    ray_cluster.wait_for_nodes(PATIENCE_S)
    placement = ray.util.placement_group([{"CPU": 1, "doomed": 1}])
    assert placement.wait(PATIENCE_S)
    lose_node(ray_cluster, doomed)
    # Until Ray's head knows, it sends the worker to the lost node, and the worker dies there: another end of a start.
    wait_for(lambda: ray.util.placement_group_table(placement)["state"] != "CREATED", "Ray to miss the node")
    there = PlacementGroupSchedulingStrategy(placement_group=placement, placement_group_bundle_index=0)
    late = ray.remote(Late).options(num_cpus=1, resources={"doomed": 1}, scheduling_strategy=there).remote()
    with pytest.raises(WorkerGroupStartupTimeoutError):
        bundles.first_answers([late], placement, timeout_s=0.5, start_s=PATIENCE_S)


def test_a_start_ends_although_its_place_is_there(ray_cluster: Any) -> None:
    """A process that hangs as it starts: Ray Train has no deadline there, either."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    del ray_cluster

    class Worker:
        def __init__(self, hangs: bool):
            if hangs:
                threading.Event().wait()

        def get_metadata(self) -> str:
            return "there"

    placement = ray.util.placement_group([{"CPU": 1}, {"CPU": 1}])
    assert placement.wait(PATIENCE_S)
    node = ray.util.placement_group_table(placement)["bundles_to_node_id"][1][:8]

    def started(*, hangs: bool) -> list[Any]:
        there = [
            PlacementGroupSchedulingStrategy(placement_group=placement, placement_group_bundle_index=index) for index in (0, 1)
        ]
        kinds = [ray.remote(Worker).options(num_cpus=1, scheduling_strategy=one) for one in there]
        return [kinds[0].remote(False), kinds[1].remote(hangs)]

    actors = started(hangs=False)
    assert bundles.first_answers(actors, placement, timeout_s=0.5, start_s=PATIENCE_S) == ["there", "there"]
    for actor in actors:
        ray.kill(actor)
    actors = started(hangs=True)
    with pytest.raises(
        WorkerGroupStartupFailedError, match=rf"not started \d of 2 worker processes within 0.5 s, on nodes .*{node}"
    ):
        bundles.first_answers(actors, placement, timeout_s=0.5, start_s=0.5)
    wait_for(lambda: ray.util.placement_group_table(placement)["state"] == "REMOVED", "the end of its places")


def test_where_a_ray_that_runs_has_its_logs(ray_cluster: Any) -> None:
    """`raystate story` looks there."""
    from ray._private import worker

    assert Path(worker._global_node.get_logs_dir_path()) in story.logs_of_raylets()


def test_no_actor_for_datasets_where_there_are_none(monkeypatch: pytest.MonkeyPatch):
    """Ray Train makes them by these callbacks, from the trainer's own attributes."""
    monkeypatch.setattr(trainer_module, "has_dashboard", lambda: True)

    def of_datasets(given: dict[str, Any]) -> list[type]:
        trainer = trainer_module.QuietJaxTrainer(lambda: None, scaling_config=ScalingConfig(num_workers=2), datasets=given)
        return [type(one) for one in trainer._create_default_callbacks() if isinstance(one, datasets.DatasetsCallback)]

    assert of_datasets({}) == [trainer_module._NoDatasetsCallback]
    assert of_datasets({"train": lambda: None}) == [datasets.DatasetsCallback]
    none = trainer_module.QuietJaxTrainer(lambda: None, scaling_config=ScalingConfig(num_workers=2))._create_default_callbacks()
    (callback,) = [one for one in none if isinstance(one, datasets.DatasetsCallback)]
    (given,) = callback.before_init_train_context([None, None]).values()
    assert len(given) == 2
    with pytest.raises(KeyError, match="there is no dataset 'train': give it to fit"):
        given[0].get_dataset_shard(DatasetShardMetadata(dataset_name="train", world_rank=0))
