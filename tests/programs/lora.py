"""Adapters of low rank beside a frozen base, in Flax NNX: the base is read from its own checkpoint, the adapters are saved."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import raystate
from tests.programs.after_save import AfterSave
from tests.programs.data import Batches

WIDTH, RANK = 16, 2


class Base(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.first = nnx.Linear(4, WIDTH, rngs=rngs)
        self.last = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(nnx.gelu(self.first(x)))


def base_at(path: str) -> Base:
    """The pretrained model: read from `path`, where the first attempt of all puts one."""
    model = Base(rngs=nnx.Rngs(0))
    state = nnx.state(model)
    try:
        nnx.replace_by_pure_dict(state, raystate.load(path, nnx.to_pure_dict(state)))
    except FileNotFoundError:
        raystate.save(path, nnx.to_pure_dict(nnx.state(Base(rngs=nnx.Rngs(7)))))
        return base_at(path)
    nnx.update(model, state)
    return model


def adapted(base: Base) -> Base:
    """The base with an adapter around each of its layers."""
    for name, sizes in (("first", (4, WIDTH)), ("last", (WIDTH, 1))):
        layer = getattr(base, name)
        setattr(base, name, nnx.LoRA(sizes[0], RANK, sizes[1], base_module=layer, rngs=nnx.Rngs(1)))
    return base


@nnx.jit
def train_step(model: Base, optimizer: nnx.Optimizer, batch: Any) -> jax.Array:
    x, y = batch

    def loss_of(model: Base) -> jax.Array:
        return jnp.mean((model(x) - y) ** 2)

    loss, grads = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
    optimizer.update(model, grads)
    return loss


def train(config: dict[str, Any], after_save: AfterSave) -> None:
    """One process's attempt. config: "steps", "state"."""
    model = adapted(base_at(config["state"].storage + "-base"))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)
    batches = Batches(8, 4)

    def trained() -> Any:
        return {"adapters": nnx.state(model, nnx.LoRAParam), "optimizer": nnx.state(optimizer)}

    with raystate.StateManager(config["state"]) as manager:
        restored = manager.restore_or_init(trained, items={"data": batches})
        nnx.update(model, restored.state["adapters"])
        nnx.update(optimizer, restored.state["optimizer"])
        for step in range(restored.step, config["steps"]):
            loss = train_step(model, optimizer, next(batches))
            manager.save(step + 1, trained(), items={"data": batches}, metrics={"loss": loss})
            after_save(manager, step + 1, trained())
