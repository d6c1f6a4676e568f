"""Train a byte-level language model on the Python standard library's own source, with its state kept by raystate.

    python -m jobs.train_lm --config configs/lm_cpu.yaml [--set train.steps=100 --set state.storage=/data/lm]
    ray job submit --working-dir . -- python -m jobs.train_lm --config configs/lm_cpu.yaml

Run it again and it goes on where it was: the storage has to be a bucket or absolute.
Exit codes: 0 finished, 1 failed, 2 bad usage, 75 interrupted but resumable.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from jobs.lm.config import Config, RayConfig, UsageError, load

if TYPE_CHECKING:
    import raystate

FINISHED, FAILED, BAD_USAGE, RESUMABLE = 0, 1, 2, 75


class _Terminated(BaseException):
    """SIGTERM: like KeyboardInterrupt, not to be caught by code that catches Exception."""


def main(argv: list[str] | None = None) -> int:
    """Parse, check, launch, and say how it ended.

    Returns:
        The exit code.
    """
    arguments = _parser().parse_args(argv)
    try:
        config = load(arguments.config, arguments.set)
        state = _state_config(config, arguments.config)
        if arguments.check:
            print(f"{arguments.config}: fine, {config.train.steps} steps, run {state.run!r} in {state.storage}")
            return FINISHED
        launch = _launch_options(config.ray)
    except UsageError as error:
        return _say(error, BAD_USAGE)
    return _run(config, state, launch)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.train_lm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML with the sections model, data, train, ray, state")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override one key, for example train.steps=100; repeatable"
    )
    parser.add_argument("--check", action="store_true", help="only check the configuration")
    return parser


def _state_config(config: Config, path: str) -> raystate.StateConfig:
    import raystate

    try:
        return raystate.StateConfig(**config.state)
    except raystate.ConfigError as error:
        raise UsageError("\n".join(f"{path}: state.{line}" for line in str(error).splitlines())) from error
    except TypeError as error:  # a key that is not a string
        raise UsageError(f"{path}: state: {error}") from error


def _launch_options(config: RayConfig) -> dict[str, Any]:
    """What `raystate.fit` passes on to Ray Train.

    Raises:
        UsageError: Ray Train refuses the settings.
    """
    from ray.train import RunConfig, ScalingConfig

    resources: dict[str, float] = {"CPU": config.cpus_per_worker}
    if config.platform != "cpu" and config.devices_per_worker:
        resources["GPU" if config.platform == "gpu" else "TPU"] = config.devices_per_worker
    workers = config.num_workers
    try:
        scaling = ScalingConfig(
            **{
                "num_workers": workers,
                "use_gpu": config.platform == "gpu",
                "use_tpu": config.platform == "tpu",
                "resources_per_worker": resources,
                **config.scaling,
            }
        )
    except (TypeError, ValueError) as error:
        raise UsageError(f"ray: {str(error).splitlines()[0]}") from error
    return {
        "num_workers": workers,
        "scaling_config": scaling,
        "run_config": RunConfig(worker_runtime_env={"env_vars": worker_env(config)}),
        "max_failures": config.max_failures,
    }


def worker_env(config: RayConfig) -> dict[str, str]:
    """The environment of the processes that train, beside what they inherit."""
    env = dict(config.env)
    if config.platform == "cpu":
        env.setdefault("JAX_PLATFORMS", "cpu")
        flags = env.get("XLA_FLAGS", os.environ.get("XLA_FLAGS", "")).split()
        flags = [flag for flag in flags if not flag.startswith("--xla_force_host_platform_device_count")]
        env["XLA_FLAGS"] = " ".join([*flags, f"--xla_force_host_platform_device_count={config.devices_per_worker or 1}"])
    return env


def _run(config: Config, state: raystate.StateConfig, launch: dict[str, Any]) -> int:
    import ray
    from ray.exceptions import RayError

    import raystate
    from jobs.lm.corpus import CorpusError, load_corpus

    try:
        fingerprint = load_corpus(config.data).fingerprint
        if not ray.is_initialized():
            ray.init()
    except (CorpusError, OSError) as error:
        return _say(error, FAILED)
    # After ray.init, which sets a handler of its own.
    before = signal.signal(signal.SIGTERM, _terminate)
    hint = f"the run {state.run!r} in {state.storage} goes on where it was when started again"
    try:
        from jobs.lm.train import train_fn  # imports jax; no device is touched in this process

        loop_config = {"config": config.model_dump(mode="json"), "corpus": fingerprint}
        result = raystate.fit(train_fn, state, train_loop_config=loop_config, global_batch=config.train.batch_size, **launch)
    except raystate.Interrupted as error:
        return _say(f"interrupted: {_first_line(error)}; {hint}", RESUMABLE)
    except (KeyboardInterrupt, _Terminated) as error:
        return _say(f"interrupted by {'SIGTERM' if isinstance(error, _Terminated) else 'Ctrl-C'}; {hint}", RESUMABLE)
    except SystemExit:  # how Ray Train answers Ctrl-C
        return _say(f"interrupted; {hint}", RESUMABLE)
    except raystate.RaystateError as error:
        return _say(_with_cause(error), FAILED)
    except RayError as error:
        return _say(_with_cause(error), FAILED)
    finally:
        signal.signal(signal.SIGTERM, before)
    returned = _of_rank_0(result.return_value)
    if "refused" in returned:
        return _say(returned["refused"], FAILED)
    _summarize(result, returned)
    return FINISHED


def _terminate(_signum: int, _frame: object) -> None:
    raise _Terminated


def _of_rank_0(value: Any) -> dict[str, Any]:
    value = value[0] if isinstance(value, list | tuple) and value else value
    return value if isinstance(value, dict) else {}


def _summarize(result: Any, returned: dict[str, Any]) -> None:
    print(f"finished: step {result.step}, saved at {result.path}")
    if returned.get("loss_hex"):
        print(f"final loss {returned['loss_hex']}  ({returned['loss']:.6f} nats/byte)")


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _with_cause(error: BaseException) -> str:
    cause = error.__cause__
    text = f"{type(error).__name__}: {_first_line(error)}"
    return text if cause is None or _first_line(cause) in text else f"{text} (cause: {type(cause).__name__}: {_first_line(cause)})"


def _say(message: object, code: int) -> int:
    for line in str(message).splitlines():
        print(f"train_lm: {line}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
