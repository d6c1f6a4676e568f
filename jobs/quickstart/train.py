import time

import jax
import jax.numpy as jnp

import raystate

angles, side = jnp.linspace(3, 18, 2000), jnp.arange(2000) % 2  # two spirals, one inside the other
points = jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=1) * (angles / 6 * (2 * side - 1))[:, None]


def init():
    shapes = [(2, 192), (192, 192), (192, 2)]
    return [jax.random.normal(jax.random.key(n), shape) / shape[0] ** 0.5 for n, shape in enumerate(shapes)]


def loss_of(weights):
    scores = jnp.sin(jnp.sin(points @ weights[0]) @ weights[1]) @ weights[2]
    return -jnp.mean(jax.nn.log_softmax(scores)[jnp.arange(2000), side])


@jax.jit
def train_step(weights):
    loss, slopes = jax.value_and_grad(loss_of)(weights)
    return jax.tree.map(lambda weight, slope: weight - 0.2 * slope, weights, slopes), loss


config = raystate.StateConfig(storage="runs/spirals", run="spirals", save_every_steps=150)  # to storage
with raystate.StateManager(config) as manager:
    restored = manager.restore_or_init(init)
    weights = restored.state
    print(f"at step {restored.step}, from {restored.tier}", flush=True)
    for step in range(restored.step, 300):
        weights, loss = train_step(weights)
        manager.save(step + 1, weights, metrics={"loss": float(loss)})  # into memory; float() waits for the step
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss:.4f}", flush=True)
        time.sleep(0.05)  # time to kill it
