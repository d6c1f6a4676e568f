"""The GPUs of this process: how much room they have, and copies off them by the driver, straight into slots.

What fails is not tried again in this process: it goes the next slower way, and says so once.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_void_p
from typing import Any, TypeVar

import jax
import numpy as np

from raystate.arrays.device_copies import Copied, Place
from raystate.arrays.stage import copy_cores, native
from raystate.core.formats.errors import RaystateError
from raystate.machine import checksum
from raystate.machine.checksum import Bytes
from raystate.machine.cuda import DriverError, Stream, driver
from raystate.machine.threads import in_threads

W = TypeVar("W")

logger = logging.getLogger("raystate")

SPARE_BYTES = 512 << 20  # of the device's memory that copies leave alone, beside the most that the training has needed
SPARE_SHARE = 0.02


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
        self._unsettled: list[tuple[Stream, list[jax.Array]]] = []  # and what their copies may still read
        self._copies: weakref.WeakSet[Copied] = weakref.WeakSet()  # an interrupted save may let go of some without a word
        self._most: dict[Any, int] = {}  # device -> the most bytes that copies have had there
        self._before: dict[Any, int] = {}  # the most that was in use before the first

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
        """That of a device; the calling thread turns to it. Raises DriverError."""
        with self._lock:
            if device not in self._streams:
                self._streams[device] = Stream(driver(), device.local_hardware_id)
            found = self._streams[device]
        found.begin()
        return found

    # ------------------------------------------------------------ room

    def has_room(self, needs: Mapping[Any, int]) -> bool:
        """Whether each device has it, by its own statistics: to try would hold up the training for seconds. Raises DriverError."""
        return all(self._room(device) >= nbytes for device, nbytes in needs.items())

    def _room(self, device: Any) -> int:
        stats = device.memory_stats()
        if not stats:  # JAX has no pool: the driver knows
            return self.stream(device).free_bytes() - SPARE_BYTES
        limit, peak = stats.get("bytes_limit", 0), stats.get("peak_bytes_in_use", 0)
        with self._lock:
            # What a step needs is only in the peak. Ours are in it, too, and it can't be set back.
            used = max(self._before.setdefault(device, peak), peak - self._most.get(device, 0))
            return limit - used - max(SPARE_BYTES, int(SPARE_SHARE * limit)) - self.held_bytes(device)

    def add(self, copied: Copied) -> None:
        """These copies are on their device from now on, until they have arrived or are let go."""
        device = copied.group.device
        with self._lock:
            self._copies.add(copied)
            self._most[device] = max(self.held_bytes(device), self._most.get(device, 0))

    def held_bytes(self, device: Any) -> int:
        """Of copies that are on a device."""
        return sum(one.group.nbytes for one in list(self._copies) if one.arrays and one.group.device == device)

    # ------------------------------------------------------------ off the devices

    def bring(self, some: Sequence[Copied], data: Bytes) -> dict[int, list[int]]:
        """Copies into a slot, and away; shard -> crc32c of its pieces, of what is in the slot then.

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
                found = list(pool.map(self._bring, by_device, by_device.values(), itertools.repeat(data)))
        crcs: dict[int, list[int]] = {}
        for place, crc in itertools.chain.from_iterable(found):
            crcs.setdefault(place.shard, []).append(crc)
        return crcs

    def _bring(self, device: Any, some: list[Copied], data: Bytes) -> list[tuple[Place, int]]:
        crcs: list[tuple[Place, int]] = []
        try:
            stream = self.stream(device)
        except DriverError as error:
            self.lose(error)
        else:
            self._bring_by(stream, some, data, crcs)
        for one in some:  # what the driver didn't bring
            if one.arrays:
                found = _in_threads(lambda pair: _by_jax(*pair, data), list(zip(one.arrays, one.places, strict=True)), one)
                crcs += zip(one.places, found, strict=True)
                one.arrays.clear()
        return crcs

    def _bring_by(self, stream: Stream, some: list[Copied], data: Bytes, crcs: list[tuple[Place, int]]) -> None:
        read = [array for one in some for array in one.arrays]
        try:
            marks = [self._queue(stream, one, data) for one in some]
            for one, mark in zip(some, marks, strict=True):
                stream.wait(mark)
                found = _in_threads(lambda place: checksum.crc32c(_slot(place, data)), one.places, one)
                one.arrays.clear()
                crcs += zip(one.places, found, strict=True)
        except BaseException as error:
            if isinstance(error, DriverError):
                self.lose(error)
            self._settle(stream, read)
            if not isinstance(error, DriverError):
                raise

    def _queue(self, stream: Stream, one: Copied, data: Bytes) -> c_void_p:
        jax.block_until_ready(one.arrays)
        for array, place in zip(one.arrays, one.places, strict=True):
            stream.off(array.unsafe_buffer_pointer(), _slot(place, data))
        return stream.mark()

    # ------------------------------------------------------------ onto the devices

    def fill(self, some: Sequence[tuple[jax.Array, np.ndarray]]) -> None:
        """Write boxes into arrays on one device each, which only the caller has.

        Raises:
            DriverError: what the arrays hold now isn't known. RaystateError: see `bring`.
        """
        by_device: dict[Any, list[tuple[jax.Array, np.ndarray]]] = {}
        for array, box in some:
            (device,) = array.devices()
            by_device.setdefault(device, []).append((array, box))
        with self.copying:
            self.settle()
            with ThreadPoolExecutor(len(by_device), thread_name_prefix="raystate-onto") as pool:
                list(pool.map(self._fill, by_device, by_device.values()))

    def _fill(self, device: Any, some: list[tuple[jax.Array, np.ndarray]]) -> None:
        stream = self.stream(device)
        arrays = [array for array, _ in some]
        jax.block_until_ready(arrays)
        try:
            for array, box in some:
                stream.onto(np.ascontiguousarray(box).reshape(-1).view(np.uint8), array.unsafe_buffer_pointer())
            stream.wait(stream.mark())
        except BaseException:
            self._settle(stream, arrays)
            raise

    def _settle(self, stream: Stream, touched: list[jax.Array]) -> None:
        """After a fault. Raises RaystateError: the driver can't say what is still under way."""
        try:
            stream.settle()
        except DriverError as unsettled:
            self._unsettled.append((stream, touched))
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
