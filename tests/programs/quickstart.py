"""A line fitted by gradient descent, as Ray's JaxTrainer quickstart does it: each process has data, parameters and optimizer of its own.

Nothing is averaged over the processes, so each fits a line of its own, and a step has no one value of a parameter. That is how it stands,
with the seed "rank"; with the seed "same" all processes hold equal values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import raystate
from tests.programs.after_save import AfterSave

optimizer = optax.adam(0.05)


def problem(seed: int) -> tuple[Callable[[], Any], Callable[[Any], tuple[Any, jax.Array]]]:
    """(init, train step) of one process."""
    x_key, noise_key, w_key, b_key = jax.random.split(jax.random.key(seed), 4)
    x = jax.random.normal(x_key, (100, 1))
    y = 2.0 * x + 1.0 + 0.1 * jax.random.normal(noise_key, (100, 1))

    def init() -> Any:
        params = {"w": jax.random.normal(w_key, (1, 1)), "b": jax.random.normal(b_key, (1,))}
        return {"params": params, "opt": optimizer.init(params)}

    def loss_of(params: Any) -> jax.Array:
        return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)

    @jax.jit
    def train_step(state: Any) -> tuple[Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        updates, opt = optimizer.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return init, train_step


def train(config: dict[str, Any], after_save: AfterSave) -> None:
    """One process's attempt. config: "steps", "seed" ("rank" or "same")."""
    init, train_step = problem(jax.process_index() if config["seed"] == "rank" else 0)
    with raystate.StateManager() as manager:
        restored = manager.restore_or_init(init)
        state = restored.state
        for step in range(restored.step, config["steps"]):
            state, loss = train_step(state)
            manager.save(step + 1, state, metrics={"loss": loss})
            after_save(manager, step + 1, state)
