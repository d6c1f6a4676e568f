"""The GPUs of this process: how much room they have, and copies off them by the driver, straight into slots.

What fails is not tried again in this process: it goes the next slower way, and says so once.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_void_p
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from raystate.arrays.device_copies import Copied, Place
from raystate.arrays.stage import copy_cores, native
from raystate.core.formats.errors import RaystateError
from raystate.machine import checksum, cuda
from raystate.machine.checksum import Bytes
from raystate.machine.cuda import DriverError, Stream, driver
from raystate.machine.threads import in_threads

W = TypeVar("W")

logger = logging.getLogger("raystate")

Filling = tuple[jax.Array, int, np.ndarray]  # (an array, the byte in it to begin at, what to write there)

SPARE_BYTES = 512 << 20  # of the device's memory that copies leave alone, beside the most that the training has needed
SPARE_SHARE = 0.02


class Pauses(NamedTuple):
    """Of copies that are spread over some time."""

    spread_s: float
    hurries: threading.Event  # no pauses any more

    def until(self, share: float, began_s: float) -> None:
        """Wait until so much of the time is over."""
        self.hurries.wait(max(0.0, began_s + share * self.spread_s - time.monotonic()))


class Gpus:
    """The GPUs of this process, as all its trainers use them. Thread-safe.

    Attributes:
        lost: why they are not used so any more; "": they are.
        copying: held while copies are on their way.
    """

    def __init__(self) -> None:
        self.lost = ""
        self.copying = threading.RLock()
        self._streams: dict[Any, Stream] = {}
        self._lock = threading.Lock()
        self._said: set[str] = set()
        self._unsettled: list[tuple[Stream, list[Any]]] = []  # and what their copies may still read or write
        self._copies: weakref.WeakSet[Copied] = weakref.WeakSet()  # an interrupted save may let go of some without a word
        self._peak: dict[Any, int] = {}  # device -> the most bytes in use that was seen
        self._own_peak: dict[Any, int] = {}  # that of the training: without copies
        self._beside: dict[Any, int] = {}  # the most bytes of copies since that was looked at

    def say(self, what: str, *arguments: object) -> None:
        """Once in this process."""
        with self._lock:
            is_new = what not in self._said
            self._said.add(what)
        if is_new:
            logger.warning(what, *arguments)

    def lose(self, why: object) -> None:
        """A fault: from now on JAX copies."""
        self.lost = str(why)
        self.say(
            "snapshots no longer leave the GPU beside the training (%s): JAX copies them through memory of its own, up to two more states "
            "of this process in host memory, and the next step waits for the link",
            why,
        )

    def stream(self, device: Any) -> Stream:
        """That of a device. Raises DriverError."""
        with self._lock:
            if device not in self._streams:
                self._streams[device] = Stream(driver(), device.local_hardware_id)
            return self._streams[device]

    # ------------------------------------------------------------ room

    def has_room(self, needs: Mapping[Any, int]) -> bool:
        """Whether each device has it, by its own statistics: to try would hold up the training for seconds. Raises DriverError."""
        return all(self._room(device) >= nbytes for device, nbytes in needs.items())

    def _room(self, device: Any) -> int:
        stats = device.memory_stats()
        if not stats:  # JAX has no pool: the driver knows
            return self.stream(device).free_bytes() - SPARE_BYTES
        limit = stats.get("bytes_limit", 0)
        return limit - self._look(device, stats) - max(SPARE_BYTES, int(SPARE_SHARE * limit)) - self.held_bytes(device)

    def _look(self, device: Any, stats: Mapping[str, int]) -> int:
        """The most bytes that the training has had in use. What a step needs for itself is only in the device's peak, which can't be set
        back and has our copies in it. So it is looked at whenever their number is going to change: as far as it has grown since the last
        look, they were beside the training as they are now."""
        peak = stats.get("peak_bytes_in_use", 0)
        with self._lock:
            beside = max(self._beside.get(device, 0), self.held_bytes(device))
            if peak > self._peak.get(device, 0):
                self._peak[device] = peak
                self._own_peak[device] = max(peak - beside, self._own_peak.get(device, 0))
            self._beside[device] = self.held_bytes(device)
            return self._own_peak.get(device, 0)

    def add(self, copied: Copied) -> None:
        """These copies are on their device from now on, until they are dropped."""
        device = copied.group.device
        with self._lock:
            self._copies.add(copied)
            self._beside[device] = max(self.held_bytes(device), self._beside.get(device, 0))

    def drop(self, copied: Copied) -> None:
        """They have arrived, or are not wanted."""
        if copied.arrays and (stats := copied.group.device.memory_stats()):
            self._look(copied.group.device, stats)
        copied.arrays.clear()
        with self._lock:
            self._beside[copied.group.device] = self.held_bytes(copied.group.device)

    def held_bytes(self, device: Any) -> int:
        """Of copies that are on a device."""
        return sum(one.group.nbytes for one in list(self._copies) if one.arrays and one.group.device == device)

    # ------------------------------------------------------------ off the devices

    def bring(self, some: Sequence[Copied], data: Bytes, pauses: Pauses | None = None) -> dict[int, list[int]]:
        """Copies into a slot, and away; shard -> crc32c of its pieces, of what is in the slot then.

        Args:
            pauses: between pieces of what lies on one device; None: they are all queued at once.

        Raises:
            RaystateError: a copy may still be on its way there, and the driver can't say. Errors of the computation pass as they are.
        """
        by_device: dict[Any, list[Copied]] = {}
        for one in some:
            by_device.setdefault(one.group.device, []).append(one)
        with self.copying:
            self.settle()
            # In threads of our own, where it doesn't matter which device is the current one.
            with ThreadPoolExecutor(max(1, len(by_device)), thread_name_prefix="raystate-off") as pool:
                found = list(pool.map(self._bring, by_device, by_device.values(), itertools.repeat(data), itertools.repeat(pauses)))
        crcs: dict[int, list[int]] = {}
        for place, crc in itertools.chain.from_iterable(found):
            crcs.setdefault(place.shard, []).append(crc)
        return crcs

    def _bring(self, device: Any, some: list[Copied], data: Bytes, pauses: Pauses | None) -> list[tuple[Place, int]]:
        crcs: list[tuple[Place, int]] = []
        try:
            if not self.lost:  # else slots may lie where others were that are registered still
                self._bring_by(self.stream(device), some, data, crcs, pauses)
        except DriverError as error:
            self.lose(error)
        for one in some:  # what the driver didn't bring
            if one.arrays:
                found = _in_threads(lambda pair: _by_jax(*pair, data), list(zip(one.arrays, one.places, strict=True)), one)
                crcs += zip(one.places, found, strict=True)
                self.drop(one)
        return crcs

    def _bring_by(
        self, stream: Stream, some: list[Copied], data: Bytes, crcs: list[tuple[Place, int]], pauses: Pauses | None
    ) -> None:
        read = [array for one in some for array in one.arrays]
        try:
            with stream.current():
                queued = self._queue_slowly(stream, some, data, pauses) if pauses else self._queue(stream, some, data)
                for one, mark in zip(some, queued, strict=True):
                    stream.wait(mark)
                    found = _in_threads(lambda place: checksum.crc32c(_slot(place, data)), one.places, one)
                    self.drop(one)
                    crcs += zip(one.places, found, strict=True)
        except BaseException as error:
            if isinstance(error, DriverError):
                self.lose(error)
            self._settle(stream, read)
            if not isinstance(error, DriverError):
                raise

    def _queue(self, stream: Stream, some: Sequence[Copied], data: Bytes) -> list[c_void_p]:
        marks: list[c_void_p] = []
        for one in some:
            jax.block_until_ready(one.arrays)
            for array, place in zip(one.arrays, one.places, strict=True):
                stream.off(array.unsafe_buffer_pointer(), _slot(place, data))
            marks.append(stream.mark())
        return marks

    def _queue_slowly(self, stream: Stream, some: Sequence[Copied], data: Bytes, pauses: Pauses) -> Iterator[c_void_p]:
        """The mark of a group once all of it is queued; the next is begun when it has arrived."""
        jax.block_until_ready([one.arrays for one in some])
        began_s, done, total = time.monotonic(), 0, sum(one.group.nbytes for one in some)
        for one in some:
            for array, place in zip(one.arrays, one.places, strict=True):
                slot, address = _slot(place, data), array.unsafe_buffer_pointer()
                for begin in range(0, slot.size, cuda.COPY_BYTES):
                    piece = slot[begin : begin + cuda.COPY_BYTES]
                    pauses.until(done / total, began_s)
                    stream.off(address + begin, piece)
                    done += piece.size
            yield stream.mark()

    # ------------------------------------------------------------ onto the devices

    def fill(self, some: Sequence[Filling]) -> None:
        """Write into arrays on one device each, which only the caller has.

        Raises:
            DriverError: what the arrays hold now isn't known. RaystateError: see `bring`.
        """
        by_device: dict[Any, list[Filling]] = {}
        for one in some:
            (device,) = one[0].devices()
            by_device.setdefault(device, []).append(one)
        with self.copying:
            self.settle()
            with ThreadPoolExecutor(len(by_device), thread_name_prefix="raystate-onto") as pool:
                list(pool.map(self._fill, by_device, by_device.values()))

    def _fill(self, device: Any, some: list[Filling]) -> None:
        stream = self.stream(device)
        touched: list[Any] = [array for array, _, _ in some]
        jax.block_until_ready(touched)
        try:
            with stream.current():
                for array, at, box in some:
                    source = np.ascontiguousarray(box).reshape(-1).view(np.uint8)
                    touched.append(source)
                    stream.onto(source, array.unsafe_buffer_pointer() + at)
                stream.wait(stream.mark())
        except BaseException:
            self._settle(stream, touched)
            raise

    def _settle(self, stream: Stream, touched: list[Any]) -> None:
        """After a fault. Raises RaystateError: the driver can't say what is still under way."""
        try:
            stream.settle()
        except DriverError as unsettled:
            self._unsettled.append((stream, touched))
            self.lose(unsettled)
            raise _unknown(unsettled) from None

    def settle(self) -> None:
        """No copy of before is on its way any more. Until that is known, what it reads stays, and no slot is written to.

        Raises:
            RaystateError: the driver can't say.
        """
        while self._unsettled:
            try:
                self._unsettled[-1][0].settle()
            except DriverError as error:
                raise _unknown(error) from None
            self._unsettled.pop()

    @property
    def is_settled(self) -> bool:
        return not self._unsettled


GPUS = Gpus()


def _slot(place: Place, data: Bytes) -> Bytes:
    return data[place.offset : place.offset + place.nbytes]


def _in_threads(function: Callable[[W], int], work: Sequence[W], one: Copied) -> list[int]:
    return in_threads(function, work, one.group.nbytes, cores=copy_cores())


def _by_jax(array: jax.Array, place: Place, data: Bytes) -> int:
    source = native(np.asarray(array)).reshape(-1).view(np.uint8)
    checksum.copy(_slot(place, data), source)
    return checksum.crc32c(source)


def _unknown(error: DriverError) -> RaystateError:
    return RaystateError(
        f"NVIDIA's driver can't say whether a copy into a slot has ended ({error}): until it can, nothing is written to the slots"
    )
