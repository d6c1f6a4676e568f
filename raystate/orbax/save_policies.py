"""Orbax's save decision policies, each decided where all hosts get one answer.

- Some follow from the step alone (`FixedIntervalPolicy`, `SpecificStepsPolicy`), or from the step
  and whether the run has one already (`InitialSavePolicy`). Each trainer asks Orbax itself: the
  question is the same on every host.
- One depends on a clock or on storage (`ContinuousCheckpointingPolicy`). The Coordinator decides,
  and all trainers agree on a step. Orbax's own way is a barrier of all hosts in each `save`.
- A save that is lost is made again only where Orbax would. `InitialSavePolicy` wants a step until
  the run has one: the first that can be made is made. `SpecificStepsPolicy` wants its steps alone.
- `PreemptionCheckpointingPolicy` is always in force: trainers that are told to end make their last step durable.

A class of the user's own is refused: two hosts might get two answers from it.
"""

from __future__ import annotations

import datetime
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from raystate.core.trainer.save_decision import Due

NAMES = (
    "FixedIntervalPolicy",
    "SpecificStepsPolicy",
    "InitialSavePolicy",
    "ContinuousCheckpointingPolicy",
    "PreemptionCheckpointingPolicy",
    "AnySavePolicy",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRules:
    """A save policy, taken apart.

    Attributes:
        by_step: the policies that each trainer asks; any of them is enough.
        first: one of them wants a first step until the run has one. If the promised one is lost, the Coordinator has all agree on another.
        when_idle_s: a save whenever storage is free, at least so many seconds after the one before; None: no such rule.
    """

    by_step: tuple[Any, ...] = ()
    first: bool = False
    when_idle_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class _SavedStep:
    """What Orbax's policies are told of a step (its protocol PolicyCheckpointInfo)."""

    step: int
    time: datetime.datetime
    metrics: None = None


_NO_TIME = datetime.datetime.fromtimestamp(0, datetime.UTC)  # these policies don't look at it
_EARLIER = (_SavedStep(step=0, time=_NO_TIME),)


def save_rules(policy: Any) -> SaveRules:
    """Take a policy apart; None: no rules.

    Raises:
        ValueError: it is not one of Orbax's, or has values that can't be meant; says which and what to do.
    """
    if policy is None:
        return SaveRules()
    from orbax.checkpoint import checkpoint_managers as cm

    by_step: list[Any] = []
    when_idle_s: list[float] = []
    for one in _flat(policy, cm.AnySavePolicy, ()):
        kind = type(one)
        if kind is cm.ContinuousCheckpointingPolicy:
            least = one.minimum_interval_secs
            if least is not None and not (isinstance(least, int | float) and least >= 0):
                raise ValueError(
                    f"ContinuousCheckpointingPolicy: minimum_interval_secs must be seconds >= 0 or None, not {least!r}"
                )
            when_idle_s.append(float(least or 0))
        elif kind in (cm.FixedIntervalPolicy, cm.SpecificStepsPolicy, cm.InitialSavePolicy):
            _try(one)
            if isinstance(one, cm.SpecificStepsPolicy):
                _check_steps(one.steps)
            by_step.append(one)
        elif kind is not cm.PreemptionCheckpointingPolicy:
            raise ValueError(
                f"{kind.__name__} is not one of Orbax's own policies ({', '.join(NAMES)}): two hosts might get different answers from "
                "it; for a rule of your own: save(step, state, force=…), with the same answer on every process"
            )
    first = any(isinstance(one, cm.InitialSavePolicy) for one in by_step)
    return SaveRules(by_step=tuple(by_step), first=first, when_idle_s=min(when_idle_s, default=None))


def due_by_step(policy: Any) -> Due | None:
    """What each trainer asks at each step; None if the policy has nothing of that kind."""
    rules = save_rules(policy)
    if not rules.by_step:
        return None
    context = _context()

    def due(step: int, first: bool) -> str:
        info, earlier = _SavedStep(step=step, time=_NO_TIME), () if first else _EARLIER
        for one in rules.by_step:
            if one.should_save(info, earlier, context=context):
                return type(one).__name__
        return ""

    return due


def _flat(policy: Any, any_of: type, above: tuple[Any, ...]) -> list[Any]:
    if type(policy) is not any_of:
        return [policy]
    if any(policy is one for one in above):
        raise ValueError("AnySavePolicy contains itself")
    inner: Any = policy.policies
    if not isinstance(inner, Sequence):
        raise ValueError(f"AnySavePolicy: policies must be a list, not {inner!r}")
    if not inner:
        raise ValueError("AnySavePolicy([]) never saves: name at least one policy")
    return [one for each in inner for one in _flat(each, any_of, (*above, policy))]


def _check_steps(steps: Any) -> None:
    """What is asked once for each step, on every host, and travels to the Coordinator."""
    if not isinstance(steps, list | tuple | set | frozenset | range | np.ndarray):
        raise ValueError(
            f"SpecificStepsPolicy: steps must be a list, a tuple, a set or a range of steps, not a {type(steps).__name__}"
        )
    found = cast("Collection[Any]", steps)
    if not len(found):
        raise ValueError("SpecificStepsPolicy without a step never saves: name at least one")
    for step in () if isinstance(steps, range) else found:
        if isinstance(step, bool) or not isinstance(step, int | np.integer):
            raise ValueError(
                f"SpecificStepsPolicy: steps must be numbers, as in [100, 1000], and {step!r} is none: it would never match"
            )


def _try(policy: Any) -> None:
    """Ask the policy as in training, so that one that can't answer is refused now."""
    try:
        policy.should_save(_SavedStep(step=1, time=_NO_TIME), (), context=_context())
    except Exception as error:
        raise ValueError(f"{policy!r} can't be asked: {type(error).__name__}: {error}") from None


def _context() -> Any:
    from orbax.checkpoint import checkpoint_managers as cm
    from orbax.checkpoint import options

    return cm.DecisionContext(
        is_saving_in_progress=False, reached_preemption=False, multiprocessing_options=options.MultiprocessingOptions()
    )
