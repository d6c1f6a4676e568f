"""First of all: are snapshots of this device equal to the last bit, whatever the training does meanwhile?"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.device.slots import Snapshots, slots_of
from benchmarks.side.figures import Teller
from benchmarks.side.states import Case, Work

DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "float16", "int8", "uint32")


def correct(tell: Teller, *, mib: int, steps: int) -> None:
    """A snapshot of each of so many steps, each of which donates the state; and one of each kind of dtype, beside other work."""
    tell.add("dtypes equal bit for bit beside other work", each_dtype(), f"of {len(DTYPES)}")
    tell.add("snapshots equal bit for bit under donation", under_donation(mib, steps), f"of {steps}")


def under_donation(mib: int, steps: int) -> int:
    """How many snapshots are equal to the bits that the device itself had kept of their step."""
    import jax
    import jax.numpy as jnp
    from jax.lax import bitcast_convert_type

    @jax.jit
    def bits(tree: Any) -> list[Any]:
        return [bitcast_convert_type(leaf, jnp.uint8) for leaf in jax.tree.leaves(tree)]

    @jax.jit
    def equal(kept: list[Any], tree: Any) -> Any:
        return jnp.all(jnp.array([jnp.all(a == b) for a, b in zip(kept, bits(tree), strict=True)]))

    work = Work(Case(mib=mib))
    reference = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), work.state)
    found = 0
    with slots_of(2, work.nbytes + (1 << 20)) as slots:
        snapshots = Snapshots(work.state, slots)
        for step in range(steps):
            work()
            kept = bits(work.state)
            snapshots.save(step, work.state)
            work()  # donates what is being saved
            snapshots.wait()
            found += bool(equal(kept, snapshots.restore(step, reference)))
        assert not equal(kept, work.state), "a state of another step counts as equal"
    if found != steps:
        raise AssertionError(f"only {found} of {steps} snapshots are what was saved")
    return found


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
            snapshots.save(0, given)
            reference = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), given)
            changed = jax.jit(lambda tree: jax.tree.map(lambda x: x + x, tree), donate_argnums=0)(given)
            snapshots.wait()
            jax.block_until_ready((busy, changed))
            equal += host(snapshots.restore(0, reference)) == expected
    if equal != len(DTYPES):
        raise AssertionError(f"only {equal} of {len(DTYPES)} dtypes are what was saved")
    return equal


def host(tree: Any) -> list[bytes]:
    """A copy of every leaf's bytes."""
    import jax

    return [np.array(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
