"""First of all: are snapshots of this device equal to the last bit, whatever the training does meanwhile?"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.device.figures import Figures
from benchmarks.device.slots import Snapshots, slots_of
from benchmarks.device.work import Case, Work

DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "float16", "int8", "uint32")


def correct(figures: Figures, *, mib: int, steps: int) -> None:
    """A snapshot of each of so many steps, each of which donates the state; and one of each kind of dtype, beside other work."""
    begin_s = time.perf_counter()
    figures.add("snapshots equal bit for bit under donation", under_donation(mib, steps), f"of {steps}")
    figures.add("dtypes equal bit for bit beside other work", each_dtype(), f"of {len(DTYPES)}")
    figures.add("seconds to look", time.perf_counter() - begin_s, "s")


def under_donation(mib: int, steps: int) -> int:
    """How many snapshots are equal to what a second, undisturbed training of the same steps has."""
    import jax

    case = Case(mib=mib, arrays=16, dtype="float32")
    saved, calm = Work(case, 0.0), Work(case, 0.0)
    equal = 0
    with slots_of(2, saved.nbytes + (1 << 20)) as slots:
        snapshots = Snapshots(saved.state, slots)
        for _ in range(steps):
            saved()
            calm()
            copied = snapshots.take(saved.state)
            reference = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), saved.state)
            saved()  # donates what is being saved
            expected = host(calm.state)
            calm()
            copied.wait()
            equal += same(host(snapshots.restore(copied, reference)), expected)
    if equal != steps:
        raise AssertionError(f"only {equal} of {steps} snapshots are what was saved")
    return equal


def each_dtype() -> int:
    """Arrays of many dtypes, held while two other programs run and donate on the same device."""
    import jax
    import jax.numpy as jnp

    equal = 0
    for dtype in DTYPES:
        given = {"a": jax.random.randint(jax.random.key(0), (256, 384), 0, 100).astype(dtype), "step": jnp.int32(1)}
        expected = host(given)
        other = jnp.ones((512, 512))
        with slots_of(1, 1 << 20) as slots:
            snapshots = Snapshots(given, slots)
            busy = [jnp.sin(other) @ other for _ in range(4)]
            copied = snapshots.take(given)
            reference = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), given)
            changed = jax.jit(lambda tree: jax.tree.map(lambda x: x + x, tree), donate_argnums=0)(given)
            copied.wait()
            jax.block_until_ready((busy, changed))
            equal += same(host(snapshots.restore(copied, reference)), expected)
    if equal != len(DTYPES):
        raise AssertionError(f"only {equal} of {len(DTYPES)} dtypes are what was saved")
    return equal


def host(tree: Any) -> list[bytes]:
    """A copy of every leaf's bytes."""
    import jax

    return [np.array(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def same(one: list[bytes], other: list[bytes]) -> bool:
    return one == other
