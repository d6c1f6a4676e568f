"""The way of NVIDIA's GPUs: copies on the device, and off it by the driver, behind the training.

`hold` queues copies in the device's own memory, where there is room, and returns. `Gpus.bring` has the
driver carry them into the slot, whose pages are registered with it, on a stream of its own. So the
next step waits for memory that copies terabytes per second, not for the link to the host.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from raystate.arrays.device_copies import Copied, CopyGroups, CopyPrograms, arrange, shards_of
from raystate.arrays.gpus import GPUS, Filling, Pauses
from raystate.arrays.landing import land
from raystate.arrays.pinned import Pinned
from raystate.arrays.spare import below_a_byte
from raystate.arrays.stagers import Keeping, ReadInto, ToKeep, Unread, nothing_to_do
from raystate.arrays.tree import Plan
from raystate.core.formats.errors import RaystateError
from raystate.machine.checksum import Bytes
from raystate.machine.cuda import DriverError, Registration, driver
from raystate.waits import ANSWER_S

_PAUSE = 4  # times as long as a registration takes: the driver may hold up the training meanwhile
_LARGE_BYTES = 1 << 20  # of a restored box: smaller ones JAX places as fast
_MOST_SHAPES = 64  # of restored boxes: each takes a program
_POOL = Pinned()


@functools.lru_cache(maxsize=64)
def is_cuda(device: Any) -> bool:
    """Whether NVIDIA's driver has it."""
    return device.platform == "gpu" and "cuda" in device.client.platform_version.lower()


@functools.lru_cache(maxsize=1024)
def _is_ours(sharding: Any, dtype: Any) -> bool:
    device = next(iter(sharding.device_set))
    usual = sharding.memory_kind in (None, device.default_memory().kind)
    return is_cuda(device) and usual and not below_a_byte(dtype)


@functools.lru_cache(maxsize=1024)
def _maker(shape: tuple[int, ...], dtype: Any, target: Any) -> Callable[[], jax.Array]:
    """A program that makes an array: memory of its own each time."""
    return jax.jit(lambda: jax.numpy.zeros(shape, dtype), out_shardings=target)


def _fresh(wanted: Sequence[tuple[tuple[int, ...], Any, Any]]) -> list[jax.Array] | None:
    """Arrays in no other hands, of these shapes, dtypes and shardings; None: that costs too much, or can't be."""
    if GPUS.lost or not wanted or len({(shape, dtype) for shape, dtype, _ in wanted}) > _MOST_SHAPES:
        return None
    try:
        # The caller's mesh and settings don't count here: see `placing`.
        with jax.set_mesh(None), jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
            return [_maker(shape, dtype, target)() for shape, dtype, target in wanted]
    except jax.errors.JaxRuntimeError as error:
        GPUS.lose(error)
        return None


def _fill(some: Sequence[Filling]) -> bool:
    """Whether the arrays have the bytes."""
    try:
        GPUS.fill(some)
    except (DriverError, RaystateError, jax.errors.JaxRuntimeError) as error:
        GPUS.lose(error)
        return False
    return True


