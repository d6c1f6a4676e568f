"""Listens for the events that are recorded with `jax.monitoring`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

Heard = list[tuple[str, float]]


@contextlib.contextmanager
def listening() -> Iterator[Heard]:
    """(name, number) of what is recorded meanwhile; of an event without a number 1."""
    heard: Heard = []

    def hear(name: str, number: float = 1.0, **_: Any) -> None:
        heard.append((name, number))

    listener: Any = hear
    jax.monitoring.register_event_listener(listener)
    jax.monitoring.register_event_duration_secs_listener(listener)
    jax.monitoring.register_scalar_listener(listener)
    try:
        yield heard
    finally:
        jax.monitoring.unregister_event_listener(listener)
        jax.monitoring.unregister_event_duration_listener(listener)
        jax.monitoring.unregister_scalar_listener(listener)
