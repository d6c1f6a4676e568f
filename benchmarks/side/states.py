"""States to save: some big arrays, a mix as a model has it, many small ones; values as unordered as trained weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MIB = 1 << 20
MOST_IN_ONE_PROGRAM = 512
ROWS = 64  # every array can be cut over so many devices


@dataclass(frozen=True, kw_only=True)
class Case:
    """One state, and how often it is measured.

    Attributes:
        shape: "big" (16 arrays), "mixed" (150, as a transformer with its optimizer has them) or "small" (`arrays`, all alike).
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
        """What the table calls it."""
        size = f"{self.mib // 1024} GiB" if self.mib >= 1024 and self.mib % 1024 == 0 else f"{self.mib} MiB"
        cut = f", {self.devices} devices" if self.devices > 1 else ""
        return f"{size} in {self.arrays:,} {self.shape} arrays, {self.dtype}{cut}"

    @property
    def nbytes(self) -> int:
        """About so large is the state."""
        return self.mib * MIB


def sizes(case: Case) -> list[tuple[int, ...]]:
    """The arrays' shapes."""
    import numpy as np

    elements = case.nbytes // np.dtype("uint16" if case.dtype == "bfloat16" else case.dtype).itemsize
    if case.shape != "mixed":
        return [(ROWS, max(1, elements // case.arrays // ROWS))] * case.arrays
    # Three of ten are matrices of an attention or feed-forward layer, the rest norms and biases; the embedding is a tenth of all.
    matrices = case.arrays * 3 // 10
    columns = max(8, int((elements * 0.9 / matrices / 4) ** 0.5))
    shapes: list[tuple[int, ...]] = [(ROWS, elements // 10 // ROWS)]
    for number in range(case.arrays - 1):
        shapes.append((4 * columns // ROWS * ROWS or ROWS, columns) if number < matrices else (ROWS * (1 + number % 12),))
    return shapes


def build(case: Case) -> Any:
    """The state on its devices, with its sharding along the first axis."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    random = np.random.default_rng(case.mib)
    sharding = on_axis(case, 0)
    state: dict[str, Any] = {}
    for number, shape in enumerate(sizes(case)):
        values = random.standard_normal(shape, np.float32) * np.float32(0.02 * (1 + number % 7))
        place = sharding if len(shape) > 1 or case.devices == 1 else on_axis(case, None)
        state[f"layer{number // 10:04d}/w{number:05d}"] = jax.device_put(values.astype(jnp.dtype(case.dtype)), place)
    return jax.block_until_ready(state)


def on_axis(case: Case, axis: int | None) -> Any:
    """The sharding that cuts an array along an axis; None: each device has all of it."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

    if case.devices == 1:
        return SingleDeviceSharding(jax.devices()[0])
    mesh = jax.make_mesh((case.devices,), ("x",))
    return NamedSharding(mesh, PartitionSpec(*() if axis is None else [None] * axis + ["x"]))


def step_function(case: Case, sweeps: int = 4) -> Callable[[Any], Any]:
    """A jitted step that donates the state, changes all of it a little, and takes a while.

    Of thousands of arrays each is changed by a program for one: XLA needs minutes to compile one program for all of them.
    """
    import jax
    import jax.numpy as jnp

    def one(x: Any) -> Any:
        # The work is thrown at a copy: iterated itself, x would soon be a constant.
        return x + (1e-3 * jax.lax.fori_loop(0, sweeps, lambda _, y: jnp.sin(y) * 1.0001 + 1e-3, x)).astype(x.dtype)

    if case.arrays > MOST_IN_ONE_PROGRAM:
        each = jax.jit(one, donate_argnums=0)
        return lambda tree: jax.tree.map(each, tree)
    return jax.jit(lambda tree: jax.tree.map(one, tree), donate_argnums=0)
