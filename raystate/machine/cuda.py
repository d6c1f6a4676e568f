"""A few functions of NVIDIA's driver, by ctypes: host memory that its copies reach, and copies beside the training.

It knows nothing of raystate, and uses the primary context that JAX uses, too. A driver call is made
by no forked child and by no process that exits: there the driver may be gone already. The kernel gives
back what such a process has registered.

A copy reaches registered memory at the link's speed and returns at once. One that crosses the border
of two registrations fails, and one to other memory is slow. So copies are cut at these borders, and
what lies between goes through a ring of registered buffers.
"""

from __future__ import annotations

import atexit
import bisect
import contextlib
import ctypes
import functools
import itertools
import mmap
import os
import queue
import threading
from collections import deque
from collections.abc import Generator, Iterator
from ctypes import POINTER, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import NamedTuple

import numpy as np

from raystate.machine.checksum import Bytes
from raystate.machine.own_time import own_time
from raystate.machine.threads import in_threads
from raystate.waits import ANSWER_S, SOON_S

PIECE_BYTES = 256 << 20  # registered at once: the driver holds up other calls meanwhile, 25 ms for so much
LEAST_PIECE_BYTES = 32 << 20  # where larger ones fail
COPY_BYTES = 64 << 20  # of one copy: what the training copies itself waits no longer than it takes
RING = 8  # buffers of COPY_BYTES
_PART_BYTES = 16 << 20  # of a copy between host memories, for one thread

_library = "libcuda.so.1"  # tests put a stand-in here

_PORTABLE = 1  # registered for every context; no address on the device, which would take memory there
_NON_BLOCKING = 1  # the stream waits for no other
_BLOCKING_SYNC = 1 | 2  # who waits for the event sleeps; it takes no times
_FUNCTIONS: dict[str, tuple[type, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, c_void_p),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
}


class DriverError(Exception):
    """A call of the driver failed, or may not be made any more."""


class Driver:
    """The driver in this process, and which host memory its copies reach. Thread-safe.

    Raises:
        DriverError: there is no such library, or it lacks a function, or it does not begin.
    """

    def __init__(self, library: str):
        self._left = ""  # why nothing is called any more
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._ring: Ring | None = None
        self._context: c_void_p | None = None
        self._begins: list[int] = []  # of registrations, in order
        self._ends: list[int] = []
        try:
            loaded = ctypes.CDLL(library)
            for name, arguments in _FUNCTIONS.items():
                getattr(loaded, name).argtypes = arguments
        except (OSError, AttributeError) as error:
            raise DriverError(str(error)) from None
        self._loaded = loaded
        self.call("cuInit", 0)
        os.register_at_fork(after_in_child=functools.partial(self.leave, "this process was forked"))
        atexit.register(self.leave, "this process exits")

    def leave(self, why: str) -> None:
        """No call is made from now on."""
        self._left = why

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the driver. Raises DriverError."""
        if self._left:
            raise DriverError(f"{name}: {self._left}")
        if status := getattr(self._loaded, name)(*arguments):
            raise DriverError(f"{name} gave {status}")

    def retain(self, ordinal: int) -> c_void_p:
        """A device's context. The first is the one in which memory is registered, for all."""
        device, context = c_int(), c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), ordinal)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._context = self._context or context
        return context

    @contextlib.contextmanager
    def current(self, context: c_void_p | None = None) -> Generator[None, None, None]:
        """The calling thread, which may be the user's, turns to this context meanwhile; None: to the first. Most calls need one."""
        self.call("cuCtxPushCurrent_v2", context or self._context)
        try:
            yield
        finally:
            with contextlib.suppress(DriverError):
                self.call("cuCtxPopCurrent_v2", ctypes.byref(c_void_p()))

    def register(self, address: int, nbytes: int) -> None:
        """Whole pages that are not registered in this process yet."""
        with self.current():
            self.call("cuMemHostRegister_v2", address, nbytes, _PORTABLE)
        with self._lock:
            at = bisect.bisect(self._begins, address)
            self._begins.insert(at, address)
            self._ends.insert(at, address + nbytes)

    def unregister(self, address: int) -> None:
        """What was registered from this address on. No copy may be on its way there."""
        with self._lock:
            at = self._begins.index(address)
            del self._begins[at], self._ends[at]
        with contextlib.suppress(DriverError), self.current():  # the kernel does it at the process's end
            self.call("cuMemHostUnregister", address)

    def ring(self) -> Ring:
        """Buffers for all devices, made when they are first needed."""
        with self._making:
            if self._ring is None:
                self._ring = Ring(self)
            return self._ring

    def cut(self, address: int, nbytes: int) -> Iterator[tuple[int, int, bool]]:
        """(begin, end, whether it is registered) of the parts of a copy, in bytes from `address`."""
        with self._lock:
            first = max(0, bisect.bisect(self._begins, address) - 1)
            last = bisect.bisect_left(self._begins, address + nbytes)
            known = list(zip(self._begins[first:last], self._ends[first:last], strict=True))
        borders = {edge - address for one in known for edge in one}
        edges = [0, *sorted(edge for edge in borders if 0 < edge < nbytes), nbytes]
        for begin, end in itertools.pairwise(edges):
            inside = any(one <= address + begin < other for one, other in known)
            for at in range(begin, end, COPY_BYTES):
                yield at, min(at + COPY_BYTES, end), inside


