"""States to save: some big arrays, a mix as a model has it, many small ones; and the step that donates them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MIB = 1 << 20
MOST_IN_ONE_PROGRAM = 512  # arrays: XLA needs minutes to compile one program for thousands
ROWS = 64  # every array can be cut over so many devices
MATRIX = 4096  # rows and columns of the products that a step computes; on CPU devices a sixteenth


@dataclass(frozen=True, kw_only=True)
class Case:
    """One state, and how often it is measured.

    Attributes:
        shape: "big" (arrays of one size), "mixed" (150, as a transformer with its optimizer has them) or "small" (thousands).
        devices: the arrays are cut over so many.
        rounds: at most so many, each with every contestant once; two of them also when `budget_s` is spent.
        without: contestants that are left out.
    """

    mib: int
    shape: str = "big"
    arrays: int = 16
    dtype: str = "float32"
    devices: int = 1
    rounds: int = 5
    budget_s: float = 300.0
    without: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What the tables call it."""
        size = f"{self.mib / 1024:g} GiB" if self.mib >= 1024 else f"{self.mib} MiB"
        mixed = " mixed" if self.shape == "mixed" else ""
        return f"{size} in {self.arrays:,}{mixed} arrays, {self.dtype}{f', {self.devices} devices' if self.devices > 1 else ''}"

    @property
    def nbytes(self) -> int:
        """About so large is the state."""
        return self.mib * MIB


def sizes(case: Case) -> list[tuple[int, ...]]:
    """The arrays' shapes."""
    import jax.numpy as jnp

    elements = case.nbytes // jnp.dtype(case.dtype).itemsize
    if case.shape != "mixed":
        return [(ROWS, max(1, elements // case.arrays // ROWS))] * case.arrays
    # Three of ten are matrices of an attention or feed-forward layer, the rest norms and biases; the embedding is a tenth of all.
    matrices = case.arrays * 3 // 10
    columns = max(8, int((elements * 0.9 / matrices / 4) ** 0.5))
    shapes: list[tuple[int, ...]] = [(ROWS, elements // 10 // ROWS)]
    for number in range(case.arrays - 1):
        shapes.append((4 * columns // ROWS * ROWS or ROWS, columns) if number < matrices else (ROWS * (1 + number % 12),))
    return shapes


def build(case: Case) -> dict[str, Any]:
    """The arrays and an int32 "step", on their devices, matrices cut along the first axis; values as unordered as trained weights."""
    import jax
    import jax.numpy as jnp

    def draw(key: Any, scale: Any, shape: tuple[int, ...]) -> Any:
        return (jax.random.normal(key, shape, jnp.float32) * scale).astype(case.dtype)

    cut, whole = (jax.jit(draw, static_argnums=2, out_shardings=on_axis(case, axis)) for axis in (0, None))
    shapes = sizes(case)
    keys = jax.random.split(jax.random.key(case.mib), len(shapes))
    state: dict[str, Any] = {}
    for number, (key, shape) in enumerate(zip(keys, shapes, strict=True)):
        made = (cut if len(shape) > 1 else whole)(key, 0.02 * (1 + number % 7), shape)
        state[f"layer{number // 10:04d}/w{number:05d}"] = made
    return jax.block_until_ready({**state, "step": jax.device_put(jnp.int32(0), on_axis(case, None))})


def on_axis(case: Case, axis: int | None) -> Any:
    """The sharding that cuts an array along an axis; None: each device has all of it."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

    if case.devices == 1:
        return SingleDeviceSharding(jax.devices()[0])
    mesh = jax.make_mesh((case.devices,), ("x",))
    return NamedSharding(mesh, PartitionSpec(*() if axis is None else [None] * axis + ["x"]))


class Work:
    """A state and its step, which donates it, changes all of it, and takes about `step_s` of its devices' time."""

    def __init__(self, case: Case, step_s: float = 0.0):
        import jax
        import jax.numpy as jnp

        size = MATRIX if jax.devices()[0].platform != "cpu" else MATRIX // 16
        matrices = jax.random.normal(jax.random.key(1), (case.devices, size, size), jnp.bfloat16) / size**0.5
        self._matrices = jax.device_put(matrices, on_axis(case, 0))
        self.state: Any = build(case)
        self.nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self.state))
        self._change = _changed() if case.arrays <= MOST_IN_ONE_PROGRAM else _each_changed
        self._repeats = 1
        self._losses: list[Any] = []
        self()
        least_s = min(self.timed(), self.timed())
        if step_s > least_s:
            self._repeats = 50
            each_s = max(1e-6, (self.timed() - least_s) / 49)
            self._repeats = max(1, round((step_s - least_s) / each_s))

    def __call__(self, repeats: int | None = None) -> None:
        """Begin one step. `repeats`: of its products, else as many as take `step_s`."""
        loss = _products()(self._matrices, repeats or self._repeats, self.state["step"])
        self.state = self._change(self.state, loss)
        self._losses = [*self._losses[-1:], loss]

    def keep_up(self) -> None:
        """Until the step before the newest is done: a loop that reads its losses is one step ahead of its device."""
        self._losses[0].block_until_ready()

    def wait(self) -> None:
        """Until the newest step is done."""
        import jax

        jax.block_until_ready(self.state)

    def timed(self) -> float:
        """Seconds of a step that begins when the device has nothing to do."""
        self.wait()
        begin_s = time.perf_counter()
        self()
        self.wait()
        return time.perf_counter() - begin_s


@functools.cache
def _products() -> Callable[[Any, Any, Any], Any]:
    import jax
    import jax.numpy as jnp

    def product(_: Any, x: Any, matrices: Any) -> Any:
        y = x @ matrices
        return y * jax.lax.rsqrt(jnp.mean(jnp.square(y.astype(jnp.float32))) + 1e-6).astype(y.dtype)

    def products(matrices: Any, repeats: Any, step: Any) -> Any:
        begin = matrices + (0 * step).astype(matrices.dtype)  # so that it waits for the step before
        worked = jax.lax.fori_loop(0, repeats, functools.partial(product, matrices=matrices), begin)
        return 1e-3 * jnp.tanh(worked[:, 0, 0]).mean(dtype=jnp.float32)

    return jax.jit(products)


def _change_one(leaf: Any, loss: Any) -> Any:
    """Still as unordered as before: a constant would cost compression nothing."""
    import jax.numpy as jnp

    return (0.999 * leaf + loss).astype(leaf.dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf + 1


@functools.cache
def _changed() -> Callable[[Any, Any], Any]:
    import jax

    return jax.jit(lambda tree, loss: jax.tree.map(lambda leaf: _change_one(leaf, loss), tree), donate_argnums=0)


@functools.cache
def _one_changed() -> Callable[[Any, Any], Any]:
    import jax

    return jax.jit(_change_one, donate_argnums=0)


def _each_changed(tree: Any, loss: Any) -> Any:
    import jax

    return jax.tree.map(lambda leaf: _one_changed()(leaf, loss), tree)
