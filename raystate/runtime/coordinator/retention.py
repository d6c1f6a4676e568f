"""The `keep_*` fields as Orbax's preservation policies."""

from __future__ import annotations

import datetime
import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from raystate.config.state_config import StateConfig
from raystate.core.coordinator.retention import Keep
from raystate.core.formats.messages import LiveStep

logger = logging.getLogger("raystate.coordinator")


@dataclass(frozen=True, kw_only=True)
class _Info:
    """What Orbax's policies are told of a step (its protocol PolicyCheckpointInfo)."""

    step: int
    time: datetime.datetime
    metrics: dict[str, float] | None


def orbax_keep(config: StateConfig) -> Keep:
    """The retention policy of a run. Orbax is imported at the first use."""
    policy: Any = None
    has_failed = False

    def keep(live: Sequence[LiveStep]) -> Collection[int]:
        nonlocal policy, has_failed
        try:
            if policy is None:
                policy = config.keep_policy or preservation_policy(config)
            return preserved(policy, live)
        except Exception as error:  # a user's own policy may do anything; in doubt all is kept
            logger.warning(
                "keep_policy failed at step %d: %s: %s: every step is kept for now%s",
                max((one.step for one in live), default=-1),
                type(error).__name__,
                error,
                "" if has_failed else ". (best_metric with keep_best passes over steps that lack the metric)",
                exc_info=not has_failed,
            )
            has_failed = True
            return [one.step for one in live]

    return keep


def preserved(policy: Any, live: Sequence[LiveStep]) -> list[int]:
    """The steps that an Orbax PreservationPolicy keeps."""
    from orbax.checkpoint import checkpoint_managers as cm

    infos = [
        _Info(
            step=one.step,
            time=datetime.datetime.fromtimestamp(one.time_s, datetime.UTC),
            metrics=dict(one.metrics) if one.metrics else None,
        )
        for one in live
    ]
    flags = policy.should_preserve(infos, context=cm.PreservationContext())
    if len(flags) != len(infos):
        raise ValueError(f"{policy!r} answered for {len(flags)} of {len(infos)} steps")
    return [info.step for info, kept in zip(infos, flags, strict=True) if kept]


def preservation_policy(config: StateConfig) -> Any:
    """`keep_last`, `keep_every_steps`, `keep_every_s` and `keep_best` together: what any of them keeps; everything without any."""
    from orbax.checkpoint import checkpoint_managers as cm

    policies: list[Any] = []
    if config.keep_last is not None:
        policies.append(cm.LatestN(config.keep_last))
    if config.keep_every_steps is not None:
        policies.append(cm.EveryNSteps(config.keep_every_steps))
    if config.keep_every_s is not None:
        policies.append(_EverySeconds(config.keep_every_s))
    if config.keep_best is not None and config.best_metric is not None:
        policies.append(_BestWithMetric(config.best_metric, config.best_mode, config.keep_best))
    return cm.AnyPreservationPolicy(policies) if policies else cm.LatestN(None)


class _EverySeconds:
    """Orbax's EveryNSeconds for a clock that may jump.

    A step stays if its time is `interval_s` or more away, later or earlier, from that of the last
    step that stayed. A jump costs one step too many, or a longer gap once. On a clock that never
    goes back it is Orbax's rule.
    """

    def __init__(self, interval_s: float):
        self._interval = datetime.timedelta(seconds=interval_s)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:  # noqa: ARG002 - Orbax calls it by name
        # Compared with what stays only: what has gone since changes no later answer.
        flags: list[bool] = []
        last: datetime.datetime | None = None
        for one in checkpoints:
            stays = last is None or abs(one.time - last) >= self._interval
            last = one.time if stays else last
            flags.append(stays)
        return flags


class _BestWithMetric:
    """Orbax's BestN over the steps that have the metric: a step without it, or with NaN, is never among the best."""

    def __init__(self, metric: str, mode: str, count: int):
        from orbax.checkpoint import checkpoint_managers as cm

        self._metric = metric
        # Of its order the last ones are kept; of equal ones these are the newer.
        self._best = cm.BestN(get_metric_fn=lambda metrics: metrics[metric], reverse=mode == "min", n=count)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        scored = [one for one in checkpoints if one.metrics and not math.isnan(one.metrics.get(self._metric, math.nan))]
        flags = self._best.should_preserve(scored, context=context)
        best = {one.step for one, kept in zip(scored, flags, strict=True) if kept}
        return [one.step in best for one in checkpoints]
