"""fit(): a JaxTrainer that always finishes, or says why not."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

from ray.exceptions import RayError
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.config import LoggingConfig
from ray.train.v2.api.exceptions import TrainingFailedError
from ray.train.v2.jax import JaxConfig

from raystate import log_lines
from raystate.actors import launch_context
from raystate.actors.admission import enter_first
from raystate.actors.blame import check_sendable
from raystate.actors.compiled import keep_compiled
from raystate.actors.local_ray import this_ray
from raystate.actors.release import release
from raystate.config.errors import check_flag
from raystate.config.state_config import StateConfig, check_config
from raystate.core.formats.errors import BarrierTimeoutError, ConfigError, Interrupted, RunFailedError, StorageError
from raystate.core.launcher.elastic import Sizes
from raystate.inspection.listing import given_up
from raystate.machine.sigterm import Sigterm, tell_stop
from raystate.manager.ending import is_clean_exit
from raystate.manager.opening import open_managers
from raystate.observe.ends import is_final, is_of_rehearsal
from raystate.public_calls import public
from raystate.storage import open_storage
from raystate.train import endings, terminal
from raystate.train.bar import run_bar
from raystate.train.callback import MAX_FAILURES, Outcome, RayTrainCallback
from raystate.train.events import OnEvent, listener, telling
from raystate.train.jax_backend import QuickJaxConfig
from raystate.train.result import RunResult, run_result
from raystate.train.trainer import QuietJaxTrainer
from raystate.waits import RESIZE_EVERY_S

logger = logging.getLogger(__name__)

_PRINT_PATCH = "RAY_TRAIN_ENABLE_PRINT_PATCH"


@public
def fit(
    train_fn: Callable[[], Any] | Callable[[dict[str, Any]], Any],
    config: StateConfig,
    *,
    num_workers: int | tuple[int, int] | None = None,
    train_loop_config: dict[str, Any] | None = None,
    scaling_config: ScalingConfig | None = None,
    run_config: RunConfig | None = None,
    jax_config: JaxConfig | None = None,
    datasets: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
    max_failures: int = MAX_FAILURES,
    global_batch: int | None = None,
    takeover: bool = False,
    on_event: OnEvent | str | None = None,
) -> RunResult:
    """Train until `train_fn` has returned on every worker, starting again after every failure and interruption.

    Without accelerators in `scaling_config` the workers run on CPU and form one JAX job (with a plain JaxTrainer they don't).

    Args:
        train_fn: runs in every worker; takes `train_loop_config` or nothing, as in JaxTrainer. Makes a `StateManager()`.
        config: the run's `StateConfig`.
        num_workers: workers, or (fewest, most) for an elastic run. It goes on with fewer when it
            loses a node, and with more when there is room again. It grows at the earliest
            `elastic_resize_monitor_interval_s` of `scaling_config` after a start, 30 s if none is
            given. 2 if neither this nor `scaling_config` is given.
        train_loop_config: passed to `train_fn`.
        scaling_config, run_config, jax_config: passed on to JaxTrainer. `run_config`'s callbacks are kept. Its failure limits are
            replaced: `max_failures` decides.
        datasets: Ray Data datasets by name, passed on to JaxTrainer: `ray.train.get_dataset_shard(name)` gives a worker its share. A new
            worker group reads them from the beginning: `raystate.Counted` goes on where the restored step was.
        env: environment variables of the workers, such as `{"PYTHONPATH": "/shared/code"}`: in `run_config.worker_runtime_env`, beside
            what is there.
        max_failures: give up after so many failed starts in a row without a new step, or with the same exception at nearly the same
            step; 0: at the first failure; -1: never, but if there is no room for `idle_timeout_s`. Interruptions don't count, nor does
            a growth.
        global_batch: examples of one step over all processes. An elastic run then has only sizes that divide it, and `fewest` and
            `most` have to. None: `train_fn` sees to it that a step is the same for every size.
        takeover: as in `StateManager`: end another use of the same run; give up what memory holds of it
            if its folder is gone from storage.
        on_event: called in this process with a `raystate.train.RunEvent` for each durable step, restart and notice: a callable, or
            "module:function", without `async`. It runs on a thread of its own, within about a second, and nothing waits for it. An
            exception of it is one warning.

    Returns:
        The result, once the last step is durable and no actor of the run is left.

    Raises:
        ConfigError: the arguments contradict each other, or the workers don't form one JAX job.
        ReferenceMismatchError, ItemTopologyError, StepOrderError and other mistakes in `train_fn`'s calls: at once, as they are.
        RunFailedError: gave up. Its cause is the user's exception; `rank` says whose. The newest complete snapshot is durable.
        StorageError: `close` has raised it as it ended the run: the newest step for which `save` had returned True is not durable.
            (`RunResult.lost` has older steps that gave way to it.)
        StaleAttemptError: the run belongs to another attempt. RunInUseError: it is in use. StorageError:
            its folder is gone, and memory holds the run. All before anything starts.
    """
    if not callable(train_fn):
        text = f"fit() needs the training function first, not a {type(train_fn).__name__}: fit(train_fn, config)"
        raise ConfigError(text, field="train_fn")
    called_s = time.time()
    config, listens = check_config(config, "fit()"), listener(on_event)
    check_flag("takeover", takeover)
    _check_of_ray(
        scaling_config=(scaling_config, ScalingConfig), run_config=(run_config, RunConfig), jax_config=(jax_config, JaxConfig)
    )
    scaling = _scaling(scaling_config, num_workers, global_batch)
    callback = RayTrainCallback(config, max_failures=max_failures, global_batch=global_batch)
    callback._returns_outcome, callback._start.called_s = True, called_s
    on_cpu = not scaling.use_tpu and not scaling.use_gpu
    arguments: dict[str, Any] = {
        "train_loop_config": train_loop_config,
        "jax_config": _jax_config(jax_config, scaling),
        "scaling_config": scaling,
        "datasets": _datasets(datasets),
        "run_config": _run_config(run_config, callback, on_cpu=on_cpu, env=env),
    }
    entry = _entry(train_fn, takes_config=bool(train_loop_config))
    this_ray.enter(stays=False)
    with log_lines.naming(config.run), terminal.calm(), contextlib.ExitStack() as ending:
        sigterm = Sigterm()
        sigterm.take()
        ending.callback(sigterm.give_back)
        ending.callback(this_ray.leave)
        terminal.tell_start(config.run, scaling.num_workers)
        trainer = QuietJaxTrainer(entry, **arguments)
        with run_bar(config), telling(listens, config):
            storage = open_storage(config.storage)
            before = given_up(storage)
            result, lost = _run(trainer, config, callback._launch, sigterm, takeover=takeover)
        after = {} if before is None else given_up(storage) or {}
        new = (text for one, text in after.items() if one not in (before or {}))
        found = run_result(result, config, tuple(dict.fromkeys((*new, *lost))))
    terminal.tell_end(found, config.run)
    return found


def _enter(config: StateConfig, launch: str, *, takeover: bool) -> None:
    """Have the run, or raise what speaks against it. Errors that another try may mend are left to
    the worker groups, which are tried again."""
    if takeover:
        open_managers.close_earlier(config, takeover=True)
    try:
        enter_first(config, launch, takeover=takeover)
    except (StorageError, BarrierTimeoutError, RayError) as error:
        if is_final(error):
            raise
        logger.warning("the run can't begin yet: %s", error)


def _run(
    trainer: QuietJaxTrainer, config: StateConfig, launch: str, sigterm: Sigterm, *, takeover: bool
) -> tuple[Any, tuple[str, ...]]:
    """Ray Train's result, and what the run's end says is lost."""
    try:
        _enter(config, launch, takeover=takeover)
        result = trainer.fit()
    except TrainingFailedError as wrapped:
        error, cause = _unwrap(wrapped)
        error.__cause__ = cause  # before anybody asks what it failed with
        _release(config, launch, f"failed: {error}", after=error)
        raise error from cause
    except BaseException as error:  # the driver is being stopped: the run can go on later
        with sigterm.instead_of(error) as end:
            why = "Ctrl-C" if isinstance(end, KeyboardInterrupt) else str(end) or type(end).__name__
            if isinstance(end, (KeyboardInterrupt, SystemExit)):
                tell_stop(why, config.run)
            trainer.abort()
            _release(config, launch, f"the driver was stopped: {why}", after=end)
            raise
    return result, _release(config, launch, "finished")


def _unwrap(wrapped: TrainingFailedError) -> tuple[BaseException, BaseException | None]:
    """The error to raise for Ray Train's, and its cause."""
    error = endings.ours(wrapped)
    if error is None:
        return RunFailedError(f"Ray Train gave up: {wrapped}"), wrapped
    cause = error.details.pop("error", None)
    text = error.details.pop("traceback", "")
    if text:
        text = text.partition(f"raystate.{type(error).__name__}: ")[0]  # which follows, and is said already
        (cause or error).add_note(f"on rank {error.rank}:\n{text}")  # a pickled exception has lost its own traceback
    return error, cause


def _release(config: StateConfig, launch: str, reason: str, *, after: BaseException | None = None) -> tuple[str, ...]:
    """The newest snapshot durable, no actor left: if the run is this launch's, and not somebody else's that it was refused for. Gives
    what was promised and is lost.

    After an error, a failure to do so is noted on it and doesn't replace it.
    """
    try:
        reply = release(config, reason, launch=launch, after=after)
    except Exception as error:
        if after is None:
            raise
        after.add_note(f"and {endings.release_text(error)}")
        return ()
    return () if reply is None else reply.errors


# ---------------------------------------------------------------- what JaxTrainer is given


def _check_of_ray(**given: tuple[object, type]) -> None:
    for name, (value, wanted) in given.items():
        if value is not None and not isinstance(value, wanted):
            raise ConfigError(f"{name} must be Ray Train's {wanted.__name__}, not a {type(value).__name__}", field=name)


def _scaling(
    scaling_config: ScalingConfig | None, num_workers: int | tuple[int, int] | None, global_batch: int | None
) -> ScalingConfig:
    asked = 2 if num_workers is None else num_workers
    if scaling_config is None or num_workers is not None:
        Sizes.of(asked, global_batch)
    if scaling_config is None:
        return ScalingConfig(num_workers=asked, elastic_resize_monitor_interval_s=RESIZE_EVERY_S)
    if num_workers is not None and num_workers != scaling_config.num_workers:
        raise ConfigError(
            f"num_workers={num_workers} but scaling_config has num_workers={scaling_config.num_workers}; give it once",
            field="num_workers",
        )
    if isinstance(scaling_config.num_workers, tuple) or global_batch is not None:
        Sizes.of(scaling_config.num_workers, global_batch)
    return scaling_config


def _jax_config(jax_config: JaxConfig | None, scaling: ScalingConfig) -> JaxConfig:
    if jax_config is None:
        # use_gpu also on CPU: it is what makes JaxTrainer start jax.distributed; JAX_PLATFORMS says what it runs on.
        return QuickJaxConfig(use_tpu=scaling.use_tpu, use_gpu=not scaling.use_tpu)
    if type(jax_config) is JaxConfig:
        return QuickJaxConfig(use_tpu=jax_config.use_tpu, use_gpu=jax_config.use_gpu)
    return jax_config


def _datasets(datasets: Mapping[str, object] | None) -> dict[str, Any] | None:
    if datasets is not None and not isinstance(datasets, Mapping):
        text = (
            f'datasets must be a dict of name and dataset, not a {type(datasets).__name__}: fit(…, datasets={{"train": dataset}})'
        )
        raise ConfigError(text, field="datasets")
    return None if datasets is None else dict(datasets)


def _check_env(env: Any, there: Mapping[str, str]) -> dict[str, str]:
    """The variables that a caller gave; `there` has those of its run_config."""
    if env is not None and not isinstance(env, Mapping):
        text = f'env must be a dict of variables, not a {type(env).__name__}: fit(…, env={{"NAME": "value"}})'
        raise ConfigError(text, field="env")
    for name, value in (env or {}).items():
        if not isinstance(name, str) or not name or "=" in name:
            raise ConfigError(f"env: {name!r} is no name of an environment variable", field="env")
        if not isinstance(value, str):
            text = f"env: {name} = {value!r}: the value of an environment variable is text: {str(value)!r}"
            raise ConfigError(text, field="env", got=name)
        if there.get(name, value) != value:
            text = f"env: {name} is {value!r}, and {there[name]!r} in run_config.worker_runtime_env; give it once"
            raise ConfigError(text, field="env", got=name)
    return dict(env or {})


def _run_config(
    run_config: RunConfig | None, callback: RayTrainCallback, *, on_cpu: bool, env: Mapping[str, str] | None = None
) -> RunConfig:
    """The user's, completed; theirs is left as it is."""
    if run_config is None:
        run_config = RunConfig(logging_config=LoggingConfig(log_level="ERROR"))
    run = copy.copy(run_config)
    run.callbacks = cast(Any, [*(run_config.callbacks or []), callback])  # Ray also takes internal callbacks
    failure = copy.copy(run_config.failure_config) or FailureConfig()
    for limit in ("max_failures", "max_preemption_failures", "controller_failure_limit"):
        if hasattr(failure, limit):  # of this Ray
            setattr(failure, limit, -1)
    run.failure_config = failure
    runtime_env = dict(run_config.worker_runtime_env or {})
    variables: dict[str, str] = runtime_env.get("env_vars") or {}
    variables = {**variables, **_check_env(env, variables)}
    if on_cpu:
        variables.setdefault("JAX_PLATFORMS", "cpu")
    # Where standard output goes to a file, as it does in Ray's workers, Ray Train's print() says everything twice.
    variables.setdefault(_PRINT_PATCH, os.environ.get(_PRINT_PATCH, "0"))
    run.worker_runtime_env = {**runtime_env, "env_vars": variables}
    return run


def _refuse_deferred(train_fn: Callable[..., Any]) -> None:
    called: Any = train_fn
    while isinstance(called, functools.partial):
        called = called.func
    called = called if inspect.isroutine(called) else called.__call__
    is_async = inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called)
    if is_async or inspect.isgeneratorfunction(called):
        what = "is `async def`" if is_async else "has a `yield`"
        raise ConfigError(f"train_fn {what}: calling it runs nothing; give fit() a function that runs it", field="train_fn")


