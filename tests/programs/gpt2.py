"""A small GPT-2 in Flax NNX, data-parallel under `jax.set_mesh`, fed by a Ray Dataset of token windows, as in Ray's example.

It keeps its JaxTrainer, for `raystate.fit` takes no datasets; so it is launched with the callback.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import ray.train
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import raystate
from tests.programs.after_save import AfterSave
from tests.programs.data import tokens

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS, BATCH = 32, 16, 16, 2, 1, 8


def dataset() -> Any:
    """Windows of tokens with their successors, in an order that is always the same."""
    import ray.data

    # Position and order are what a restart goes by.
    ray.data.DataContext.get_current().execution_options.preserve_order = True

    def read(rows: Any) -> Any:
        windows = np.concatenate([tokens(int(i), 1, LENGTH + 1, VOCABULARY) for i in rows["id"]])
        return {"x": windows[:, :-1], "y": windows[:, 1:]}

    return ray.data.range(64, override_num_blocks=2).map_batches(read, batch_size=16)


class Windows:
    """This worker's share of the dataset, again and again. Ray Data keeps no position: the batches given are counted, and read past.

    Args:
        shard: what `ray.train.get_dataset_shard` gives.
        rows: of a batch of this process.
    """

    def __init__(self, shard: Any, rows: int):
        self._shard, self._rows = shard, rows
        self._given = 0
        self._batches: Iterator[Any] = iter(())

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._batches = iter(self._shard.iter_batches(batch_size=self._rows, batch_format="numpy", drop_last=True))
            batch = next(self._batches)
        self._given += 1
        return batch["x"], batch["y"]

    def get_state(self) -> dict[str, int]:
        return {"given": self._given}

    def set_state(self, state: dict[str, int]) -> None:
        self._given, self._batches = 0, iter(())
        while self._given < state["given"]:
            next(self)


def split(initializer: Any, *axes: Any) -> Any:
    return nnx.with_partitioning(initializer, axes)


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        glorot, zeros, ones = nnx.initializers.xavier_uniform(), nnx.initializers.zeros_init(), nnx.initializers.ones_init()
        kernel, bias = split(glorot, None, "model"), split(zeros, "model")
        self.norm1 = nnx.LayerNorm(WIDTH, scale_init=split(ones, "model"), bias_init=bias, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, kernel_init=kernel, bias_init=bias, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, scale_init=split(ones, "model"), bias_init=bias, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, kernel_init=kernel, bias_init=bias, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, kernel_init=kernel, bias_init=bias, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array, *, training: bool) -> jax.Array:
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.dropout(self.attention(self.norm1(x), mask=mask), deterministic=not training)
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm2(x)))), deterministic=not training)


class GPT2(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.token = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.position = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, *, training: bool) -> jax.Array:
        x = self.token(x) + self.position(jnp.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x, training=training)
        return self.token.attend(self.norm(x))


def make() -> Any:
    """(model, optimizer)."""
    model = GPT2(rngs=nnx.Rngs(params=0, dropout=1))
    schedule = optax.cosine_decay_schedule(1e-2, 100)
    return model, nnx.Optimizer(model, optax.adamw(schedule, weight_decay=0.1), wrt=nnx.Param)


@nnx.jit
def train_step(model: GPT2, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
    def loss_of(model: GPT2) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(x, training=True), y).mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def train(config: dict[str, Any], after_save: AfterSave) -> None:
    """One process's attempt. config: "steps"."""
    mesh = Mesh(np.array(jax.devices()).reshape(-1, 1), ("data", "model"))
    jax.set_mesh(mesh)
    rows = NamedSharding(mesh, PartitionSpec("data", None))
    windows = Windows(ray.train.get_dataset_shard("train"), BATCH // jax.process_count())
    graph, _ = nnx.split(nnx.eval_shape(make))
    with raystate.StateManager() as manager:
        restored = manager.restore_or_init(lambda: nnx.state(make()), items={"data": windows})
        model, optimizer = nnx.merge(graph, restored.state)
        for step in range(restored.step, config["steps"]):
            x, y = (jax.make_array_from_process_local_data(rows, part) for part in next(windows))
            loss = train_step(model, optimizer, x, y)
            state = nnx.state((model, optimizer))
            manager.save(step + 1, state, items={"data": windows}, metrics={"loss": loss})
            after_save(manager, step + 1, state)
            ray.train.report({"loss": float(loss)})
