"""A classifier in haiku, with running means as its state; Python's global `random` shuffles each epoch and mirrors the images.

The program draws from `random` in many places, as scripts do, so all that `random` is counts as its position.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

import raystate
from tests.programs.after_save import AfterSave

IMAGES, SIDE, CLASSES, BATCH = 40, 6, 4, 8


class Training(NamedTuple):
    params: Any
    means: hk.State
    optimizer: optax.OptState


def network(images: Any, training: bool) -> Any:
    h = hk.Conv2D(4, 3)(images)
    h = jax.nn.relu(hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(h, is_training=training))
    return hk.Linear(CLASSES)(hk.Flatten()(h))


model = hk.without_apply_rng(hk.transform_with_state(network))
optimizer = optax.adam(1e-2)


def init() -> Training:
    params, means = model.init(jax.random.key(0), jnp.zeros((1, SIDE, SIDE, 1)), True)
    return Training(params, means, optimizer.init(params))


@jax.jit
def train_step(now: Training, images: Any, labels: Any) -> tuple[Training, Any]:
    def loss_of(params: Any) -> Any:
        logits, means = model.apply(params, now.means, images, True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), means

    (loss, means), grads = jax.value_and_grad(loss_of, has_aux=True)(now.params)
    updates, opt_state = optimizer.update(grads, now.optimizer)
    return Training(optax.apply_updates(now.params, updates), means, opt_state), loss


class Shuffled:
    """Batches of an endless sequence of epochs. Its position: what is left of the epoch, and the state of `random`."""

    def __init__(self) -> None:
        made_up = np.random.default_rng(0)
        self._labels = made_up.integers(0, CLASSES, IMAGES)
        noise = made_up.standard_normal((IMAGES, SIDE, SIDE, 1))
        self._images = (noise + self._labels[:, None, None, None]).astype(np.float32)
        self._left: list[int] = []

    def __next__(self) -> tuple[Any, Any]:
        if not self._left:
            self._left = list(range(IMAGES))
            random.shuffle(self._left)
        chosen, self._left = self._left[:BATCH], self._left[BATCH:]
        images = np.stack([self._images[i, :, :: random.choice((1, -1))] for i in chosen])
        return images, self._labels[chosen]

    def get_state(self) -> dict[str, Any]:
        return {"left": self._left, "random": random.getstate()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._left = state["left"]
        random.setstate(state["random"])


def train(config: dict[str, Any], after_save: AfterSave) -> None:
    """One process's attempt. config: "steps", "state"."""
    random.seed(5)
    data = Shuffled()
    with raystate.StateManager(config["state"]) as manager:
        restored = manager.restore_or_init(init, items={"data": data})
        now = restored.state
        for step in range(restored.step, config["steps"]):
            now, loss = train_step(now, *next(data))
            manager.save(step + 1, now, items={"data": data}, metrics={"loss": float(loss)})
            after_save(manager, step + 1, now)
