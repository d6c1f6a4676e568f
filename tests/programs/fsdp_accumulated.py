"""A decoder whose parameters are split over all devices (FSDP), fed by grain; optax.MultiSteps applies each second gradient.

The sharding of each leaf follows from its shape: the largest axis that the devices divide.
"""

from __future__ import annotations

import functools
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import raystate
from tests.programs.after_save import AfterSave
from tests.programs.data import tokens

VOCABULARY, LENGTH, WIDTH, BATCH, ROWS, ACCUMULATED = 32, 16, 32, 8, 64, 2


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        table = nn.Embed(VOCABULARY, WIDTH)
        h = table(x) + nn.Embed(LENGTH, WIDTH)(jnp.arange(x.shape[1]))
        h = h + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(h), mask=nn.make_causal_mask(x))
        h = h + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(h))))
        return table.attend(nn.LayerNorm()(h))


def split(mesh: Mesh, leaf: Any) -> NamedSharding:
    axes: list[str | None] = [None] * leaf.ndim
    dividable = [axis for axis, size in enumerate(leaf.shape) if size % mesh.size == 0]
    if dividable:
        axes[max(dividable, key=lambda axis: leaf.shape[axis])] = "fsdp"
    return NamedSharding(mesh, PartitionSpec(*axes))


def init() -> TrainState:
    model = Decoder()
    params = model.init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))
    warmed = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 4, 100)
    optimizer = optax.MultiSteps(optax.adamw(warmed), every_k_schedule=ACCUMULATED)
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer.gradient_transformation())


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    """batch: int32 (rows, LENGTH + 1)."""

    def loss_of(params: Any) -> Any:
        logits = state.apply_fn(params, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss


def batches() -> Any:
    rows = grain.MapDataset.source(range(ROWS)).seed(3).shuffle().repeat()
    texts = rows.map(lambda row: tokens(int(row), 1, LENGTH + 1, VOCABULARY)[0])
    return iter(texts.batch(BATCH).to_iter_dataset())


def train(config: dict[str, Any], after_save: AfterSave) -> None:
    """One process's attempt. config: "steps", "state"."""
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    data = batches()
    with raystate.StateManager(config["state"]) as manager:
        restored = manager.restore_or_init(
            init, lambda abstract: jax.tree.map(functools.partial(split, mesh), abstract), items={"data": data}
        )
        state = restored.state
        for step in range(restored.step, config["steps"]):
            batch = jax.device_put(next(data), NamedSharding(mesh, PartitionSpec("fsdp")))
            state, loss = train_step(state, batch)
            manager.save(step + 1, state, items={"data": data}, metrics={"loss": loss})
            after_save(manager, step + 1, state)
