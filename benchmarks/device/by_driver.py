"""NVIDIA's driver on this device: slots that are registered piece by piece, and copies between them and the device."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.device.goals import held
from benchmarks.device.slots import slots_of
from benchmarks.side.figures import OFF, Teller
from benchmarks.side.limits import timed
from raystate.machine import cuda
from raystate.machine.checksum import Bytes
from raystate.machine.cuda import Driver, DriverError, Registration, Stream, driver

TIMES = 3
ARRAYS = (1, 16, 500)
COPY_MIB = (16, 64, 256)  # of one copy
PIECE_MIB = (0, 1024, 256, 64)  # of one registration; 0: all at once
PAUSE = 4  # times as long as the registration before took, as a trainer pauses


def by_driver(tell: Teller, *, slot_mib: int, mib: int) -> None:
    """Register a slot of `slot_mib`, then copy `mib` off the device and back."""
    import jax

    try:
        found = driver()
        stream = Stream(found, jax.local_devices()[0].local_hardware_id)
        registration(tell, found, stream, slot_mib)
        copies(tell, found, stream, mib)
    except DriverError as error:
        tell.note(f"what NVIDIA's driver can do is left out: {error}")


def registration(tell: Teller, found: Driver, stream: Stream, mib: int) -> None:
    """Seconds, and the longest launch of a small program meanwhile, in pieces of several sizes, and with pauses."""

    def add(name: str, value: float, unit: str) -> None:
        tell.add(name, value, unit, of=f"{mib} MiB", goals=held(name, value))

    with launches() as longest:
        time.sleep(0.5)
    add("longest launch of a small program, alone", 1e3 * max(longest), "ms")
    with slots_of(1, mib << 20) as (slot,):
        data = slot.pages
        free = stream.free_bytes()
        for piece_mib, pause in (*((one, 0) for one in PIECE_MIB), (256, PAUSE)):
            size = (piece_mib << 20) or data.size
            if size > data.size:
                continue
            how = "at once" if size == data.size else f"in pieces of {piece_mib} MiB{', with pauses' if pause else ''}"
            try:
                with launches() as longest:
                    took_s = registered(found, data, size, pause)
            except DriverError as error:
                tell.note(f"registering {mib} MiB {how}: {error}")
                continue
            add(f"registering a slot {how}", took_s, "s")
            add(f"longest launch of a small program, registering {how}", 1e3 * max(longest), "ms")
        add("device memory that registering took", (free - stream.free_bytes()) / 2**20, "MiB")


def registered(found: Driver, data: Bytes, size: int, pause: float) -> float:
    """Seconds to register all of it in pieces, without the pauses. It is taken back."""
    begins: list[int] = []
    took_s = 0.0
    try:
        for at in range(0, data.size, size):
            address, nbytes = data.ctypes.data + at, min(size, data.size - at)
            took_s += (piece_s := timed(lambda address=address, nbytes=nbytes: found.register(address, nbytes)))
            begins.append(address)
            time.sleep(pause * piece_s)
    finally:
        for address in begins:
            found.unregister(address)
    return took_s


@contextmanager
def launches() -> Iterator[list[float]]:
    """Meanwhile a thread launches a small program again and again; the list gets the seconds of each."""
    import jax

    small = jax.jit(lambda x: x + 1)
    value = small(jax.numpy.zeros(8)).block_until_ready()
    over, took = threading.Event(), list[float]()

    def go() -> None:
        while not over.is_set():
            took.append(timed(lambda: small(value).block_until_ready()))

    thread = threading.Thread(target=go)
    thread.start()
    try:
        yield took
    finally:
        over.set()
        thread.join()
        took.append(0.0)  # it may have had no turn


def copies(tell: Teller, found: Driver, stream: Stream, mib: int) -> None:
    """GB/s of copies off the device into a registered slot, and back; these arrays are in no other hands."""
    usual = cuda.COPY_BYTES
    with slots_of(1, mib << 20) as (slot,):
        data = slot.pages[: mib << 20]
        registration = Registration(found, slot.pages.ctypes.data, slot.pages.size)
        try:
            while registration.go_on():
                pass
            for count in ARRAYS:
                arrays = made(count, data.size)
                sizes = COPY_MIB if count == ARRAYS[0] else (usual >> 20,)
                for copy_mib in sizes:
                    cuda.COPY_BYTES = copy_mib << 20
                    of = f"{mib} MiB in {count} arrays, copies of {copy_mib} MiB"
                    _told(
                        tell,
                        f"{OFF.partition(' ->')[0]} -> slot, by the driver",
                        lambda arrays=arrays: off(stream, arrays, data),
                        arrays,
                        of,
                    )
                cuda.COPY_BYTES = usual
                assert data[: arrays[0].nbytes].tobytes() == np.asarray(arrays[0]).tobytes(), "the slot holds what the device has"
                of = f"{mib} MiB in {count} arrays, copies of {usual >> 20} MiB"
                _told(tell, "slot -> device, by the driver", lambda arrays=arrays: onto(stream, arrays, data), arrays, of)
            with launches() as longest:
                off(stream, arrays, data)
            tell.add("longest launch of a small program beside such a copy", 1e3 * max(longest), "ms", of=of)
        finally:
            cuda.COPY_BYTES = usual
            registration.close()


def made(count: int, nbytes: int) -> list[Any]:
    """Arrays of as many bytes in all."""
    import jax

    drawn = jax.jit(lambda key: jax.random.bits(key, (nbytes // count // 4,), "uint32"))
    return jax.block_until_ready([drawn(key) for key in jax.random.split(jax.random.key(0), count)])


def off(stream: Stream, arrays: list[Any], data: Bytes) -> None:
    at = 0
    with stream.current():
        for array in arrays:
            stream.off(array.unsafe_buffer_pointer(), data[at : at + array.nbytes])
            at += array.nbytes
        stream.wait(stream.mark())


def onto(stream: Stream, arrays: list[Any], data: Bytes) -> None:
    at = 0
    with stream.current():
        for array in arrays:
            stream.onto(data[at : at + array.nbytes], array.unsafe_buffer_pointer())
            at += array.nbytes
        stream.wait(stream.mark())


def _told(tell: Teller, name: str, go: Any, arrays: list[Any], of: str) -> None:
    nbytes = sum(array.nbytes for array in arrays)
    tell.add(name, nbytes / statistics.median(timed(go) for _ in range(TIMES)) / 1e9, "GB/s", of=of)
