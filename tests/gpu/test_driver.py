"""The driver by ctypes: registrations, copies cut at their borders, the ring, faults, and where no call is made."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator

import numpy as np
import pytest

from raystate.machine import cuda
from raystate.machine.checksum import Bytes
from tests.gpu.conftest import COPY_BYTES, OFF, ONTO, PIECE_BYTES, REGISTER, SYNC, UNREGISTER, StandIn

SIZE = 3 * PIECE_BYTES + 4096


@pytest.fixture
def stream(standin: StandIn) -> Iterator[cuda.Stream]:
    """Of a device that the test's thread turns to."""
    made = cuda.Stream(cuda.driver(), 0)
    with made.current():
        yield made


def memory(nbytes: int = SIZE) -> Bytes:
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def device_memory(nbytes: int = SIZE) -> Bytes:
    return np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)


def register(array: Bytes, pieces: int = 100) -> cuda.Registration:
    registration = cuda.Registration(cuda.driver(), array.ctypes.data, array.size)
    for _ in range(pieces):
        if not registration.go_on():
            break
    return registration


def test_memory_is_registered_in_pieces_and_taken_back(standin: StandIn, stream: cuda.Stream):
    array = memory()
    registration = register(array)
    assert standin.calls(REGISTER) == 4 and standin.registered_bytes == SIZE and registration.left_bytes == 0
    registration.close()
    assert standin.registered_bytes == 0 and standin.calls(UNREGISTER) == 4
    again = register(array)
    assert standin.registered_bytes == SIZE
    again.close()


@pytest.mark.parametrize("registered", [0, 1, 2, 4])
def test_copies_are_cut_at_the_borders_and_the_rest_goes_through_the_ring(standin: StandIn, stream: cuda.Stream, registered: int):
    """No copy crosses a border (that fails) or reaches memory that isn't registered (that is slow, and waits)."""
    for begin, end in ((0, SIZE), (5, SIZE - 7), (COPY_BYTES - 1, COPY_BYTES + 1), (SIZE - 1, SIZE)):
        host, device = memory(), device_memory()
        registration = register(host, registered)
        stream.off(device.ctypes.data + begin, host[begin:end])
        stream.wait(stream.mark())
        assert np.array_equal(host[begin:end], device[begin:end]) and not host[:begin].any() and not host[end:].any()
        target = np.zeros(SIZE, np.uint8)
        stream.onto(host[begin:end], target.ctypes.data + begin)
        stream.wait(stream.mark())
        assert np.array_equal(target[begin:end], device[begin:end])
        registration.close()
    assert standin.unregistered_copies == 0


