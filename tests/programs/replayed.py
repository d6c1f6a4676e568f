"""Q-learning whose replay buffer grows with each step: arrays that are longer at each save, and NumPy's generator that samples them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import raystate
from tests.programs.after_save import AfterSave

PLACES, ACTIONS, BATCH, PLAYED = 12, 2, 16, 5

Buffer = dict[str, np.ndarray]  # of all that was played: int32 (transitions,), and rewards in float32


def init() -> Any:
    """(parameters, those of the target, state of the optimizer, place of the agent)."""
    params = {"hidden": jax.random.normal(jax.random.key(0), (PLACES, 16)) / 4, "out": jnp.zeros((16, ACTIONS))}
    return params, jax.tree.map(jnp.copy, params), optimizer.init(params), jnp.zeros((), jnp.int32)


def values(params: Any, place: Any) -> Any:
    return jnp.tanh(jax.nn.one_hot(place, PLACES) @ params["hidden"]) @ params["out"]


optimizer = optax.rmsprop(1e-2, momentum=0.9)
best = jax.jit(lambda params, place: values(params, place).argmax())


@functools.partial(jax.jit, donate_argnums=(0, 2))
def learn(params: Any, target: Any, opt_state: Any, batch: Any) -> Any:
    def loss_of(params: Any) -> Any:
        now = jnp.take_along_axis(values(params, batch["place"]), batch["action"][:, None], 1)[:, 0]
        return optax.huber_loss(now, batch["reward"] + 0.9 * values(target, batch["next"]).max(1)).mean()

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, opt_state = optimizer.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


def play(params: Any, place: int, rng: np.random.Generator) -> tuple[Buffer, int]:
    """A few moves along the line, whose end gives the reward; a tenth of them at random."""
    moves: list[tuple[int, int, float, int]] = []
    for _ in range(PLAYED):
        action = int(rng.integers(ACTIONS)) if rng.random() < 0.1 else int(best(params, place))
        following = min(max(place + 2 * action - 1, 0), PLACES - 1)
        moves.append((place, action, float(following == PLACES - 1), following))
        place = following
    columns = dict(zip(("place", "action", "reward", "next"), zip(*moves, strict=True), strict=True))
    return {name: np.array(column, np.float32 if name == "reward" else np.int32) for name, column in columns.items()}, place


class Generator:
    """NumPy's generator as an item."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)

    def get_state(self) -> Any:
        return self.rng.bit_generator.state

    def set_state(self, state: Any) -> None:
        self.rng.bit_generator.state = state


def train(config: dict[str, Any], after_save: AfterSave) -> None:
    """One process's attempt. config: "steps", "state"."""
    generator = Generator(4)
    with raystate.StateManager(config["state"]) as manager:
        restored = manager.restore_or_init(init, items={"generator": generator, "replay": None})
        params, target, opt_state, place = restored.state
        replay: Buffer = restored.items["replay"] or {}
        for step in range(restored.step, config["steps"]):
            played, place = play(params, int(place), generator.rng)
            replay = {name: np.concatenate([replay[name], new]) if replay else new for name, new in played.items()}
            chosen = generator.rng.integers(len(replay["place"]), size=BATCH)
            batch = {name: column[chosen] for name, column in replay.items()}
            params, opt_state, loss = learn(params, target, opt_state, batch)
            if step % 4 == 3:
                target = jax.tree.map(jnp.copy, params)
            state = (params, target, opt_state, jnp.asarray(place, jnp.int32))
            manager.save(step + 1, state, items={"generator": generator, "replay": replay}, metrics={"loss": loss})
            after_save(manager, step + 1, (state, replay))
