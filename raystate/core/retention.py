"""Which committed steps are kept: a pure choice, made with each commit."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from raystate.core.messages import LiveStep, Settings


def kept_because(live: Sequence[LiveStep], settings: Settings, pinned: Collection[int] = ()) -> dict[int, str]:
    """The steps to keep, each with its reason.

    Args:
        live: committed steps, ascending; the last one is the newest and is always kept.
        settings: keep_last, keep_every_steps, keep_best with best_metric and best_mode; with none of them every step is kept.
        pinned: steps that somebody reads or has pinned.
    """
    kept: dict[int, str] = {}
    if not live:
        return kept
    if settings.keep_last is None and not settings.keep_every_steps and not settings.keep_best:
        return {one.step: "no rule to keep only some" for one in live}
    last = max(1, settings.keep_last or 0)
    for one in live[-last:]:
        kept[one.step] = f"among the last {last}"
    if settings.keep_every_steps:
        for one in live:
            if one.step % settings.keep_every_steps == 0:
                kept.setdefault(one.step, f"a multiple of {settings.keep_every_steps}")
    metric = settings.best_metric
    if settings.keep_best and metric is not None:
        sign = -1.0 if settings.best_mode == "max" else 1.0
        # NaN compares with nothing, so it must not take part; of equals the newer one is better.
        scored = [one for one in live if metric in one.metrics and one.metrics[metric] == one.metrics[metric]]
        scored.sort(key=lambda one: (sign * one.metrics[metric], -one.step))
        for one in scored[: settings.keep_best]:
            kept.setdefault(one.step, f"among the best {settings.keep_best} by {metric}")
    for one in live:
        if one.step in pinned:
            kept.setdefault(one.step, "pinned")
    return kept


def choose_retired(live: Sequence[LiveStep], settings: Settings, pinned: Collection[int] = ()) -> list[tuple[int, bool, str]]:
    """The steps to retire as (step, aside, reason), oldest first; never the newest."""
    kept = kept_because(live, settings, pinned)
    return [(one.step, False, f"retention: not among {len(kept)} kept steps") for one in live if one.step not in kept]