def test_the_ring_serves_more_than_it_holds_and_several_devices(standin: StandIn):
    size = 3 * cuda.RING * COPY_BYTES + 17
    streams = [cuda.Stream(cuda.driver(), ordinal) for ordinal in range(3)]
    hosts, device = [np.zeros(size, np.uint8) for _ in streams], device_memory(size)

    def copy(stream: cuda.Stream, host: Bytes) -> None:
        with stream.current():
            stream.off(device.ctypes.data, host)
            stream.wait(stream.mark())

    threads = [threading.Thread(target=copy, args=pair) for pair in zip(streams, hosts, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(np.array_equal(host, device) for host in hosts)
    assert standin.unregistered_copies == 0 and standin.registered_bytes == cuda.RING * COPY_BYTES


def test_a_copy_is_queued_and_comes_late(standin: StandIn, stream: cuda.Stream):
    host, device = memory(), device_memory()
    registration = register(host)
    standin.hold(True)
    stream.off(device.ctypes.data, host)
    mark = stream.mark()
    assert not host.any()
    standin.hold(False)
    stream.wait(mark)
    assert np.array_equal(host, device)
    registration.close()


def test_large_registrations_that_fail_are_tried_in_smaller_ones(standin: StandIn, stream: cuda.Stream):
    standin.fail(REGISTER, after=1, times=2)
    array = memory()
    registration = register(array)
    assert standin.registered_bytes == SIZE
    registration.close()
    assert standin.registered_bytes == 0


def test_a_registration_that_is_refused_leaves_what_there_was(standin: StandIn, stream: cuda.Stream):
    array, device = memory(), device_memory()
    standin.let_register(PIECE_BYTES + PIECE_BYTES // 2)
    registration = cuda.Registration(cuda.driver(), array.ctypes.data, array.size)
    with pytest.raises(cuda.DriverError, match="cuMemHostRegister_v2 gave 2"):
        deque(iter(registration.go_on, False))
    assert 0 < standin.registered_bytes < SIZE and registration.left_bytes == SIZE - standin.registered_bytes
    standin.let_register(1 << 40)
    stream.off(device.ctypes.data, array)
    stream.wait(stream.mark())
    assert np.array_equal(array, device) and standin.unregistered_copies == 0
    registration.close()


@pytest.mark.parametrize("kind", [OFF, ONTO])
@pytest.mark.parametrize("registered", [0, 100])
def test_after_a_fault_a_stream_settles_and_its_buffers_are_free(standin: StandIn, stream: cuda.Stream, kind: int, registered: int):
    host, device = memory(), device_memory()
    registration = register(host, registered)
    for after in range(4):
        standin.fail(kind, after=after)
        with pytest.raises(cuda.DriverError, match="gave 999"):
            _both_ways(stream, host, device)
        standin.fail(SYNC)
        with pytest.raises(cuda.DriverError):
            stream.settle()
        stream.settle()
    ring = cuda.driver().ring()
    assert [ring.take() is not None for _ in range(cuda.RING + 1)] == [True] * cuda.RING + [False]
    registration.close()


def _both_ways(stream: cuda.Stream, host: Bytes, device: Bytes) -> None:
    stream.off(device.ctypes.data, host)
    stream.onto(host, device.ctypes.data)


def test_without_a_library_there_is_no_driver(monkeypatch: pytest.MonkeyPatch, standin: StandIn):
    for path in ("libcuda-that-is-not-there.so", "libm.so.6"):
        monkeypatch.setattr(cuda, "_library", path)
        with pytest.raises(cuda.DriverError):
            cuda.driver()


def test_a_driver_that_does_not_begin_is_asked_once(standin: StandIn):
    standin.fail()
    for _ in range(2):
        with pytest.raises(cuda.DriverError, match="cuInit gave 999"):
            cuda.driver()
    assert standin.all_calls == 1


def test_a_forked_child_makes_no_call(standin: StandIn, stream: cuda.Stream):
    registration = register(memory())
    before = standin.all_calls
    pid = os.fork()
    if pid == 0:
        try:
            registration.close()
            refused = 0
            for call in (lambda: register(memory()), lambda: cuda.Stream(cuda.driver(), 0)):
                try:
                    call()
                except cuda.DriverError:
                    refused += 1
            os._exit(0 if refused == 2 and standin.all_calls == before else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    registration.close()
    assert standin.registered_bytes == 0


_EXITS = """
import atexit, ctypes, mmap, sys
import numpy as np
from raystate.machine import cuda
library = ctypes.CDLL(sys.argv[1])
library.fake_reset.argtypes = [ctypes.c_double]
library.fake_reset(0)
count = lambda: sum(library.fake_calls(kind) for kind in range(9))
made = []
def late():  # behind the driver's own, which was registered later
    before = count()
    made[0].close()
    print(count() - before, flush=True)
atexit.register(late)
cuda._library = sys.argv[1]
array = np.frombuffer(mmap.mmap(-1, 8192), np.uint8)
stream = cuda.Stream(cuda.driver(), 0)
made.append(cuda.Registration(cuda.driver(), array.ctypes.data, array.size))
assert made[0].go_on()
"""


def test_a_process_that_exits_makes_no_call(standin: StandIn):
    done = subprocess.run([sys.executable, "-c", _EXITS, standin.path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0\n"


def test_threads_without_a_context_register_and_take_back_and_get_none_for_it(standin: StandIn):
    """Slots go on whichever thread leaves; what the user's own code does there must not change."""
    stream, array = cuda.Stream(cuda.driver(), 0), memory()
    assert standin.contexts == 0
    registration = register(array)
    assert standin.registered_bytes == SIZE and standin.contexts == 0
    registration.close()
    assert standin.registered_bytes == 0
    assert stream.free_bytes() and standin.contexts == 0
    stream.settle()
    standin.fail(REGISTER)
    with pytest.raises(cuda.DriverError):
        cuda.driver().register(array.ctypes.data, SIZE // 4096 * 4096)
    assert standin.contexts == 0
    with pytest.raises(cuda.DriverError, match="cuMemcpyDtoHAsync_v2 gave 201"):
        stream.off(array.ctypes.data, memory(8))
