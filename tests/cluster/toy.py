"""A small but real training for tests: two Adam-trained matrices, sharded over (data, model), fed by an iterator with state.

Its functions run in Ray workers; `conftest.py` makes Ray pickle this module by value, so the workers need no path to it.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import time
from typing import Any

PAUSE = "pause"  # the file in `out` with the step at which training pauses
POLL_S = 0.02


class Numbers:
    """An iterator whose whole state is (seed, position); grain's protocol."""

    def __init__(self, seed: int = 7):
        self.seed = seed
        self.position = 0

    def __iter__(self) -> Numbers:
        return self

    def __next__(self) -> Any:
        import numpy as np

        batch = np.random.default_rng((self.seed, self.position)).standard_normal((8, 16), np.float32)
        self.position += 1
        return batch

    def get_state(self) -> dict[str, int]:
        return {"seed": self.seed, "position": self.position}

    def set_state(self, state: dict[str, int]) -> None:
        self.seed, self.position = state["seed"], state["position"]


def build(width: int) -> Any:
    """(mesh, init, shardings, step function)."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = np.array(jax.devices())
    mesh = Mesh(devices.reshape(2, -1) if len(devices) > 1 else devices.reshape(1, 1), ("data", "model"))
    optimizer = optax.adam(1e-2)

    def init() -> Any:
        keys = jax.random.split(jax.random.key(0), 2)
        params = {
            "w1": jax.random.normal(keys[0], (16, width), jnp.float32) * 0.1,
            "w2": jax.random.normal(keys[1], (width, 16), jnp.float32) * 0.1,
            "b": jnp.zeros((16,), jnp.float32),
        }
        return {"params": params, "opt": optimizer.init(params), "rng": jax.random.key_data(jax.random.key(1))}

    def sharding(leaf: Any) -> Any:
        spec = PartitionSpec("data", "model") if leaf.ndim == 2 else PartitionSpec()
        return NamedSharding(mesh, spec)

    def shardings(abstract: Any) -> Any:
        return jax.tree.map(sharding, abstract)

    def loss_of(params: Any, batch: Any) -> Any:
        hidden = jnp.tanh(batch @ params["w1"])
        return jnp.mean((hidden @ params["w2"] + params["b"] - batch) ** 2)

    def step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "rng": state["rng"] + 1}, loss

    # As they are restored: a digest is of what each process holds, also of an attempt that has no step left to do.
    placed = shardings(jax.eval_shape(init))
    return mesh, init, shardings, jax.jit(step, donate_argnums=0, out_shardings=(placed, None))


def digest(state: Any, iterator: Numbers) -> str:
    """Hash of this process's shards and of the iterator."""
    import jax
    import numpy as np

    found = hashlib.sha256(json.dumps(iterator.get_state()).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        found.update(jax.tree_util.keystr(path).encode())
        for shard in sorted(leaf.addressable_shards, key=lambda shard: str(shard.index)):
            found.update(np.asarray(shard.data).tobytes())
    return found.hexdigest()


def dump(state: Any, path: str) -> None:
    """This process's shards, as (leaf number in tree order, global shape, index, array)."""
    import jax
    import numpy as np

    pieces = [
        (number, leaf.shape, [(part.start, part.stop) for part in shard.index], np.asarray(shard.data))
        for number, leaf in enumerate(jax.tree.leaves(state))
        for shard in leaf.addressable_shards
    ]
    with open(path, "wb") as file:
        pickle.dump(pieces, file)


def assemble(paths: list[str]) -> list[Any]:
    """The whole arrays from the dumps of all ranks."""
    import numpy as np

    arrays: dict[int, Any] = {}
    for path in paths:
        with open(path, "rb") as file:
            for number, shape, index, data in pickle.load(file):
                whole = arrays.setdefault(number, np.full(shape, 0, data.dtype))
                whole[tuple(slice(start, stop) for start, stop in index)] = data
    return [arrays[number] for number in sorted(arrays)]


def pause(out: str, done: int) -> None:
    """Waits while the test wants no step after `done`: see `Training.go_to_end`."""
    path = os.path.join(out, PAUSE)
    while True:
        try:
            with open(path) as file:
                if done < int(file.read()):
                    return
        except FileNotFoundError:
            return
        time.sleep(POLL_S)


def waits_for_ever(out: str) -> None:
    """Once in a run."""
    import threading

    try:
        open(os.path.join(out, "has-hung"), "x").close()
    except FileExistsError:
        return
    never = threading.Lock()
    never.acquire()
    never.acquire()


def train(config: dict[str, Any]) -> Any:
    """config: steps, step_s, out (directory for events and pauses), width, hang_at (step at which rank 1 hangs)."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    import raystate

    mesh, init, shardings, step_fn = build(config.get("width", 32))
    rank = jax.process_index()
    events = open(os.path.join(config["out"], f"events-{os.getpid()}.jsonl"), "a", buffering=1)  # noqa: SIM115 - ends with the process

    def say(**facts: Any) -> None:
        events.write(json.dumps({"t": time.time(), "pid": os.getpid(), "rank": rank, **facts}) + "\n")

    iterator = Numbers()
    loss = None  # an attempt that begins behind the last step computes none
    with raystate.StateManager() as manager:
        restored = manager.restore_or_init(init, shardings, items={"data": iterator})
        state = restored.state
        say(event="start", step=restored.step, tier=restored.tier, position=iterator.position)
        for step in range(restored.step, config["steps"]):
            pause(config["out"], step)
            if rank == 1 and step == config.get("hang_at"):
                waits_for_ever(config["out"])
            begin = time.perf_counter()
            batch = jax.device_put(next(iterator), NamedSharding(mesh, PartitionSpec()))
            state, loss = step_fn(state, batch)
            loss.block_until_ready()
            time.sleep(max(0.0, config["step_s"] - (time.perf_counter() - begin)))  # stands for a longer computation
            manager.save(step + 1, state, items={"data": iterator}, metrics={"loss": loss})
            say(event="step", step=step + 1, loss=float(loss).hex())
        say(event="end", digest=digest(state, iterator))
    return None if loss is None else float(loss)
