"""What raystate uses of Ray Train's internals: nowhere else are any imported.

tests/house/test_ray_version.py holds each name that is used against the installed Ray,
tests/cluster/test_train_internals.py what stands behind it.
"""

from __future__ import annotations

from typing import Any

from ray.train.v2._internal import exceptions
from ray.train.v2._internal.callbacks import datasets, placement_group_callback, preemption_callback
from ray.train.v2._internal.execution import callback as callbacks
from ray.train.v2._internal.execution import scaling_policy
from ray.train.v2._internal.execution.controller import placement_group_cleaner
from ray.train.v2._internal.execution.controller import state as states
from ray.train.v2._internal.execution.worker_group import worker_group as _worker_group

# With the names that it imports itself: what stands in for its methods uses what they use.
worker_group: Any = _worker_group

__all__ = [
    "callbacks", "datasets", "exceptions", "placement_group_callback", "placement_group_cleaner", "preemption_callback", "scaling_policy",
    "states", "worker_group",
]  # fmt: skip
