"""Optimizers of optax whose states are more than moments, beside each other on the same model and batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

import raystate
from tests.programs.after_save import AfterSave
from tests.programs.data import Batches


def is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "schedule_free": lambda: contrib.schedule_free_adamw(1e-2, warmup_steps=3),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(1e-2), every_k_schedule=3),  # a kill may fall between two updates
    "masked": lambda: optax.chain(
        optax.masked(optax.add_decayed_weights(1e-2), is_matrix), optax.masked(optax.adam(1e-2), is_matrix), optax.scale(1.0)
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.cosine_decay_schedule(1e-2, 20), weight_decay=1e-3
    ),
}


def init_params() -> Any:
    keys = jax.random.split(jax.random.key(0), 2)
    return {"w1": 0.5 * jax.random.normal(keys[0], (4, 16)), "b1": jnp.zeros(16), "w2": 0.5 * jax.random.normal(keys[1], (16, 1))}


def loss_of(params: Any, batch: Any) -> Any:
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] - y) ** 2)


def train(config: dict[str, Any], after_save: AfterSave) -> None:
    """One process's attempt. config: "steps", "state"."""
    optimizers: dict[str, Any] = {name: make() for name, make in OPTIMIZERS.items()}

    def init() -> Any:
        # As a tuple per optimizer, the way that a script passes them around.
        return {name: (init_params(), optimizer.init(init_params())) for name, optimizer in optimizers.items()}

    def one_step(optimizer: Any, params: Any, opt: Any, batch: Any) -> tuple[Any, Any]:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt = optimizer.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), loss

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        done = {name: one_step(optimizers[name], params, opt, batch) for name, (params, opt) in state.items()}
        return {name: new for name, (new, _) in done.items()}, {name: loss for name, (_, loss) in done.items()}

    batches = Batches(16, 4)
    with raystate.StateManager(config["state"]) as manager:
        restored = manager.restore_or_init(init, items={"data": batches})
        state = restored.state
        for step in range(restored.step, config["steps"]):
            state, losses = train_step(state, next(batches))
            manager.save(step + 1, state, {"data": batches}, metrics=losses)
            after_save(manager, step + 1, state)
