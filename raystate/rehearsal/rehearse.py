"""rehearse(): two steps, all processes ended, started again in new ones, two more steps, beside four undisturbed ones."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raystate.config.rehearsing import Play, play
from raystate.config.state_config import StateConfig, check_config
from raystate.core.formats.errors import ConfigError
from raystate.public_calls import public
from raystate.rehearsal.plays import Stage, scratch_folder
from raystate.rehearsal.verdict import PLAYS, Played, Rehearsal, Verdict
from raystate.waits import LONGEST_S

if TYPE_CHECKING:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxConfig

logger = logging.getLogger("raystate")


@public
def rehearse(
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
    global_batch: int | None = None,
    timeout_s: float = LONGEST_S,
    scratch: str | os.PathLike[str] | None = None,
) -> Rehearsal:
    """Find out whether a restart would work, before the training begins.

    `raystate.fit(train_fn, config, …)` runs three times in processes of its own. The first makes
    two steps. The second goes on from there and makes two more. The third makes four undisturbed
    ones, and all saved values are compared bit by bit. "A step" is a `save`; the last one of each
    run raises `Interrupted`. The run's own storage is neither read nor written. A scratch folder,
    which is removed, gets the step that the restart needs and no other state.

    Args:
        train_fn, config, num_workers, train_loop_config, scaling_config, run_config, jax_config, datasets, env, global_batch: as in
            `fit`. The function must not need more than four saves.
        timeout_s: seconds for each of the three runs; then its processes are ended.
        scratch: folder or bucket for the scratch folder; all nodes must reach it. None: the temporary folder, for one
            node.

    Returns:
        The findings, which a notebook shows; `ok` is True if there are none. Problems are logged as a warning, too.

    Raises:
        ConfigError: an argument is wrong, or the function has fewer than four saves, or none.
    """
    if not callable(train_fn):
        text = f"rehearse() needs the training function first, not a {type(train_fn).__name__}: rehearse(train_fn, config)"
        raise ConfigError(text, field="train_fn")
    config = check_config(config, "rehearse()")
    given = {
        "train_fn": train_fn,
        "config": config,
        "num_workers": num_workers,
        "train_loop_config": train_loop_config,
        "scaling_config": scaling_config,
        "run_config": run_config,
        "jax_config": jax_config,
        "datasets": datasets,
        "env": env,
        "global_batch": global_batch,
    }
    with _arguments_file(given) as file:
        command = [sys.executable, "-m", "raystate.rehearsal.child", "fit", str(file)]
        environment = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), **_own_cluster()}
        name = getattr(train_fn, "__name__", type(train_fn).__name__)
        result = _rehearse(name, Stage(command=command, environment=environment), timeout_s=timeout_s, scratch=scratch)
    logger.log(logging.INFO if result.ok else logging.WARNING, "%s", result)
    return result


def rehearse_command(script: str, arguments: Sequence[str], *, module: bool, timeout_s: float, scratch: str | None) -> Rehearsal:
    """The same with a script, or with a module as `python -m` runs it.

    Raises:
        ConfigError: there is no such script, or it can't be rehearsed.
    """
    if not module and not Path(script).is_file():
        raise ConfigError(f"there is no script {script}; a module is rehearsed with -m", field="script", got=script)
    command = [sys.executable, *(["-m"] if module else []), script, *arguments]
    return _rehearse(script, Stage(command=command, environment={}), timeout_s=timeout_s, scratch=scratch)


def _rehearse(name: str, stage: Stage, *, timeout_s: float, scratch: str | os.PathLike[str] | None) -> Rehearsal:
    if play() is not None:
        raise ConfigError("rehearse() was called in a rehearsal: leave it out of the training function", field="train_fn")
    if not timeout_s > 0:
        raise ConfigError(f"timeout_s = {timeout_s!r}: must be more than 0 seconds", field="timeout_s", got=timeout_s)
    verdict = Verdict(name)
    with scratch_folder(None if scratch is None else os.fspath(scratch)) as url:

        def played(part: str) -> Played:
            return stage.play(Play(name=part, scratch=url, saves=PLAYS[part], limit_s=timeout_s))

        first = played("first")
        if not verdict.of_first(first):
            return verdict.result(None)
        again = played("again")
        if not verdict.of_again(first, again):
            return verdict.result(None)
        undisturbed = played("undisturbed")
        verdict.of_undisturbed(first, again, undisturbed)
        return verdict.result(undisturbed)


@contextlib.contextmanager
def _arguments_file(given: Mapping[str, Any]) -> Iterator[Path]:
    from ray import cloudpickle

    with tempfile.TemporaryDirectory(prefix="raystate-rehearsal-") as folder:
        file = Path(folder) / "arguments"
        try:
            data: bytes = cloudpickle.dumps({**given, "max_failures": 0})  # pyright: ignore[reportPrivateImportUsage]
            file.write_bytes(data)
        except Exception as error:  # the objects in it may raise anything
            text = f"train_fn, or another argument, can't be sent to another process: {type(error).__name__}: {error}"
            raise ConfigError(text, field="train_fn") from None
        yield file


def _own_cluster() -> dict[str, str]:
    """The Ray that this process has joined is the one to rehearse on."""
    import ray

    if not ray.is_initialized():
        return {}
    return {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
