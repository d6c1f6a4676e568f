"""Train a small Flax linen CNN on scikit-learn's digits, with its state kept by raystate.

    python -m jobs.train_digits [--storage runs/digits] [--steps 300] [--workers 2]

Without --workers it trains in this process; with it, in as many Ray Train workers. In a notebook:

    from jobs.train_digits import train
    train("runs/digits", steps=300)

Run either again and it goes on where it was. Exit codes: 0 finished, 1 failed, 2 bad usage, 75 interrupted but resumable.
"""

from __future__ import annotations

import argparse
import functools
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import raystate

FINISHED, FAILED, BAD_USAGE, RESUMABLE = 0, 1, 2, 75
TEST_IMAGES = 360
SAVE_EVERY_STEPS = 50


class Summary(NamedTuple):
    """What a training came to."""

    resumed_at: int  # completed steps before it began
    step: int
    test_accuracy: float  # of 1


class Batches:
    """Endless random batches of the training images. Its whole state is how many it has given."""

    def __init__(self, images: Any, labels: Any, *, size: int, seed: int = 0):
        self._images, self._labels, self._size, self._seed = images, labels, size, seed
        self._given = 0

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> tuple[Any, Any]:
        import numpy as np

        chosen = np.random.default_rng((self._seed, self._given)).choice(len(self._images), self._size, replace=False)
        self._given += 1
        return self._images[chosen], self._labels[chosen]

    def get_state(self) -> dict[str, int]:
        return {"seed": self._seed, "given": self._given}

    def set_state(self, state: dict[str, int]) -> None:
        self._seed, self._given = state["seed"], state["given"]


@functools.cache
def load() -> tuple[Any, Any, Any, Any]:
    """(training images, labels, test images, labels): float32 (n, 8, 8, 1) of 0 to 1, int32 (n,)."""
    import numpy as np
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.images[order, :, :, None] / 16.0).astype(np.float32)
    labels = digits.target[order].astype(np.int32)
    return images[TEST_IMAGES:], labels[TEST_IMAGES:], images[:TEST_IMAGES], labels[:TEST_IMAGES]


@functools.cache
def build() -> tuple[Any, Any, Any, Any]:
    """(init function, sharding of batches over the devices, train step, accuracy function)."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import linen as nn
    from flax.training import train_state
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("data",))
    replicated, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))

    class Cnn(nn.Module):
        @nn.compact
        def __call__(self, x: Any, *, training: bool) -> Any:
            for features in (32, 64):
                x = nn.Conv(features, (3, 3), use_bias=False)(x)
                x = nn.relu(nn.BatchNorm(use_running_average=not training, momentum=0.9)(x))
                x = nn.max_pool(x, (2, 2), (2, 2))
            return nn.Dense(10)(nn.relu(nn.Dense(128)(x.reshape(len(x), -1))))

    class State(train_state.TrainState):
        batch_stats: Any

    model, optimizer = Cnn(), optax.adamw(3e-3)

    def init() -> Any:
        variables = model.init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)), training=False)
        return State.create(apply_fn=model.apply, params=variables["params"], tx=optimizer, batch_stats=variables["batch_stats"])

    def step(state: Any, images: Any, labels: Any) -> tuple[Any, Any]:
        def loss_of(params: Any) -> tuple[Any, Any]:
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, new = state.apply_fn(variables, images, training=True, mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), new["batch_stats"]

        (loss, batch_stats), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss

    def accuracy(state: Any, images: Any, labels: Any) -> Any:
        logits = state.apply_fn({"params": state.params, "batch_stats": state.batch_stats}, images, training=False)
        return jnp.mean(jnp.argmax(logits, -1) == labels)

    return (
        jax.jit(init, out_shardings=replicated),
        split,
        jax.jit(step, donate_argnums=0, out_shardings=(replicated, replicated)),
        jax.jit(accuracy, out_shardings=replicated),
    )


def train_fn(loop_config: dict[str, Any]) -> dict[str, Any]:
    """One process's attempt: {"steps": in all, "batch_size": over all devices, "config": StateConfig, None under `raystate.fit`}."""
    import jax
    import numpy as np

    import raystate

    train_images, train_labels, test_images, test_labels = load()
    init, split, step_fn, accuracy = build()
    batches = Batches(train_images, train_labels, size=loop_config["batch_size"])
    rows = loop_config["batch_size"] // jax.process_count()
    mine = slice(jax.process_index() * rows, (jax.process_index() + 1) * rows)
    with raystate.StateManager(loop_config.get("config")) as manager:
        restored = manager.restore_or_init(init, items={"data": batches})
        state, loss = restored.state, restored.metrics.get("loss") if restored.metrics else None
        for step in range(restored.step, loop_config["steps"]):
            images, labels = (jax.make_array_from_process_local_data(split, part[mine]) for part in next(batches))
            state, loss = step_fn(state, images, labels)
            manager.save(step + 1, state, items={"data": batches}, metrics={"loss": loss})
            if jax.process_index() == 0 and (step + 1) % SAVE_EVERY_STEPS == 0:
                print(f"step {step + 1}: loss {float(loss):.4f}", flush=True)
        right = accuracy(state, *(np.asarray(part) for part in (test_images, test_labels)))
    step = max(restored.step, loop_config["steps"])
    return Summary(resumed_at=restored.step, step=step, test_accuracy=float(right))._asdict()


