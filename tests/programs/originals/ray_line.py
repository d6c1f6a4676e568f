"""After the quickstart of Ray's JaxTrainer: two workers fit a line, from one seed. No raystate.

python ray_line.py STEPS FOLDER
"""

import os
import sys

from ray.train import ScalingConfig
from ray.train.v2.jax import JaxConfig, JaxTrainer


def train_func(config):
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    key, noise = jax.random.split(jax.random.key(0))
    x = jax.random.normal(key, (256, 1))
    y = 3.0 * x + 2.0 + 0.1 * jax.random.normal(noise, (256, 1))
    optimizer = optax.adam(1e-2)

    @jax.jit
    def train_step(params, opt_state):
        loss, grads = jax.value_and_grad(lambda params: jnp.mean((x * params["w"] + params["b"] - y) ** 2))(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    params = {"w": jnp.zeros(()), "b": jnp.zeros(())}
    opt_state = optimizer.init(params)
    for step in range(config["steps"]):
        params, opt_state, loss = train_step(params, opt_state)
        print(f"step {step + 1}, loss {loss:.4f}", flush=True)
    np.savez(os.path.join(config["out"], f"end-{jax.process_index()}.npz"), *jax.tree.leaves((params, opt_state)))


def main(steps, out):
    loop_config = {"steps": steps, "out": out}
    scaling, jax_config = ScalingConfig(num_workers=2), JaxConfig(use_gpu=True)
    JaxTrainer(train_func, train_loop_config=loop_config, scaling_config=scaling, jax_config=jax_config).fit()


if __name__ == "__main__":
    main(int(sys.argv[1]), os.path.abspath(sys.argv[2]))