@functools.lru_cache(maxsize=1)
def _load(library: str) -> Driver | DriverError:
    try:
        return Driver(library)
    except DriverError as error:
        return error


def driver() -> Driver:
    """This process's. Raises DriverError: it has none."""
    found = _load(_library)
    if isinstance(found, DriverError):
        raise found
    return found


class Registration:
    """A stretch of memory that is being registered, piece by piece.

    Args:
        address, nbytes: whole pages. They stay mapped until `close` is back.
    """

    def __init__(self, driver: Driver, address: int, nbytes: int):
        self._driver = driver
        self._next, self._end = address, address + nbytes
        self._size = PIECE_BYTES
        self._pieces: list[int] = []
        self._lock = threading.Lock()

    @property
    def left_bytes(self) -> int:
        """So many are not registered yet."""
        return self._end - self._next

    def go_on(self) -> bool:
        """Register the next piece; False: there is none. Raises DriverError: not even a small one can be registered."""
        with self._lock:
            while self._next < self._end:
                size = min(self._size, self._end - self._next)
                try:
                    self._driver.register(self._next, size)
                except DriverError:
                    if size <= LEAST_PIECE_BYTES:
                        raise
                    self._size = max(LEAST_PIECE_BYTES, self._size // 2)
                    continue
                self._pieces.append(self._next)
                self._next += size
                return True
            return False

    def close(self) -> None:
        """Register no more, and take back what was registered. No copy may be on its way there."""
        with self._lock:
            self._end = self._next
            while self._pieces:
                self._driver.unregister(self._pieces.pop())


class Ring:
    """Registered buffers, for copies to and from memory that isn't. Raises DriverError: they can't be registered.

    Attributes:
        lost: streams that can't tell when their buffers are free.
    """

    def __init__(self, driver: Driver):
        self.lost = set[Stream]()
        body = np.frombuffer(mmap.mmap(-1, RING * COPY_BYTES), np.uint8)
        self._free: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
        for at in range(0, body.size, COPY_BYTES):
            buffer = body[at : at + COPY_BYTES]
            buffer[:: mmap.PAGESIZE] = 0  # the driver takes ten times as long to make the pages
            try:
                driver.register(buffer.ctypes.data, COPY_BYTES)
            except DriverError:
                while (made := self.take()) is not None:
                    driver.unregister(made.ctypes.data)
                raise
            self._free.put(buffer)

    def take(self) -> Bytes | None:
        """A buffer that is free now; None: there is none."""
        try:
            return self._free.get_nowait()
        except queue.Empty:
            return None

    def wait(self) -> Bytes:
        """One that another stream gives back. Raises DriverError: none does."""
        deadline_s = own_time() + ANSWER_S
        while not self.lost and own_time() < deadline_s:
            with contextlib.suppress(queue.Empty):
                return self._free.get(timeout=SOON_S)
        raise DriverError("no buffer is given back")

    def give(self, buffer: Bytes) -> None:
        """It is free again."""
        self._free.put(buffer)


class _UnderWay(NamedTuple):
    """A copy by way of a buffer."""

    event: c_void_p  # its end
    buffer: Bytes
    target: Bytes | None  # where the buffer's bytes go then; None: they came from there


class Stream:
    """Copies to and from one device, in order, beside what JAX does there. For one thread at a time.

    After a DriverError, `settle` comes before anything that a copy reads or writes is used otherwise.

    Args:
        ordinal: of the device, as this process counts.
    """

    def __init__(self, driver: Driver, ordinal: int):
        self._driver = driver
        self._context, self._stream = driver.retain(ordinal), c_void_p()
        self._events: list[c_void_p] = []  # to be used again
        self._under_way: deque[_UnderWay] = deque()
        self._taken: list[Bytes] = []  # of the ring, in order
        with self.current():
            driver.call("cuStreamCreate", ctypes.byref(self._stream), _NON_BLOCKING)

    def current(self) -> contextlib.AbstractContextManager[None]:
        """The calling thread turns to this device meanwhile: `off`, `onto`, `mark` and `wait` need it."""
        return self._driver.current(self._context)

    def free_bytes(self) -> int:
        """Of the device's memory, also outside of JAX's pool."""
        free, total = c_size_t(), c_size_t()
        with self.current():
            self._driver.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def off(self, source: int, target: Bytes) -> None:
        """Queue a copy from an address on the device; `target` has the bytes once a mark behind it was waited for."""
        for begin, end, registered in self._driver.cut(target.ctypes.data, target.size):
            part = target[begin:end]
            into = part if registered else self._take()
            self._driver.call("cuMemcpyDtoHAsync_v2", into.ctypes.data, source + begin, part.size, self._stream)
            if not registered:
                self._under_way.append(_UnderWay(self.mark(), into, part))

    def onto(self, source: Bytes, target: int) -> None:
        """Queue a copy to an address on the device; `source` stays as it is until a mark behind it was waited for."""
        for begin, end, registered in self._driver.cut(source.ctypes.data, source.size):
            part = source[begin:end]
            out = part if registered else self._take()
            if not registered:
                _copy(out[: part.size], part)
            self._driver.call("cuMemcpyHtoDAsync_v2", target + begin, out.ctypes.data, part.size, self._stream)
            if not registered:
                self._under_way.append(_UnderWay(self.mark(), out, None))

    def mark(self) -> c_void_p:
        """This place in the stream, to be waited for once."""
        event = self._events.pop() if self._events else c_void_p()
        if not event:
            self._driver.call("cuEventCreate", ctypes.byref(event), _BLOCKING_SYNC)
        self._driver.call("cuEventRecord", event, self._stream)
        return event

    def wait(self, event: c_void_p) -> None:
        """Until what was queued before the mark is done. Other threads of Python go on."""
        self._wait(event)
        while self._under_way:
            self._land()

    def settle(self) -> None:
        """After a fault: no copy is on its way any more. Raises DriverError: that can't be known."""
        if self._taken:  # the others wait for these
            self._driver.ring().lost.add(self)
        with self.current():
            self._driver.call("cuStreamSynchronize", self._stream)
        if self._taken:
            self._driver.ring().lost.discard(self)
        self._under_way.clear()
        while self._taken:
            self._driver.ring().give(self._taken.pop())

    def _take(self) -> Bytes:
        """A buffer that is free now, or when the oldest copy of this stream has landed."""
        ring = self._driver.ring()
        while (buffer := ring.take()) is None and self._under_way:
            self._land()
        buffer = ring.wait() if buffer is None else buffer
        self._taken.append(buffer)
        return buffer

    def _land(self) -> None:
        event, buffer, target = self._under_way[0]
        self._wait(event)
        if target is not None:
            _copy(target, buffer[: target.size])
        self._under_way.popleft()
        self._taken.pop(0)
        self._driver.ring().give(buffer)

    def _wait(self, event: c_void_p) -> None:
        self._driver.call("cuEventSynchronize", event)
        self._events.append(event)


def _copy(to: Bytes, source: Bytes) -> None:
    parts = range(0, to.size, _PART_BYTES)
    in_threads(lambda at: np.copyto(to[at : at + _PART_BYTES], source[at : at + _PART_BYTES]), parts, to.size)
