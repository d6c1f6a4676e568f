"""A Flax linen classifier under `pmap`: the state replicated over the local devices, batches sent ahead to them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import jax_utils
from flax import linen as nn
from flax.training import train_state

import raystate
from tests.programs.after_save import AfterSave
from tests.programs.data import Batches


class Regressor(nn.Module):
    @nn.compact
    def __call__(self, x: Any, *, training: bool) -> Any:
        x = nn.relu(nn.Dense(16)(x))
        return nn.Dense(1)(nn.Dropout(0.1, deterministic=not training)(x))


class Prefetched:
    """Batches that are on the devices before they are asked for.

    How many were read says nothing here, for some of them are still waiting. So the state is how many were given out.
    """

    def __init__(self, batches: Batches, ahead: int):
        self._batches, self._ahead = batches, ahead
        self.set_state(batches.get_state())

    def __next__(self) -> Any:
        self._given += 1
        return next(self._waiting)

    def get_state(self) -> dict[str, int]:
        return {"given": self._given}

    def set_state(self, state: dict[str, int]) -> None:
        self._given = state["given"]
        self._batches.set_state(state)
        self._waiting = jax_utils.prefetch_to_device(self._batches, self._ahead)


def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
    """On one device, with its part of the batch."""
    x, y = batch
    device = jax.lax.axis_index("batch")
    dropout = jax.random.fold_in(jax.random.fold_in(jax.random.key(1), state.step), device)

    def loss_of(params: Any) -> Any:
        got = state.apply_fn({"params": params}, x, training=True, rngs={"dropout": dropout})
        return jnp.mean((got - y) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    loss, grads = jax.lax.pmean((loss, grads), "batch")
    return state.apply_gradients(grads=grads), loss


def train(config: dict[str, Any], after_save: AfterSave) -> None:
    """One process's attempt. config: "steps", "state"."""
    model = Regressor()
    devices = jax.local_device_count()

    def init() -> Any:
        params = model.init(jax.random.key(0), jnp.zeros((1, 4)), training=False)["params"]
        return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-2))

    parallel_step = jax.pmap(train_step, axis_name="batch", donate_argnums=0)
    batches = Prefetched(Batches(devices, 8, 4), ahead=2)
    with raystate.StateManager(config["state"]) as manager:
        restored = manager.restore_or_init(init, items={"data": batches})
        state = jax_utils.replicate(restored.state)
        for step in range(restored.step, config["steps"]):
            state, loss = parallel_step(state, next(batches))
            one = jax_utils.unreplicate(state)
            manager.save(step + 1, one, {"data": batches}, metrics={"loss": jax_utils.unreplicate(loss)})
            after_save(manager, step + 1, one)
