"""A line fitted by gradient descent, as Ray's JaxTrainer quickstart does it: each process has data, parameters and optimizer of its own.

Nothing is averaged over the processes, so each fits its own line, and a step has no one value of a parameter. The key decides which way
out is taken: with `"seed": "rank"` it is the quickstart as it stands; with `"seed": "same"` all processes hold equal values.
`"where": "item"` keeps what each rank has of its own in an item with one state per process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import raystate

optimizer = optax.adam(0.05)


class Own:
    """A tree of arrays as an item with one state per process."""

    def __init__(self, tree: Any):
        self.tree = tree

    def get_state(self) -> list[Any]:
        """The leaves as hexadecimal floats: JSON keeps them to the bit."""
        return [np.asarray(leaf, np.float64).tolist() for leaf in jax.tree.leaves(self.tree)]

    def set_state(self, state: list[Any]) -> None:
        leaves, structure = jax.tree.flatten(self.tree)
        self.tree = jax.tree.unflatten(structure, [jnp.asarray(new, old.dtype) for old, new in zip(leaves, state, strict=True)])


def train(config: dict[str, Any], after_save: Callable[[raystate.StateManager, int], None]) -> Any:
    """One process's attempt. config: "steps", "seed" ("rank" or "same"), "where" ("state" or "item")."""
    seed = jax.process_index() if config["seed"] == "rank" else 0
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

    with raystate.StateManager() as manager:
        restored = manager.restore_or_init(init)
        state = restored.state
        for step in range(restored.step, config["steps"]):
            state, loss = train_step(state)
            manager.save(step + 1, state, metrics={"loss": loss})
            after_save(manager, step + 1)
    return state
