"""A stand-in for `raystate.StateManager` with the same calls, for tests of the job alone. One process, one file per step."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np


@dataclass
class FakeRestored:
    step: int
    state: Any
    items: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    custom: Any = None
    tier: str = "init"
    set_aside: tuple[Any, ...] = ()


class FakeManager:
    """Keeps steps in memory, and in `folder` if one is given. `stop_at` plays a preemption after that step."""

    def __init__(self, folder: Path | None = None, *, every: int = 1, stop_at: int | None = None):
        self.folder, self.every, self.stop_at = folder, every, stop_at
        self.saves: dict[int, dict[str, Any]] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.glob("step-*"):
                self.saves[int(path.name.removeprefix("step-"))] = pickle.loads(path.read_bytes())

    def __enter__(self) -> FakeManager:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def restore_or_init(self, init_fn: Any, shardings: Any = None, *, items: Any = None, **_: Any) -> FakeRestored:
        abstract = jax.eval_shape(init_fn)
        placed = shardings(abstract) if callable(shardings) else shardings
        newest = self.latest_step()
        if newest is None:
            return FakeRestored(step=0, state=jax.jit(init_fn, out_shardings=placed)())
        saved = self.saves[newest]
        flat, tree = jax.tree.flatten(abstract)
        arrays = [
            jax.make_array_from_callback(leaf.shape, sharding, lambda index, value=value: value[index])
            for leaf, sharding, value in zip(flat, jax.tree.leaves(placed), saved["state"], strict=True)
        ]
        for name, item in (items or {}).items():
            item.set_state(saved["items"][name])
        return FakeRestored(
            step=newest,
            state=jax.tree.unflatten(tree, arrays),
            metrics=saved["metrics"],
            custom=saved["custom"],
            tier="storage",
        )

    def save(self, step: int, state: Any, *, items: Any = None, metrics: Any = None, custom: Any = None, **_: Any) -> bool:
        if step % self.every and step != self.stop_at:
            return False
        saved = {
            "state": [np.array(leaf) for leaf in jax.tree.leaves(state)],
            "items": {name: json.loads(json.dumps(item.get_state())) for name, item in (items or {}).items()},
            "metrics": {name: float(value) for name, value in (metrics or {}).items()},
            "custom": custom,
        }
        self.saves[step] = saved
        if self.folder is not None:
            (self.folder / f"step-{step}").write_bytes(pickle.dumps(saved))
        return True

    def latest_step(self) -> int | None:
        return max(self.saves, default=None)

    def reached_preemption(self, step: int) -> bool:
        return step == self.stop_at

    def wait_until_finished(self) -> None:
        pass
