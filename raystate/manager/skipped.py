"""The newest step, if `save` found no slot for it: it is snapshotted after all when the training thread turns to something else."""

# JAX's own functions are only partly typed; everything of ours is checked strictly.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import jax

from raystate.manager.staging import KeptArguments, SaveArguments
from raystate.waits import SAVES_PAUSE_S


class SkippedStep:
    """What `save` was given. A loop that goes on replaces or forgets it; its arrays may be donated at any moment."""

    def __init__(self) -> None:
        self._given: KeptArguments | None = None
        self._due_s = 0.0

    def keep(self, given: KeptArguments, now_s: float) -> None:
        """Of the training thread."""
        if jax.local_device_count() > 1:
            for leaf in given.leaves:
                _take_apart(leaf)
        self._given, self._due_s = given, now_s + SAVES_PAUSE_S

    def forget(self) -> None:
        """There is a newer one, or none is wanted any more."""
        self._given = None

    def due(self, step: int | None, now_s: float) -> SaveArguments | None:
        """It, if it is that step and no save has come for a while."""
        given = self._given
        return given.again() if given is not None and given.step == step and now_s >= self._due_s else None


def _take_apart(leaf: Any) -> None:
    """JAX does so when an array is first asked for a shard, and another thread that asks meanwhile misses some."""
    if isinstance(leaf, jax.Array) and not leaf.is_deleted() and not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended):
        if leaf.sharding.addressable_devices:  # else this process has nothing of it
            leaf.addressable_data(0)