def _entry(train_fn: Callable[..., Any], *, takes_config: bool = False) -> Callable[..., Any]:
    """`train_fn`, returning an Outcome. Raises ConfigError: Ray Train can't call it so, or it would run nothing then."""
    _refuse_deferred(train_fn)
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    positional = [parameter for parameter in inspect.signature(train_fn).parameters.values() if parameter.kind not in by_name]
    if takes_config and not positional:
        raise ConfigError("train_fn takes no positional argument: it would never see train_loop_config", field="train_fn")
    required = [
        parameter for parameter in positional if parameter.default is parameter.empty and parameter.kind != parameter.VAR_POSITIONAL
    ]
    if len(required) > 1:
        raise ConfigError(f"train_fn takes {len(required)} arguments; it may take train_loop_config or nothing", field="train_fn")

    # wraps: Ray looks at the signature, and shows the name.
    @functools.wraps(train_fn)
    def run(*args: Any) -> Outcome:
        context = launch_context.current()
        if context is not None:
            keep_compiled(
                context.config, rank=context.rank, world=context.world
            )  # before anything is compiled, and after jax.distributed has begun
        launch_context.enters_now()
        try:
            value = train_fn(*args)
        except (SystemExit, Interrupted) as end:
            if not is_clean_exit(end) and not is_of_rehearsal(end):
                raise
            value = None
        if (error := launch_context.unseen()) is not None:
            raise error
        if context is not None and "jax" in sys.modules:
            launch_context.check_world(context.world)
        if context is not None and context.rank > 0:
            value = None  # Ray Train returns rank 0's value only
        return Outcome(check_sendable(value), launch_context.summary())

    if takes_config:  # to an argument that has a default Ray Train would not pass it
        vars(run)["__signature__"] = inspect.Signature([inspect.Parameter("train_loop_config", inspect.Parameter.POSITIONAL_ONLY)])
    return run