class GpuStager:
    """See `stagers.Stager`. There is a driver."""

    def __init__(self) -> None:
        self._groups: CopyGroups | None = None
        self._programs = CopyPrograms()
        self._trains = False  # a step has been held: registrations may hold the training up
        self._spread_s = 0.0
        self._hurries = threading.Event()

    def takes(self, array: jax.Array) -> bool:
        """Whether it lies in a GPU's own memory, as it lies in a slot."""
        return _is_ours(array.sharding, array.dtype)

    def spread(self, seconds: float) -> None:
        """Copies of what is held next go in pieces, with pauses, so that they take so long; 0.0: without, and those under way, too."""
        self._spread_s = seconds
        self._hurries.clear() if seconds else self._hurries.set()

    def hurry(self) -> None:
        """No pauses in what is under way."""
        self._hurries.set()

    def foresee(self, plan: Plan, wanted: Sequence[ToKeep]) -> None:
        """See `Stager.foresee`."""
        self._groups = arrange(plan, wanted, shards_of(wanted))

    def hold(self, plan: Plan, wanted: Sequence[ToKeep], parts: list[Any], into: Callable[[], Bytes] | None) -> Keeping:
        """See `Stager.hold`. Waits if a device has no room for its copies: for them, in turns."""
        self._trains = True
        if GPUS.lost:
            return self._by_jax(plan, wanted, parts)
        arrays = shards_of(wanted)
        groups = self._groups
        if groups is None or groups.plan is not plan:
            groups = self._groups = arrange(plan, wanted, arrays)
        copied: list[Copied] = []
        try:
            kept = self._copies(groups, arrays, parts, copied, into)
        except (DriverError, RaystateError) as error:
            GPUS.lose(error)
            kept = None
        if kept is None:
            for one in copied:
                GPUS.drop(one)
            return self._by_jax(plan, wanted, parts)
        for shard, shape, dtype in groups.empty:
            parts[shard] = np.empty(shape, dtype)
        return kept

    def _copies(
        self, groups: CopyGroups, arrays: list[jax.Array], parts: list[Any], copied: list[Copied], into: Callable[[], Bytes] | None
    ) -> Keeping | None:
        """None: there is no room, not even in turns."""
        if GPUS.has_room(groups.needs):
            for group in groups.groups:
                copied.append(self._copy(group, arrays, parts, now=False))
            return _OnDevice(copied, {}, Pauses(self._spread_s, self._hurries) if self._spread_s else None)
        if into is None or not GPUS.has_room({device: 2 * most for device, most in groups.most.items()}):
            GPUS.say(_NO_ROOM)
            return None
        GPUS.say(_IN_TURNS)
        data, crcs = into(), dict[int, list[int]]()
        for group in groups.groups:  # the next is copied on the device while this one leaves it
            copied.append(self._copy(group, arrays, parts, now=True))
            if len(copied) > 1:
                crcs.update(GPUS.bring([copied.pop(0)], data))
        crcs.update(GPUS.bring(copied, data))
        return _OnDevice([], crcs)

    def _copy(self, group: Any, arrays: list[jax.Array], parts: list[Any], *, now: bool) -> Copied:
        # The caller's mesh, if one is set, has other devices than these arrays. And a state may have NaNs in it, whose cause the caller
        # is looking for: jax would wait for each copy and raise.
        try:
            with jax.set_mesh(None), jax.debug_nans(False), jax.debug_infs(False):
                one, others = self._programs.copy(group, arrays)
        except jax.errors.JaxRuntimeError as error:  # later ones are of the computation itself, and the user's to see
            raise DriverError(str(error)) from error
        GPUS.add(one)
        for shard, copy in others:
            parts[shard] = np.asarray(copy) if now else copy
        return one

    def _by_jax(self, plan: Plan, wanted: Sequence[ToKeep], parts: list[Any]) -> Keeping:
        """Where a copy may still be on its way into a slot, this one waits until it is known to be over."""
        kept = _POOL.hold(plan, wanted, parts, None)
        return kept if GPUS.is_settled else _OnDevice([], {})

    def restore(self, boxes: Sequence[np.ndarray], targets: Sequence[Any]) -> list[jax.Array | None]:
        """See `Stager.restore`: large ones, through registered buffers."""
        placed: list[jax.Array | None] = [None] * len(boxes)
        large = [
            index
            for index, (box, target) in enumerate(zip(boxes, targets, strict=True))
            if box.nbytes >= _LARGE_BYTES and target is not None and _is_ours(target, box.dtype)
        ]
        fresh = _fresh([(boxes[index].shape, boxes[index].dtype, targets[index]) for index in large])
        if fresh is None or not _fill([(array, 0, boxes[index]) for array, index in zip(fresh, large, strict=True)]):
            return placed
        for array, index in zip(fresh, large, strict=True):
            placed[index] = array
        return placed

    def receive(self, unread: Sequence[Unread], read: ReadInto) -> list[list[jax.Array] | None]:
        """Read boxes from storage into a little registered memory, again and again, and have the driver take them from there: one read
        into memory of its own would have its pages made first, and be copied once more.

        Returns:
            Per box its array for each target, ready; None: it is to be read and placed as others are.

        Raises: what `read` does.
        """
        received: list[list[jax.Array] | None] = [None] * len(unread)
        large = [
            index
            for index, one in enumerate(unread)
            if one.nbytes >= _LARGE_BYTES and all(_is_ours(target, one.dtype) for target in one.targets)
        ]
        fresh = _fresh(
            [(unread[index].box.shape, unread[index].dtype, target) for index in large for target in unread[index].targets]
        )
        if fresh is None:
            return received
        arrays = iter(fresh)
        found = {index: [next(arrays) for _ in unread[index].targets] for index in large}
        if land([(unread[index], found[index]) for index in large], read, _fill, GPUS):
            for index in large:
                received[index] = found[index]
        return received

    def attach(self, memory: Sequence[Bytes]) -> Callable[[], None]:
        """Registers the slots on a thread of its own, the first one first. Until then copies go through registered buffers."""
        if GPUS.lost:
            return nothing_to_do
        registrations = [Registration(driver(), one.ctypes.data, one.size) for one in memory]
        gone = threading.Event()
        threading.Thread(target=self._register, args=(registrations, gone), name="raystate-register", daemon=True).start()

        def detach() -> None:
            gone.set()
            if GPUS.copying.acquire(timeout=ANSWER_S):
                try:
                    if GPUS.is_settled:
                        for one in registrations:
                            one.close()
                        return
                finally:
                    GPUS.copying.release()
            GPUS.lose("a copy into slots that have gone may still be on its way")

        return detach

    def _register(self, registrations: list[Registration], gone: threading.Event) -> None:
        try:
            GPUS.stream(next(device for device in jax.local_devices() if is_cuda(device)))
            for one in registrations:
                begin_s = time.monotonic()
                while not gone.is_set() and one.go_on():
                    if self._trains:
                        gone.wait(_PAUSE * (time.monotonic() - begin_s))
                    begin_s = time.monotonic()
        except DriverError as error:
            GPUS.say(_UNREGISTERED, error, sum(one.left_bytes for one in registrations) >> 20)

    def prepare(self) -> None:
        """See `Stager.prepare`."""
        if self._groups is not None and not GPUS.lost:
            self._programs.prepare(self._groups)

    def release(self) -> None:
        """There is no memory of its own."""


class _OnDevice:
    """See `stagers.Keeping`.

    Args:
        crcs: of what is in the slot already.
        pauses: of the copies into the slot.
    """

    def __init__(self, copied: list[Copied], crcs: dict[int, list[int]], pauses: Pauses | None = None):
        self._copied = copied
        self._crcs = crcs
        self._pauses = pauses

    def copy(self, data: Bytes) -> dict[int, list[int]]:
        """See `Keeping.copy`."""
        return {**self._crcs, **GPUS.bring(self._copied, data, self._pauses)}

    def release(self, *, reuse: bool) -> None:  # noqa: ARG002 - as `Keeping.release`
        """The copies go."""
        for one in self._copied:
            GPUS.drop(one)


_NO_ROOM = (
    "the GPU has no room beside the training for a copy of the state: JAX copies it through memory of its own, up to two more states of "
    "this process in host memory, and the next step waits for the link"
)
_IN_TURNS = (
    "the GPU has no room beside the training for a copy of the whole state: each snapshot holds save() up until the state is in host "
    "memory, about 20 ms for each GB"
)
_UNREGISTERED = (
    "the driver does not register all of the slots (%s; %d MiB are left): snapshots go there through a buffer, which takes processor "
    "time and may take twice as long"
)
