"""The computation: optimizer, mesh, shardings, and the pure functions that are compiled."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jobs.lm import model as lm
from jobs.lm.config import Config, MeshConfig, TrainConfig, UsageError

Tree = Any


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Devices as a (data, model) mesh, in the order of processes.

    Raises:
        UsageError: the devices don't fill the mesh.
    """
    devices = jax.devices() if devices is None else devices
    data = len(devices) // config.model if config.data == -1 else config.data
    if data < 1 or data * config.model != len(devices):
        shape = f"data {config.data} × model {config.model}"
        raise UsageError(f"train.mesh: {shape} does not fit the {len(devices)} devices of this run")
    return Mesh(np.asarray(devices).reshape(data, config.model), ("data", "model"))


def local_rows(mesh: Mesh, batch_size: int) -> tuple[int, int]:
    """The rows of the global batch that this process holds, half-open.

    Raises:
        UsageError: the batch can't be divided, or a process's part would not be one range.
    """
    data = mesh.shape["data"]
    if batch_size % data:
        raise UsageError(f"train.batch_size={batch_size} should be a multiple of the mesh's data axis, {data}")
    here = jax.process_index()
    mine = [row for row in range(data) if any(d.process_index == here for d in mesh.devices[row])]
    if mine != list(range(mine[0], mine[-1] + 1)):
        raise UsageError(f"train.mesh: process {here} holds rows {mine} of the data axis, which are not neighbours")
    each = batch_size // data
    return mine[0] * each, (mine[-1] + 1) * each


def optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW with warm-up, cosine decay and gradient clipping; no weight decay on scales."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=min(config.warmup_steps, config.steps // 2),
        decay_steps=config.steps,
        end_value=config.learning_rate * config.final_lr_fraction,
    )

    def decays(params: Tree) -> Tree:
        return jax.tree.map_with_path(lambda path, _: not str(path[-1].key).endswith("scale"), params)

    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(schedule, b1=config.beta1, b2=config.beta2, weight_decay=config.weight_decay, mask=decays),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """All that is compiled, for one mesh. State is {"params": …, "opt": …}, batches are uint8 [batch, seq_len + 1]."""

    mesh: Mesh
    init: Callable[[], Tree]  # for `restore_or_init`
    shardings: Callable[[Tree], Tree]  # abstract state -> shardings
    step: Any  # jitted: (state, batch) -> (state, mean loss in nats); donates the state
    evaluate: Callable[[Tree, jax.Array, jax.Array], jax.Array]  # (params, windows, weights) -> sum of nats
    replicate: Callable[[Tree], Tree]  # params -> a whole copy on every device
    graph: Any
    batch_sharding: NamedSharding
    abstract_state: Tree

    def batch(self, rows: np.ndarray) -> jax.Array:
        """This process's rows -> the global batch."""
        return jax.make_array_from_process_local_data(self.batch_sharding, rows)


def build(config: Config, mesh: Mesh) -> Computation:
    """Describe the computation; compiles nothing."""
    graph, abstract_params, specs = lm.abstract_model(config.model)
    tx = optimizer(config.train)
    by_batch = NamedSharding(mesh, PartitionSpec("data"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    param_shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
    )

    def init() -> Tree:
        params = lm.init_params(config.model, config.train.seed)
        return {"params": params, "opt": tx.init(params)}

    def shardings(abstract: Tree) -> Tree:
        # Moments lie like their parameters; counters are on every device.
        opt = optax.tree_map_params(
            tx, lambda _, sharding: sharding, abstract["opt"], param_shardings, transform_non_params=lambda _: everywhere
        )
        return {"params": param_shardings, "opt": opt}

    def place(array: jax.Array, *axes: Any) -> jax.Array:
        return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, PartitionSpec(*axes)))

    def loss_of(params: Tree, batch: jax.Array) -> jax.Array:
        return jnp.mean(lm.nats_per_byte(graph, params, batch, place))

    def step(state: Tree, batch: jax.Array) -> tuple[Tree, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, opt = tx.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    @functools.partial(jax.jit, out_shardings=everywhere)
    def evaluate(params: Tree, windows: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.sum(lm.nats_per_byte(graph, params, windows, place) * weights[:, None])

    abstract = {"params": abstract_params, "opt": jax.eval_shape(tx.init, abstract_params)}
    placed = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract, shardings(abstract)
    )
    state_shardings = jax.tree.map(lambda leaf: leaf.sharding, placed)
    return Computation(
        mesh=mesh,
        init=init,
        shardings=shardings,
        step=jax.jit(step, donate_argnums=0, out_shardings=(state_shardings, everywhere)),
        evaluate=evaluate,
        replicate=jax.jit(lambda params: params, out_shardings=everywhere),
        graph=graph,
        batch_sharding=by_batch,
        abstract_state=placed,
    )


class CompileAhead:
    """Compiles the training step on another thread, so that it costs no time of its own beside reading the state."""

    def __init__(self, computation: Computation, batch_shape: tuple[int, int]):
        self._computation = computation
        self._batch = jax.ShapeDtypeStruct(batch_shape, jnp.uint8, sharding=computation.batch_sharding)
        self._compiled: Any = None
        self._error: BaseException | None = None
        # No daemon: a process whose interpreter ends while XLA compiles is aborted.
        self._thread = threading.Thread(target=self._compile, name="compile-step")
        self._thread.start()

    def _compile(self) -> None:
        try:
            self._compiled = self._computation.step.lower(self._computation.abstract_state, self._batch).compile()
        except BaseException as error:  # raised on the training thread
            self._error = error

    def result(self) -> Callable[[Tree, jax.Array], tuple[Tree, jax.Array]]:
        """The compiled step; waits for it. Compilation has no deadline of its own: it talks to no other process."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._compiled
