"""After Flax's MNIST example (linen), on made-up digits: epochs of shuffled batches. No raystate.

python flax_digits.py EPOCHS
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(features=4, kernel_size=(3, 3))(x))
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))
        return nn.Dense(features=10)(x)


@jax.jit
def train_step(state, images, labels):
    def loss_of(params):
        logits = state.apply_fn({"params": params}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss


def train_epoch(state, images, labels, batch_size, rng):
    order = np.asarray(jax.random.permutation(rng, len(images)))
    for start in range(0, len(images), batch_size):
        chosen = order[start : start + batch_size]
        state, loss = train_step(state, images[chosen], labels[chosen])
    return state, loss


def create_train_state(rng):
    cnn = CNN()
    params = cnn.init(rng, jnp.ones([1, 8, 8, 1]))["params"]
    return train_state.TrainState.create(apply_fn=cnn.apply, params=params, tx=optax.sgd(0.1, momentum=0.9))


def main(epochs):
    made_up = np.random.default_rng(0)
    labels = made_up.integers(0, 10, 128)
    images = (made_up.standard_normal((128, 8, 8, 1)) + labels[:, None, None, None]).astype(np.float32)
    rng, init_rng = jax.random.split(jax.random.key(0))
    state = create_train_state(init_rng)
    for epoch in range(1, epochs + 1):
        rng, input_rng = jax.random.split(rng)
        state, loss = train_epoch(state, images, labels, 32, input_rng)
        print(f"epoch {epoch}, loss {loss:.4f}", flush=True)
    return state


if __name__ == "__main__":
    np.savez("end.npz", *jax.tree.leaves(main(int(sys.argv[1]))))
