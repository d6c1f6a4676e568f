"""Two workers train a multilayer perceptron on a mesh of data x model; rules say by a leaf's path how it is split.

As in scalax and t5x: the first regular expression that matches a leaf's path gives its PartitionSpec.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import raystate
from tests.programs.after_save import AfterSave
from tests.programs.data import Batches

WIDTH, BATCH = 16, 8
RULES = (
    (r"up.*kernel", PartitionSpec(None, "model")),
    (r"down.*kernel", PartitionSpec("model", None)),
    (r"up.*bias", PartitionSpec("model")),
    (r".*", PartitionSpec()),
)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-3))


def by_rule(mesh: Mesh, path: Any, leaf: Any) -> NamedSharding:
    del leaf
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return NamedSharding(mesh, next(spec for pattern, spec in RULES if re.search(pattern, name)))


def init() -> Any:
    keys = jax.random.split(jax.random.key(0), 2)
    params = {
        "up": {"kernel": jax.random.normal(keys[0], (4, WIDTH)) / 2, "bias": jnp.zeros(WIDTH)},
        "down": {"kernel": jax.random.normal(keys[1], (WIDTH, 1)) / 4, "bias": jnp.zeros(1)},
    }
    return {"params": params, "optimizer": optimizer.init(params)}


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
    x, y = batch

    def loss_of(params: Any) -> Any:
        h = jax.nn.gelu(x @ params["up"]["kernel"] + params["up"]["bias"])
        return jnp.mean((h @ params["down"]["kernel"] + params["down"]["bias"] - y) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, opt_state = optimizer.update(grads, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": opt_state}, loss


def train(config: dict[str, Any], after_save: AfterSave) -> None:
    """One process's attempt. config: "steps"."""
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((jax.process_count(), jax.local_device_count()), ("data", "model"), axis_types=kinds)
    rows = NamedSharding(mesh, PartitionSpec("data", None))
    batches = Batches(BATCH, 4, stream=jax.process_index())
    with raystate.StateManager() as manager:
        restored = manager.restore_or_init(
            init,
            lambda abstract: jax.tree_util.tree_map_with_path(functools.partial(by_rule, mesh), abstract),
            items={"data": batches},
        )
        state = restored.state
        for step in range(restored.step, config["steps"]):
            batch = [jax.make_array_from_process_local_data(rows, part) for part in next(batches)]
            state, loss = train_step(state, batch)
            manager.save(step + 1, state, items={"data": batches}, metrics={"loss": loss})
            after_save(manager, step + 1, state)
