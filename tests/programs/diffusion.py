"""A denoising diffusion model under `pmap` with an exponential moving average of its parameters.

The whole replicated state has a leading axis of devices; one copy of it is saved, and replicated again after a restore.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import jax_utils
from flax import linen as nn
from flax.training import common_utils, train_state

import raystate
from tests.programs.after_save import AfterSave
from tests.programs.data import Batches

TIMES, SIDE = 20, 4
KEPT = jnp.cumprod(1.0 - jnp.linspace(1e-3, 0.2, TIMES))  # the share of the image that is left at each time


class Denoiser(nn.Module):
    @nn.compact
    def __call__(self, x: Any, time: Any) -> Any:
        angles = time[:, None] * 2.0 ** -jnp.arange(4)
        at = nn.Dense(8)(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1))
        h = nn.Conv(8, (3, 3))(x) + at[:, None, None]
        h = nn.GroupNorm(num_groups=4)(nn.swish(h))
        return nn.Conv(1, (3, 3))(h)


class State(train_state.TrainState):
    averaged: Any


def init() -> State:
    model = Denoiser()
    params = model.init(jax.random.key(0), jnp.zeros((1, SIDE, SIDE, 1)), jnp.zeros(1))["params"]
    optimizer = optax.adamw(1e-2)
    copy = jax.tree.map(jnp.copy, params)  # an array twice in a state could not be donated
    return State.create(apply_fn=model.apply, params=params, tx=optimizer, averaged=copy)


def train_step(state: State, images: Any, key: Any) -> tuple[State, Any]:
    """On one device. images: float32 (rows, side, side, 1)."""
    time_key, noise_key = jax.random.split(key)
    time = jax.random.randint(time_key, images.shape[:1], 0, TIMES)
    noise = jax.random.normal(noise_key, images.shape)
    kept = KEPT[time][:, None, None, None]
    noisy = jnp.sqrt(kept) * images + jnp.sqrt(1.0 - kept) * noise

    def loss_of(params: Any) -> Any:
        return jnp.mean((state.apply_fn({"params": params}, noisy, time) - noise) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    loss, grads = jax.lax.pmean((loss, grads), "batch")
    state = state.apply_gradients(grads=grads)
    decay = jnp.minimum(0.99, (1.0 + state.step) / (10.0 + state.step))
    averaged = optax.incremental_update(state.params, state.averaged, 1.0 - decay)
    return state.replace(averaged=averaged), loss


def train(config: dict[str, Any], after_save: AfterSave) -> None:
    """One process's attempt. config: "steps", "state"."""
    devices = jax.local_device_count()
    batches = Batches(devices, 4, SIDE, SIDE)
    parallel_step = jax.pmap(train_step, axis_name="batch", donate_argnums=0)
    with raystate.StateManager(config["state"]) as manager:
        restored = manager.restore_or_init(init, items={"data": batches})
        state = jax_utils.replicate(restored.state)
        for step in range(restored.step, config["steps"]):
            keys = common_utils.shard_prng_key(jax.random.PRNGKey(step))
            state, loss = parallel_step(state, next(batches)[0][..., None], keys)
            one = jax_utils.unreplicate(state)
            manager.save(step + 1, one, items={"data": batches}, metrics={"loss": jax_utils.unreplicate(loss)})
            after_save(manager, step + 1, one)