def train(storage: str = "runs/digits", *, steps: int = 300, batch_size: int = 64, run: str = "digits") -> Summary:
    """Train in this process, from the newest step of `storage` on. Starts a local Ray if none runs.

    Raises:
        raystate.ConfigError, raystate.RunInUseError, raystate.StorageError.
    """
    config = _state_config(storage, run)
    return Summary(**train_fn({"steps": steps, "batch_size": batch_size, "config": config}))


def _state_config(storage: str, run: str) -> raystate.StateConfig:
    import raystate

    return raystate.StateConfig(storage=storage, run=run, save_every_steps=SAVE_EVERY_STEPS)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs.train_digits", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--storage", default="runs/digits", metavar="URL", help="directory or URL of the run (default: %(default)s)"
    )
    parser.add_argument("--run", default="digits", help="name of the run (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="steps in all (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="images in a batch, over all workers (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=0, help="Ray Train workers; 0: train in this process (default)")
    given = parser.parse_args(argv)
    problem = _mistake(given)
    if problem:
        return _say(problem, BAD_USAGE)

    import raystate

    try:
        if given.workers:
            from jobs.train_digits import (
                train_fn,
            )  # as a script it lies in __main__, from which its caches can't be sent to workers

            config = _state_config(given.storage, given.run)
            loop = {"steps": given.steps, "batch_size": given.batch_size}
            found = Summary(**raystate.fit(train_fn, config, num_workers=given.workers, train_loop_config=loop).return_value)
        else:
            found = train(given.storage, steps=given.steps, batch_size=given.batch_size, run=given.run)
    except raystate.Interrupted as error:
        return _say(f"interrupted: {error}; start it again to go on", RESUMABLE)
    except KeyboardInterrupt:
        return _say("interrupted by Ctrl-C; start it again to go on", RESUMABLE)
    except raystate.ConfigError as error:
        return _say(str(error), BAD_USAGE)
    except raystate.RaystateError as error:
        return _say(f"{type(error).__name__}: {error}", FAILED)
    if found.resumed_at >= given.steps:
        print(f"finished before: step {found.resumed_at} of {given.steps}, in {given.storage}")
    print(f"test accuracy {found.test_accuracy:.1%} after step {found.step}")
    return FINISHED


def _mistake(given: argparse.Namespace) -> str:
    if given.steps < 1 or given.workers < 0:
        return "--steps must be at least 1, --workers at least 0"
    if given.batch_size < 1 or given.batch_size % max(1, given.workers):
        return f"--batch-size {given.batch_size} can't be split over {max(1, given.workers)} workers"
    return ""


def _say(message: str, code: int) -> int:
    print(f"train_digits: {message}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
