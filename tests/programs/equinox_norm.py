"""An Equinox model with BatchNorm, whose running averages live in an `eqx.nn.State` beside it."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import raystate
from tests.programs.after_save import AfterSave
from tests.programs.data import Batches

optimizer = optax.adam(1e-2)


class Model(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, key: Any):
        first, last = jax.random.split(key)
        self.first = eqx.nn.Linear(4, 16, key=first)
        self.norm = eqx.nn.BatchNorm(16, axis_name="batch", mode="batch")
        self.last = eqx.nn.Linear(16, 1, key=last)

    def __call__(self, x: Any, running: eqx.nn.State) -> tuple[Any, eqx.nn.State]:
        x, running = self.norm(self.first(x), running)
        return self.last(jax.nn.relu(x)), running


def make() -> tuple[Model, eqx.nn.State]:
    return eqx.nn.make_with_state(Model)(jax.random.key(0))


def init() -> Any:
    """The arrays alone: functions and settings of the model are the script's, not a checkpoint's."""
    model, running = make()
    arrays = eqx.filter(model, eqx.is_array)
    return {"model": arrays, "running": running, "opt": optimizer.init(arrays)}


def train(config: dict[str, Any], after_save: AfterSave) -> None:
    """One process's attempt. config: "steps", "state"."""
    rest = eqx.filter(make()[0], eqx.is_array, inverse=True)

    def loss_of(arrays: Any, running: Any, x: Any, y: Any) -> tuple[Any, Any]:
        model = eqx.combine(arrays, rest)
        got, running = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, running)
        return jnp.mean((got - y) ** 2), running

    @eqx.filter_jit(donate="all")
    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        (loss, running), grads = eqx.filter_value_and_grad(loss_of, has_aux=True)(state["model"], state["running"], *batch)
        updates, opt = optimizer.update(grads, state["opt"], state["model"])
        return {"model": eqx.apply_updates(state["model"], updates), "running": running, "opt": opt}, loss

    batches = Batches(16, 4)
    with raystate.StateManager(config["state"]) as manager:
        restored = manager.restore_or_init(init, items={"data": batches})
        state = restored.state
        for step in range(restored.step, config["steps"]):
            state, loss = train_step(state, next(batches))
            manager.save(step + 1, state, {"data": batches}, metrics={"loss": loss})
            after_save(manager, step + 1, state)
