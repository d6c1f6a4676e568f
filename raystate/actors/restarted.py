"""Whether Ray has started this process's actor again."""

from __future__ import annotations

import warnings

import ray
from ray.util.annotations import RayDeprecationWarning


def is_restarted() -> bool:
    """Ray's own property uses another one of its own that is deprecated, and says so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*Use get_actor_id\(\) instead", category=RayDeprecationWarning)
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)
