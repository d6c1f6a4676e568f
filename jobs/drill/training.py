"""What runs on the cluster: a small but real training, and the one who writes down what it did.

Both go to Ray by value, so a cluster needs no path to this file.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from typing import Any

WIDTH = 32
ROWS = 8  # of a batch, over all ranks
MARKS = 64  # numbers of the exact part
A, C = 1664525, 1013904223
TOLERANCE = 1e-3  # of an elastic run's losses, relative: sums over other devices have another order
ASK_EVERY = 50  # steps between two questions where to end: all ranks ask at the same ones
ACTORS = "raystate-drill"  # Ray namespace
ANSWER_S = 60.0


class Scribe:
    """Writes down what the trainers say, in the order in which it comes, with the seconds of its own clock. Nobody strikes it."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._goal: int | None = None

    def note(self, facts: dict[str, Any]) -> None:
        self._events.append({**facts, "t": time.monotonic()})

    def since(self, number: int) -> list[dict[str, Any]]:
        """The events from this number on."""
        return self._events[number:]

    def set_goal(self, step: int) -> None:
        """The last step. Far enough ahead that every rank asks before it."""
        self._goal = step

    def goal(self) -> int | None:
        return self._goal


class Batches:
    """Step -> batch: its whole state is its position."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> tuple[Any, Any]:
        found = batch(self.position)
        self.position += 1
        return found

    def get_state(self) -> dict[str, int]:
        return {"position": self.position}

    def set_state(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def batch(position: int) -> tuple[Any, Any]:
    """(what is learned from: float32 [ROWS, 16], marks: uint32 [MARKS]) of the step after `position` steps."""
    import numpy as np

    drawn = np.random.default_rng((7, position))
    return drawn.standard_normal((ROWS, 16), np.float32), drawn.integers(0, 1 << 32, MARKS, np.uint32)


def share(whole: Any, rank: int, world: int) -> Any:
    """A rank's part of a batch's rows, or of its marks."""
    each = len(whole) // world
    return whole[rank * each : (rank + 1) * each]


def next_exact(exact: Any, marks: Any) -> Any:
    """The exact part of the state after one more step, for numpy and for JAX: modulo 2**32, so everybody gets the same bits."""
    return exact * exact.dtype.type(A) + marks + exact.dtype.type(C)


def mark(exact: Any) -> str:
    """Few characters for an exact part."""
    import numpy as np

    return hashlib.sha256(np.asarray(exact).tobytes()).hexdigest()[:16]


def build() -> Any:
    """(mesh, init, shardings, step function)."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()).reshape(jax.process_count(), -1), ("data", "model"))
    optimizer = optax.adam(1e-2)

    def init() -> Any:
        keys = jax.random.split(jax.random.key(0), 2)
        params = {
            "w1": jax.random.normal(keys[0], (16, WIDTH), jnp.float32) * 0.1,
            "w2": jax.random.normal(keys[1], (WIDTH, 16), jnp.float32) * 0.1,
        }
        return {"params": params, "opt": optimizer.init(params), "exact": jnp.zeros((MARKS,), jnp.uint32)}

    def shardings(abstract: Any) -> Any:
        def sharding(leaf: Any) -> Any:
            return NamedSharding(mesh, PartitionSpec("data", "model") if leaf.ndim == 2 else PartitionSpec())

        return jax.tree.map(sharding, abstract)

    def loss_of(params: Any, rows: Any) -> Any:
        return jnp.mean((jnp.tanh(rows @ params["w1"]) @ params["w2"] - rows) ** 2)

    def step(state: Any, rows: Any, marks: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(state["params"], rows)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        exact = state["exact"] * jnp.uint32(A) + marks + jnp.uint32(C)
        return {"params": params, "opt": opt, "exact": exact}, loss

    placed = shardings(jax.eval_shape(init))
    return mesh, init, shardings, jax.jit(step, donate_argnums=0, out_shardings=(placed, None))


def digest(state: Any) -> str:
    """Hash of this process's shards of the whole state."""
    import jax
    import numpy as np

    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        found.update(jax.tree_util.keystr(path).encode())
        for shard in sorted(leaf.addressable_shards, key=lambda shard: str(shard.index)):
            found.update(np.asarray(shard.data).tobytes())
    return found.hexdigest()


def train(config: dict[str, Any]) -> None:
    """Each rank learns from its share of a batch, and gives its share of the marks.

    config: scribe (name of the actor), steps (None: until the scribe says where to end), step_s (seconds that a step takes at least),
    tells (whether it tells the scribe of each step).
    """
    import jax
    import ray
    from jax.sharding import NamedSharding, PartitionSpec

    import raystate

    scribe: Any = ray.get_actor(config["scribe"], namespace=ACTORS)
    mesh, init, shardings, step_fn = build()
    split = NamedSharding(mesh, PartitionSpec("data"))
    rank, world = jax.process_index(), jax.process_count()
    node = ray.get_runtime_context().get_node_id()
    # A pid does not tell one process from another: in a long drill Linux gives each of them again.
    who = {"rank": rank, "world": world, "trainer": secrets.token_hex(8), "pid": os.getpid(), "node": node}
    batches = Batches()
    goal = config["steps"]
    with raystate.StateManager() as manager:
        restored = manager.restore_or_init(init, shardings, items={"data": batches})
        state, step = restored.state, restored.step
        first, seen = step + 1, mark(state["exact"].addressable_data(0))
        scribe.note.remote({**who, "event": "start", "step": step, "tier": restored.tier, "at": batches.position, "exact": seen})
        while goal is None or step < goal:
            if goal is None and step % ASK_EVERY == 0:
                answer: Any = ray.get(scribe.goal.remote(), timeout=ANSWER_S)
                goal = answer
            begin_s = time.perf_counter()
            rows, marks = (jax.make_array_from_process_local_data(split, share(one, rank, world)) for one in next(batches))
            state, loss = step_fn(state, rows, marks)
            value = float(loss)
            time.sleep(max(0.0, config["step_s"] - (time.perf_counter() - begin_s)))  # stands for a longer computation
            step += 1
            manager.save(step, state, items={"data": batches}, metrics={"loss": value})
            if step == first:
                scribe.note.remote({**who, "event": "first", "step": step})
            if config["tells"]:
                scribe.note.remote({**who, "event": "step", "step": step, "loss": value.hex()})
        # Its answer: the process may end right after.
        last = mark(state["exact"].addressable_data(0))
        ray.get(scribe.note.remote({**who, "event": "end", "step": step, "digest": digest(state), "exact": last}), timeout=ANSWER_S)


class Exact:
    """What the exact part of the state must be, at any step."""

    def __init__(self) -> None:
        import numpy as np

        self._all = [np.zeros(MARKS, np.uint32)]

    def at(self, step: int) -> Any:
        """uint32 [MARKS] after so many steps."""
        while len(self._all) <= step:
            self._all.append(next_exact(self._all[-1], batch(len(self._all) - 1)[1]))
        return self._all[step]
