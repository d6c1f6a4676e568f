"""What a training process was told by its launcher: the seam between `train` and `manager`.

Standard library only: it is imported in every worker before the training function, and by processes that have no Ray.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import Any

from raystate.core.formats.errors import ConfigError
from raystate.core.formats.texts import counted
from raystate.machine.counts import counts
from raystate.machine.process_age import process_age_s


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


@dataclass(slots=True)
class GroupStart:
    """When the launcher wanted the group that starts or trains now, and when it had places for its workers.

    Times are seconds since 1970; 0.0: not known.

    Attributes:
        called_s: when `fit` was called; of a trainer that the caller has built, when it first wanted a group.
    """

    called_s: float = 0.0
    asked_s: float = 0.0
    placed_s: float = 0.0

    def asked(self) -> None:
        """It wants one now."""
        self.asked_s, self.placed_s = time.time(), 0.0
        self.called_s = self.called_s or self.asked_s

    def placed(self, *_: object) -> None:
        """There are places; no process has been started in them. For `train.bundles.make_groups_from`: the group makes them itself."""
        self.placed_s = time.time()


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
        start: how the launcher came to this group.
    """

    config: Any
    group: str
    rank: int
    world: int
    launch: str
    restarts: tuple[Restart, ...] = field(default=())
    start: GroupStart = field(default_factory=GroupStart)


_current: LaunchContext | None = None
_summary: dict[str, Any] = {}
_saves = 0
_unseen: BaseException | None = None
_entered_s = 0.0  # when the training function was called, on this process's monotonic clock; 0.0: not known
_began_s = 0.0  # the newest StateManager's constructor


def set_context(context: LaunchContext | None) -> None:
    """Set this process's context (None: forget it) and forget what an earlier training function left here."""
    global _current, _saves, _unseen, _entered_s
    _current, _saves, _unseen, _entered_s = context, 0, None, 0.0
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


def count_save(blocked_s: float = 0.0) -> None:
    """The training function has trained a step and called `save`, which held it up for so long."""
    global _saves
    _saves += 1
    counts.took("blocked_seconds", max(0.0, blocked_s))


def saves_so_far() -> int:
    """How often `save` was called since `set_context`."""
    return _saves


def enters_now() -> None:
    """The training function is called."""
    global _entered_s
    _entered_s = time.monotonic()


def begins_now() -> None:
    """A StateManager's constructor is called."""
    global _began_s
    _began_s = time.monotonic()


def ages() -> tuple[tuple[str, float], ...]:
    """How many seconds ago this process's start had come so far; see `Joined.ages`. What the launcher says is of its node's clock."""
    wall_s, now_s = time.time(), time.monotonic()
    start = _current.start if _current is not None else GroupStart()
    told = (("called", start.called_s), ("asked", start.asked_s), ("placed", start.placed_s))
    known = {name: wall_s - at_s for name, at_s in told if at_s}
    if (process_s := process_age_s()) is not None:
        # Ray starts processes ahead of need; the time for which they waited is none of the run's.
        known["process"] = min(process_s, known.get("placed", process_s))
    known |= {name: now_s - at_s for name, at_s in (("function", _entered_s), ("manager", _began_s)) if at_s}
    return tuple((name, round(max(0.0, age_s), 3)) for name, age_s in known.items())


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
