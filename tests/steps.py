"""The retention policy of the tests that decide without Orbax's."""

from __future__ import annotations

from raystate.core.coordinator.retention import Keep


def keep_newest(count: int | None) -> Keep:
    """A policy that keeps the newest `count` steps; None: all."""
    return lambda live: [one.step for one in (live if count is None else live[-count:])]
