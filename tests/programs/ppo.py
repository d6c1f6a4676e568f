"""PPO in plain JAX whose training was one `lax.scan` over all updates; it is now a loop over scans of a few.

What the scan carried is the state: the learner, all environments, their last observations, and the random key. A scan
keeps the types of its carry; a loop does not. So a counter that the scan would have refused can change its type here.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import raystate
from tests.programs.after_save import AfterSave

ENVIRONMENTS, LENGTH, UPDATES = 8, 16, 2


class Chase(NamedTuple):
    """A point on a line that shall come to its target. Arrays of (environments,)."""

    position: jax.Array
    target: jax.Array
    time: jax.Array


class Runner(NamedTuple):
    learner: TrainState
    environments: Chase
    key: jax.Array
    finished: jax.Array  # a running mean of episodes per step


class Policy(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> tuple[Any, Any]:
        x = nn.tanh(nn.Dense(16)(x))
        return nn.Dense(3)(x), nn.Dense(1)(x)[..., 0]


def begin(key: Any) -> Chase:
    position, target = jax.random.uniform(key, (2, ENVIRONMENTS), minval=-1.0)
    return Chase(position, target, jnp.zeros(ENVIRONMENTS, jnp.int32))


def observe(environments: Chase) -> Any:
    return jnp.stack([environments.position, environments.target], -1)


def act(environments: Chase, action: Any, key: Any) -> tuple[Chase, Any, Any]:
    """(what follows, reward, whether the episode has ended) of each environment; ended ones begin anew."""
    moved = Chase(environments.position + 0.2 * (action - 1), environments.target, environments.time + 1)
    done = moved.time >= 10
    following = jax.tree.map(lambda new, old: jnp.where(done, new, old), begin(key), moved)
    return following, -jnp.abs(moved.position - moved.target), done


def init(counter: str) -> Runner:
    policy = Policy()
    learner, environments, key = jax.random.split(jax.random.key(0), 3)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-5))
    params = policy.init(learner, jnp.zeros((1, 2)))
    return Runner(
        TrainState.create(apply_fn=policy.apply, params=params, tx=optimizer), begin(environments), key, jnp.zeros((), counter)
    )


def advantages(rewards: Any, dones: Any, values: Any, last: Any) -> Any:
    """Generalized advantage estimation (Schulman et al. 2016), float32 (time, environments)."""

    def back(carry: Any, now: Any) -> Any:
        gae, following = carry
        reward, done, value = now
        gae = reward + 0.99 * following * (1 - done) - value + 0.95 * 0.99 * (1 - done) * gae
        return (gae, value), gae

    return jax.lax.scan(back, (jnp.zeros_like(last), last), (rewards, dones, values), reverse=True)[1]


def update(runner: Runner, _: None) -> tuple[Runner, Any]:
    """One round: play, then learn from what was played."""
    learner = runner.learner

    def play(carry: Any, _: None) -> Any:
        environments, key = carry
        key, choose, anew = jax.random.split(key, 3)
        seen = observe(environments)
        logits, value = learner.apply_fn(learner.params, seen)
        action = jax.random.categorical(choose, logits)
        chance = jax.nn.log_softmax(logits)[jnp.arange(ENVIRONMENTS), action]
        environments, reward, done = act(environments, action, anew)
        return (environments, key), (seen, action, chance, value, reward, done)

    carry, played = jax.lax.scan(play, (runner.environments, runner.key), None, LENGTH)
    environments, key = carry
    seen, action, chance, value, reward, done = played
    gae = advantages(reward, done, value, learner.apply_fn(learner.params, observe(environments))[1])

    def loss_of(params: Any) -> Any:
        logits, now = learner.apply_fn(params, seen)
        log = jax.nn.log_softmax(logits)
        ratio = jnp.exp(jnp.take_along_axis(log, action[..., None], -1)[..., 0] - chance)
        gain = (gae - gae.mean()) / (gae.std() + 1e-8)
        bound = jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain).mean()
        return 0.5 * jnp.square(now - gae - value).mean() - bound + 0.01 * (jnp.exp(log) * log).sum(-1).mean()

    loss, grads = jax.value_and_grad(loss_of)(learner.params)
    finished = 0.9 * runner.finished + 0.1 * done.sum()
    return Runner(learner.apply_gradients(grads=grads), environments, key, finished), loss


@functools.partial(jax.jit, donate_argnums=0)
def several(runner: Runner) -> tuple[Runner, Any]:
    first, _ = update(runner, None)
    runner, losses = jax.lax.scan(update, first, None, UPDATES - 1)
    return runner, losses.mean()


def train(config: dict[str, Any], after_save: AfterSave) -> None:
    """One process's attempt. config: "steps", "state", "counter" (dtype of `Runner.finished` in a fresh state)."""
    with raystate.StateManager(config["state"]) as manager:
        restored = manager.restore_or_init(lambda: init(config.get("counter", "float32")))
        runner = restored.state
        for step in range(restored.step, config["steps"]):
            runner, loss = several(runner)
            manager.save(step + 1, runner, metrics={"loss": loss})
            after_save(manager, step + 1, runner)
