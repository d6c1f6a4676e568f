"""States of parameters and Adam's moments, and a step of matrix products that donates them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

COLUMNS = 1024
MATRIX = 4096  # rows and columns of the products; on CPU devices a sixteenth


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A state.

    Attributes:
        mib: of all arrays together.
        arrays: how many, about: parameters and two moments for each, and a counter.
        dtype: of them.
        others: Orbax saves it, too.
    """

    mib: int
    arrays: int
    dtype: str
    others: bool = False

    @property
    def name(self) -> str:
        size = f"{self.mib / 1024:g} GiB" if self.mib >= 1024 else f"{self.mib} MiB"
        return f"{size}, {self.arrays} arrays, {self.dtype}"


def init(case: Case) -> Any:
    """The state: dicts of (rows, 1024) arrays that compress as weights do, and an int32 counter. Compiles one array's program."""
    import jax
    import jax.numpy as jnp

    count = max(1, case.arrays // 3)
    rows = max(1, case.mib * 2**20 // (3 * count * COLUMNS * jnp.dtype(case.dtype).itemsize))
    make = jax.jit(lambda key: jax.random.normal(key, (rows, COLUMNS), case.dtype))
    keys = iter(jax.random.split(jax.random.key(case.mib), 3 * count))
    state = {group: {f"w{i:04d}": make(next(keys)) for i in range(count)} for group in ("params", "mu", "nu")}
    return jax.block_until_ready({**state, "step": jnp.zeros((), jnp.int32)})


class Work:
    """A state and its step, which donates it and takes about `step_s`."""

    def __init__(self, case: Case, step_s: float):
        import jax
        import jax.numpy as jnp

        size = MATRIX if jax.devices()[0].platform != "cpu" else MATRIX // 16
        self._matrix = jax.random.normal(jax.random.key(1), (size, size), jnp.bfloat16) / size**0.5
        self.state: Any = init(case)
        self.nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self.state))
        self._repeats = 1
        self._losses: list[Any] = []
        self._calibrate(step_s)

    def __call__(self, repeats: int | None = None) -> None:
        """Begin one step. `repeats`: of its products, else as many as take `step_s`."""
        self.state, loss = _compiled()(self.state, self._matrix, repeats or self._repeats)
        self._losses = [*self._losses[-1:], loss]

    def keep_up(self) -> None:
        """Until the step before the newest is done: a loop that reads its losses is one step ahead of its device."""
        self._losses[0].block_until_ready()

    def wait(self) -> None:
        """Until the newest step is done."""
        self._losses[-1].block_until_ready()

    def timed(self) -> float:
        """Seconds of a step that begins when the device has nothing to do."""
        self.wait()
        begin_s = time.perf_counter()
        self()
        self.wait()
        return time.perf_counter() - begin_s

    def _calibrate(self, step_s: float) -> None:
        self()
        self.wait()
        least_s = min(self.timed(), self.timed())
        self._repeats = 50
        each_s = max(1e-6, (self.timed() - least_s) / 49)
        self._repeats = max(1, round((step_s - least_s) / each_s))
        self.timed()


@functools.cache
def _compiled() -> Callable[[Any, Any, int], Any]:
    import jax

    return jax.jit(_step, donate_argnums=0)


def _step(state: Any, matrix: Any, repeats: Any) -> Any:
    import jax
    import jax.numpy as jnp

    def product(_: Any, x: Any) -> Any:
        y = x @ matrix
        return y * jax.lax.rsqrt(jnp.mean(jnp.square(y.astype(jnp.float32))) + 1e-6).astype(y.dtype)

    worked = jax.lax.fori_loop(0, repeats, product, matrix)
    change = 1e-3 * jnp.tanh(worked[0, 0]).astype(jnp.float32)

    def adam(p: Any, m: Any, v: Any) -> tuple[Any, Any, Any]:
        gradient = (0.01 * p + change).astype(p.dtype)
        m, v = 0.9 * m + 0.1 * gradient, 0.99 * v + 0.01 * gradient * gradient
        return (p - 1e-3 * m * jax.lax.rsqrt(jnp.abs(v) + 1e-8)).astype(p.dtype), m.astype(p.dtype), v.astype(p.dtype)

    done = {name: adam(p, state["mu"][name], state["nu"][name]) for name, p in state["params"].items()}
    groups = {group: {name: new[i] for name, new in done.items()} for i, group in enumerate(("params", "mu", "nu"))}
    return {**groups, "step": state["step"] + 1}, change
