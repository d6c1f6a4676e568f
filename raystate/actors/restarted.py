"""Starts of an actor that Ray has started again."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import ray
from ray.util.annotations import RayDeprecationWarning


def is_restarted() -> bool:
    """Whether Ray has restarted this actor. Ray's property uses one that is deprecated, and warns of it: not here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*Use get_actor_id\(\) instead", category=RayDeprecationWarning)
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def begin(
    opening: Callable[[], None],
    *,
    on_failure: Callable[[BaseException, float], None],
    pause_at_most_s: float,
    for_s: float = math.inf,
) -> None:
    """Call `opening`, in an actor's constructor.

    Ray makes no actor again whose constructor has raised. So one that was killed tries until it
    can, and its callers hear meanwhile that it is being started again. The first start raises: it
    is asked why.

    Args:
        on_failure: is told the error, and the seconds until the next try: 1 at first, then twice as long each time.
        for_s: after so long it raises in a restart, too.
    """
    if not is_restarted():
        opening()
        return
    from tenacity import RetryCallState, Retrying, stop_before_delay, wait_exponential  # a first start does without

    def told(state: RetryCallState) -> None:
        error = None if state.outcome is None else state.outcome.exception()
        if error is not None:
            on_failure(error, state.upcoming_sleep)

    waits = wait_exponential(max=pause_at_most_s)
    Retrying(stop=stop_before_delay(for_s), wait=waits, before_sleep=told, reraise=True)(opening)
