"""What the machine itself can do: copies off and onto the device, and into shared memory, in GB/s."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.device.slots import slots_of
from benchmarks.side.figures import OFF, Teller
from benchmarks.side.limits import timed
from raystate.machine import checksum
from raystate.machine.threads import in_threads

TIMES = 5
ONTO = "pinned memory -> device"


def limits(teller: Teller, mib: int) -> None:
    """Each of a memory of so many MiB, the median of a few."""
    import jax
    import jax.numpy as jnp

    def tell(name: str, seconds: Callable[[], float]) -> None:
        teller.add(name, nbytes / statistics.median(seconds() for _ in range(TIMES)) / 1e9, "GB/s", of=f"{mib} MiB")

    array = jax.block_until_ready(jax.random.normal(jax.random.key(0), (mib, 2**18), jnp.float32))
    nbytes = array.nbytes
    device = next(iter(array.sharding.device_set))
    if any(memory.kind == "pinned_host" for memory in device.addressable_memories()):
        pinned = array.sharding.with_memory_kind("pinned_host")
        there = jax.block_until_ready(jax.device_put(array, pinned))
        tell(OFF, lambda: timed(lambda: jax.block_until_ready(jax.device_put(array, pinned, may_alias=False))))
        tell(ONTO, lambda: timed(lambda: jax.block_until_ready(jax.device_put(there, array.sharding, may_alias=False))))
        # What `raystate.arrays.copy` does with it next: a view takes no time, a copy does. An array keeps it, so each time another one.
        tell("pinned memory -> numpy", lambda: _timed_with(lambda: jax.device_put(array, pinned, may_alias=False), np.asarray))
        del there
    source = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    with slots_of(1, nbytes) as (slot,):
        slot.begin()
        data = slot.data_mut[:nbytes]
        tell("memory -> /dev/shm, one thread", lambda: timed(lambda: checksum.copy(data, source)))
        parts = _parts(nbytes)
        tell(
            f"memory -> /dev/shm, {len(os.sched_getaffinity(0)) // 2 or 1} threads",
            lambda: timed(lambda: in_threads(lambda part: checksum.copy(data[part], source[part]), parts, nbytes)),
        )
        tell("crc32c, one thread", lambda: timed(lambda: checksum.crc32c(source)))


def _parts(nbytes: int) -> list[slice]:
    size = 16 << 20
    return [slice(start, min(nbytes, start + size)) for start in range(0, nbytes, size)]


def _timed_with(make: Callable[[], Any], use: Callable[[Any], Any]) -> float:
    import jax

    made = jax.block_until_ready(make())
    return timed(lambda: use(made))
