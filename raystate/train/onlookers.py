"""Threads in which `fit` looks at its run while that goes on, and how they ask its Coordinator."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.exceptions import RayError

from raystate.actors.naming import coordinator_name, find_actor
from raystate.config.state_config import StateConfig
from raystate.storage import run_hash
from raystate.waits import ENDS_S, QUICK_ANSWER_S

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def looking_on(name: str, look: Callable[[threading.Event], None], *, late: str = "") -> Iterator[None]:
    """While this lasts a thread of that name looks on. At the end its event is set, and it is waited for, but not for ever.

    Args:
        late: a warning, where it goes on then.
    """
    ended = threading.Event()
    thread = threading.Thread(target=look, args=(ended,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=ENDS_S)
        if late and thread.is_alive():
            logger.warning(late)


def answer_of(config: StateConfig, ask: Callable[[Any], Any]) -> Any | None:
    """The Coordinator's answer to what `ask` calls of its actor; None: there is none, or it can't be asked now."""
    try:
        coordinator = find_actor(coordinator_name(run_hash(config.storage, config.run)))
        return ray.get(ask(coordinator), timeout=QUICK_ANSWER_S) if coordinator is not None else None
    except (RayError, TimeoutError):
        return None
