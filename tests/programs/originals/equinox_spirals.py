"""After Equinox's example of an RNN that tells spirals apart: a generator of batches, a model with static parts. No raystate.

python equinox_spirals.py STEPS
"""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax


def spirals(count):
    made_up = np.random.default_rng(1)
    t = np.linspace(0, 16, 8)
    offset = made_up.uniform(0, 6, (count, 1))
    radius = t / 2
    x = np.stack([radius * np.sin(t + offset), radius * np.cos(t + offset)], axis=-1).astype(np.float32)
    x[: count // 2, :, 0] *= -1
    return x, (np.arange(count) < count // 2).astype(np.float32)[:, None]


def dataloader(arrays, batch_size):
    shuffled = np.random.default_rng(2)
    while True:
        order = shuffled.permutation(len(arrays[0]))
        for start in range(0, len(order) - batch_size + 1, batch_size):
            chosen = order[start : start + batch_size]
            yield tuple(array[chosen] for array in arrays)


class RNN(eqx.Module):
    hidden: int
    cell: eqx.nn.GRUCell
    linear: eqx.nn.Linear

    def __init__(self, hidden, key):
        first, second = jax.random.split(key)
        self.hidden = hidden
        self.cell = eqx.nn.GRUCell(2, hidden, key=first)
        self.linear = eqx.nn.Linear(hidden, 1, key=second)

    def __call__(self, xs):
        out, _ = jax.lax.scan(lambda carry, x: (self.cell(x, carry), None), jnp.zeros(self.hidden), xs)
        return jax.nn.sigmoid(self.linear(out))


def loss_of(model, x, y):
    guess = jnp.clip(jax.vmap(model)(x), 1e-4, 1 - 1e-4)
    return -jnp.mean(y * jnp.log(guess) + (1 - y) * jnp.log(1 - guess))


def main(steps):
    optim = optax.adam(3e-3)

    @eqx.filter_jit
    def make_step(model, x, y, opt_state):
        loss, grads = eqx.filter_value_and_grad(loss_of)(model, x, y)
        updates, opt_state = optim.update(grads, opt_state)
        return loss, eqx.apply_updates(model, updates), opt_state

    model = RNN(8, jax.random.key(3))
    opt_state = optim.init(eqx.filter(model, eqx.is_inexact_array))
    batches = dataloader(spirals(96), 32)
    for step, (x, y) in zip(range(steps), batches, strict=False):
        loss, model, opt_state = make_step(model, x, y, opt_state)
        print(f"step {step + 1}, loss {loss:.4f}", flush=True)
    return eqx.filter(model, eqx.is_array), opt_state


if __name__ == "__main__":
    np.savez("end.npz", *jax.tree.leaves(main(int(sys.argv[1]))))
