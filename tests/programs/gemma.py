"""A small transformer in the manner of Gemma, in Flax NNX, on a mesh of fsdp x tensor under `jax.set_mesh`.

Every matrix is split over both axes, the batch over the first. The state is what `nnx.split` gives, and it is donated.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec

import raystate
from tests.programs.after_save import AfterSave
from tests.programs.data import tokens

VOCABULARY, LENGTH, WIDTH, HEADS, HEAD_WIDTH, LAYERS, BATCH = 32, 16, 16, 2, 8, 1, 8


def matrix(rngs: nnx.Rngs, shape: tuple[int, ...], *axes: str | None) -> nnx.Param:
    init = nnx.with_partitioning(nnx.initializers.normal(shape[0] ** -0.5), axes)
    return nnx.Param(init(rngs.params(), shape, jnp.float32))


class RMSNorm(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        init = nnx.with_partitioning(nnx.initializers.zeros_init(), (None,))
        self.scale = nnx.Param(init(rngs.params(), (WIDTH,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * (1.0 + self.scale[...])


def rotate(x: jax.Array) -> jax.Array:
    """Positions turned into angles. x: [batch, time, heads, features]."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * 10_000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


class Block(nnx.Module):
    """Attention of several queries to one key and value, and a gated feed-forward layer."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.norm1, self.norm2 = RMSNorm(rngs=rngs), RMSNorm(rngs=rngs)
        self.query = matrix(rngs, (WIDTH, HEADS * HEAD_WIDTH), "fsdp", "tensor")
        self.key_value = matrix(rngs, (WIDTH, 2 * HEAD_WIDTH), "fsdp", None)
        self.out = matrix(rngs, (HEADS * HEAD_WIDTH, WIDTH), "tensor", "fsdp")
        self.gate = matrix(rngs, (WIDTH, 4 * WIDTH), "fsdp", "tensor")
        self.up = matrix(rngs, (WIDTH, 4 * WIDTH), "fsdp", "tensor")
        self.down = matrix(rngs, (4 * WIDTH, WIDTH), "tensor", "fsdp")

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norm1(x)
        q = (y @ self.query[...]).reshape(*y.shape[:2], HEADS, HEAD_WIDTH)
        k, v = jnp.split((y @ self.key_value[...])[:, :, None], 2, -1)
        mixed = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + mixed.reshape(x.shape) @ self.out[...]
        y = self.norm2(x)
        return x + (jax.nn.gelu(y @ self.gate[...]) * (y @ self.up[...])) @ self.down[...]


class Gemma(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.embedding = matrix(rngs, (VOCABULARY, WIDTH), "tensor", "fsdp")
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(LAYERS)])
        self.norm = RMSNorm(rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        table = self.embedding[...]
        x = jax.nn.one_hot(x, VOCABULARY) @ table * WIDTH**0.5
        for block in self.blocks:
            x = block(x)
        return 30.0 * jnp.tanh(self.norm(x) @ table.T / 30.0)


class Texts:
    """This process's rows of the batches."""

    def __init__(self) -> None:
        self._given = 0

    def __next__(self) -> Any:
        batch = tokens(self._given, BATCH // jax.process_count(), LENGTH + 1, VOCABULARY, stream=jax.process_index())
        self._given += 1
        return batch

    def get_state(self) -> dict[str, int]:
        return {"given": self._given}

    def set_state(self, state: dict[str, int]) -> None:
        self._given = state["given"]


def make() -> Any:
    """(model, optimizer)."""
    model = Gemma(rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


def train(config: dict[str, Any], after_save: AfterSave) -> None:
    """One process's attempt. config: "steps"."""
    mesh = jax.make_mesh((jax.device_count() // 2, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    texts = Texts()
    with jax.set_mesh(mesh), raystate.StateManager() as manager:
        graph, _ = nnx.split(nnx.eval_shape(make))

        @functools.partial(jax.jit, donate_argnums=0)
        def train_step(state: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
            model, optimizer = nnx.merge(graph, state)

            def loss_of(model: Gemma) -> jax.Array:
                return optax.softmax_cross_entropy_with_integer_labels(model(batch[:, :-1]), batch[:, 1:]).mean()

            loss, grads = nnx.value_and_grad(loss_of)(model)
            optimizer.update(model, grads)
            return nnx.state((model, optimizer)), loss

        restored = manager.restore_or_init(lambda: nnx.state(make()), items={"data": texts})
        state = restored.state
        for step in range(restored.step, config["steps"]):
            batch = jax.make_array_from_process_local_data(jax.NamedSharding(mesh, PartitionSpec("fsdp", None)), next(texts))
            state, loss = train_step(state, batch)
            manager.save(step + 1, state, items={"data": texts}, metrics={"loss": loss})
            after_save(manager, step + 1, state)
