"""What a training process was told by its launcher: the seam between `train` and `manager`.

Standard library only: it is imported in every worker before the training function, and by processes that have no Ray.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from raystate.core.formats.errors import ConfigError
from raystate.core.formats.texts import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Why a worker group was started again.

    Attributes:
        start: the worker group that was started because of it, counted from 1 in this `fit`; so the first restart is 2.
        group: that worker group's token.
        cause: one line for a person.
        is_known: whether it was known which rank failed first. If not, the run's ledger may know by now.
        interrupted: the group before ended on purpose (`Interrupted`, a preempted node), not by a failure.
        seconds: from noticing the end of the group before to the training function running again; None while that is not known.
        workers: of the group that it led to; None if it isn't known.
    """

    start: int
    group: str
    cause: str
    is_known: bool = True
    interrupted: bool = False
    seconds: float | None = None
    workers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchContext:
    """One process's place in a worker group.

    Attributes:
        config: the run's `StateConfig`.
        group: token of this start of the worker group: equal on all its ranks, different after every restart.
        rank: world rank, 0 <= rank < world; equal to `jax.process_index()`.
        world: processes in the group; must equal `jax.process_count()` (see `check_world`).
        launch: token of the launcher: the same after a restart.
        restarts: the restarts so far, oldest first; the last one led to this group.
    """

    config: Any
    group: str
    rank: int
    world: int
    launch: str
    restarts: tuple[Restart, ...] = field(default=())


_current: LaunchContext | None = None
_summary: dict[str, Any] = {}
_saves = 0
_unseen: BaseException | None = None


def set_context(context: LaunchContext | None) -> None:
    """Set this process's context (None: forget it) and forget what an earlier training function left here."""
    global _current, _saves, _unseen
    _current, _saves, _unseen = context, 0, None
    _summary.clear()


def current() -> LaunchContext | None:
    """This process's context, or None if no launcher set one."""
    return _current


def note(**facts: Any) -> None:
    """Leave picklable facts of the finished training for `fit`'s result; the last value of a name counts, rank 0's are used.

    `fit` looks at `step` (int) and `metrics` (dict); any of them may be missing.
    """
    _summary.update(facts)


def summary() -> dict[str, Any]:
    """What `note` was given in this process since `set_context`."""
    return dict(_summary)


def leave_unseen(error: BaseException | None) -> None:
    """The newest manager has ended with this error as a generator was closed, and Python may have dropped it. None: a manager is open."""
    global _unseen
    _unseen = error


def unseen() -> BaseException | None:
    """See `leave_unseen`."""
    return _unseen


def count_save() -> None:
    """The training function has trained a step and called `save`."""
    global _saves
    _saves += 1


def saves_so_far() -> int:
    """How often `save` was called since `set_context`."""
    return _saves


def check_world(world: int, process_count: int | None = None) -> None:
    """Refuse to train when the processes of the worker group do not form one JAX job.

    Without this check every process would train alone on its own data, with wrong sums and a successful exit.

    Args:
        world: processes in the worker group.
        process_count: what JAX says; None asks `jax.process_count()`, which initialises JAX's backends.

    Raises:
        ConfigError: the two differ.
    """
    if process_count is None:
        import jax

        process_count = jax.process_count()
    if process_count == world:
        return
    from_cpu = (
        " On CPU hosts JaxTrainer starts jax.distributed only with jax_config=JaxConfig(use_gpu=True) and"
        ' RunConfig(worker_runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu"}}); raystate.fit does both by itself.'
        " On TPU and GPU hosts set use_tpu=True or use_gpu=True in the ScalingConfig."
    )
    early = ""
    if process_count == 1 and "jax" in sys.modules:
        early = " Or JAX was used in this process before jax.distributed was initialised."
    raise ConfigError(
        f"the worker group has {counted(world, 'process', 'processes')} but jax.process_count() is {process_count}:"
        f" each process would train alone.{from_cpu}{early}",
        field="jax_config",
        expected=world,
        got=process_count,
    )
