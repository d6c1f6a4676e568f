"""A small GPT in plain JAX with two optimizers by `optax.multi_transform`, its batches split over all devices by hand.

The state comes from `init` without shardings, so it lies uncommitted on one device, and the first step moves it to all.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import raystate
from tests.programs.after_save import AfterSave
from tests.programs.data import tokens

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS, BATCH = 32, 16, 16, 2, 2, 8


def init_params() -> Any:
    """Matrices and the gains of the norms, as a dict of dicts."""
    keys = iter(jax.random.split(jax.random.key(0), 2 + 4 * LAYERS))

    def matrix(*shape: int) -> Any:
        return 0.02 * jax.random.normal(next(keys), shape)

    def block() -> Any:
        return {
            "norm1": jnp.ones(WIDTH),
            "qkv": matrix(WIDTH, 3 * WIDTH),
            "out": matrix(WIDTH, WIDTH),
            "norm2": jnp.ones(WIDTH),
            "up": matrix(WIDTH, 4 * WIDTH),
            "down": matrix(4 * WIDTH, WIDTH),
        }

    tables = {"token": matrix(VOCABULARY, WIDTH), "position": matrix(LENGTH, WIDTH), "norm": jnp.ones(WIDTH)}
    return {**tables, "blocks": [block() for _ in range(LAYERS)]}


def normed(x: Any, gain: Any) -> Any:
    return gain * (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def logits_of(params: Any, x: Any) -> Any:
    """int32 (rows, length) -> float32 (rows, length, vocabulary)."""
    h = params["token"][x] + params["position"][: x.shape[1]]
    for block in params["blocks"]:
        q, k, v = jnp.split(normed(h, block["norm1"]) @ block["qkv"], 3, -1)
        q, k, v = (one.reshape(*x.shape, HEADS, WIDTH // HEADS) for one in (q, k, v))
        h = h + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(h.shape) @ block["out"]
        h = h + jax.nn.gelu(normed(h, block["norm2"]) @ block["up"]) @ block["down"]
    return normed(h, params["norm"]) @ params["token"].T


def labels(params: Any) -> Any:
    return jax.tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "gain", params)


optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.multi_transform(
        {
            "matrix": optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 3, 50), b2=0.95, weight_decay=0.1),
            "gain": optax.adam(1e-2),
        },
        labels,
    ),
)


def init() -> Any:
    params = init_params()
    return {"params": params, "opt": optimizer.init(params), "seen": jnp.zeros((), jnp.int32)}


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
    def loss_of(params: Any) -> Any:
        got = logits_of(params, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(got, batch[:, 1:]).mean()

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, opt = optimizer.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt": opt, "seen": state["seen"] + batch.size}, loss


def train(config: dict[str, Any], after_save: AfterSave) -> None:
    """One process's attempt. config: "steps", "state"."""
    rows = NamedSharding(Mesh(np.array(jax.devices()), "data"), PartitionSpec("data"))
    with raystate.StateManager(config["state"]) as manager:
        restored = manager.restore_or_init(init)
        state = restored.state
        for step in range(restored.step, config["steps"]):
            batch = jax.device_put(tokens(step, BATCH, LENGTH + 1, VOCABULARY), rows)
            state, loss = train_step(state, batch)
            manager.save(step + 1, state, metrics={"loss": loss})
            after_save(manager, step + 1, state)
