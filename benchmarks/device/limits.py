"""What the machine itself can do: copies off and onto the device, and into shared memory, in GB/s."""

from __future__ import annotations

import ctypes
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.device.slots import slots_of
from benchmarks.side.figures import OFF, Teller
from benchmarks.side.limits import timed
from raystate.machine import checksum
from raystate.machine.threads import in_threads

TIMES = 5
D2H = 2  # cudaMemcpyDeviceToHost
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
        if device.platform == "gpu":
            _registered(teller, tell, array, data)


def _registered(teller: Teller, tell: Callable[[str, Callable[[], float]], None], array: Any, data: np.ndarray) -> None:
    """The slot as pinned memory, which the device copies into: no pool of XLA's and no second copy."""
    cuda = cuda_runtime()
    if cuda is None:
        teller.note("no CUDA runtime found: the registered slot is left out")
        return
    address, size = ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(data.nbytes)
    begin_s = time.perf_counter()
    if status := cuda.cudaHostRegister(address, size, ctypes.c_uint(0)):
        teller.note(f"cudaHostRegister of the slot fails with {status}")
        return
    took_s = time.perf_counter() - begin_s
    try:
        source = ctypes.c_void_p(array.unsafe_buffer_pointer())

        def go() -> None:
            status = cuda.cudaMemcpy(address, source, size, ctypes.c_int(D2H))
            assert status == 0, f"cudaMemcpy fails with {status}"

        tell("device -> slot that is registered as pinned", lambda: timed(go))
        teller.add("registering that slot", took_s, "s", of=f"{data.nbytes >> 20} MiB")
        assert data.tobytes() == np.asarray(array).tobytes(), "the registered slot holds what the device has"
    finally:
        cuda.cudaHostUnregister(address)


def cuda_runtime() -> Any:
    """CUDA's runtime library: the one that JAX has loaded, or from where the loader or a wheel has it. None if there is none."""
    loaded = re.findall(r"/\S*/libcudart[^/\s]*\.so[^/\s]*", Path("/proc/self/maps").read_text())
    wheels = [str(path) for place in sys.path for path in sorted(Path(place).glob("nvidia/*/lib/libcudart.so.*"))]
    for name in (*loaded, *wheels, "libcudart.so.13", "libcudart.so.12", "libcudart.so", "/usr/local/cuda/lib64/libcudart.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _parts(nbytes: int) -> list[slice]:
    size = 16 << 20
    return [slice(start, min(nbytes, start + size)) for start in range(0, nbytes, size)]


def _timed_with(make: Callable[[], Any], use: Callable[[Any], Any]) -> float:
    import jax

    made = jax.block_until_ready(make())
    return timed(lambda: use(made))
