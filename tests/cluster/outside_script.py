"""A JaxTrainer script that knows nothing of raystate, as README's diff finds it. test_outside.py applies the diff and runs it."""

import time

import jax
import jax.numpy as jnp
import numpy as np
from ray.train import ScalingConfig
from ray.train.v2.jax import JaxTrainer

steps = 40
shardings = None


class Batches:
    """Points of a line, in an order that is a function of the position."""

    def __init__(self):
        self.position = 0

    def __next__(self):
        time.sleep(0.25)  # a batch takes a while to be read
        x = np.random.default_rng(self.position).standard_normal(32).astype(np.float32)
        self.position += 1
        return x, 3.0 * x + 1.0

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]


batches = Batches()


def init():
    return {"slope": jnp.zeros(()), "offset": jnp.zeros(())}


@jax.jit
def train_step(state, batch):
    def loss_of(state):
        x, y = batch
        return jnp.mean((state["slope"] * x + state["offset"] - y) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda value, gradient: value - 0.1 * gradient, state, gradients), loss


def train_fn(loop_config):
    state = jax.jit(init, out_shardings=shardings)()
    for step in range(steps):
        state, loss = train_step(state, next(batches))
    print("loss", float(loss))


if __name__ == "__main__":
    JaxTrainer(train_fn, scaling_config=ScalingConfig(num_workers=2)).fit()
