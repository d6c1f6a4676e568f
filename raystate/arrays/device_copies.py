"""Copies of a step's arrays in the memory of their own devices, which cost the training milliseconds.

They are ordinary programs of JAX's, so XLA makes the next step, which donates the arrays, wait for them.
No other code has the copies: they can be read beside the training, at their addresses. The user's own
arrays never can: XLA knows nothing of such a reader, and would let a step write there meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from raystate.arrays.spare import GROUP
from raystate.arrays.stagers import ToKeep
from raystate.arrays.tree import Plan
from raystate.core.formats.boxes import Box, slices

logger = logging.getLogger("raystate")

GROUP_BYTES = 512 << 20  # of the copies of one program: they go as soon as they are in the slot
MOST_PROGRAMS = 64  # compiling them takes a core from the training

Parts = tuple[tuple[slice, ...] | None, ...]  # the pieces of a shard; None: all of it


class Place(NamedTuple):
    """Where the bytes of one copy go in the slot, and of which shard they are."""

    shard: int
    offset: int
    nbytes: int


class _Member(NamedTuple):
    """A shard in a group."""

    index: int  # among the arrays
    like: jax.ShapeDtypeStruct
    parts: Parts
    places: tuple[Place, ...]

    @property
    def kind(self) -> Hashable:
        return self.like.shape, self.like.dtype, self.like.sharding, self.parts

    @property
    def nbytes(self) -> int:
        return sum(place.nbytes for place in self.places)


@dataclass(frozen=True, slots=True)
class CopyGroup:
    """Shards of one device that one program copies. CopyGroups of one kind share a program."""

    device: Any
    members: tuple[_Member, ...]
    nbytes: int
    kind: Hashable


@dataclass(slots=True, eq=False, weakref_slot=True)
class Copied:
    """The copies of a group. `arrays` is emptied when their bytes are in the slot."""

    group: CopyGroup
    arrays: list[jax.Array]
    places: list[Place]


@dataclass(frozen=True, slots=True)
class CopyGroups:
    """How the shards of a plan are copied."""

    plan: Plan
    groups: tuple[CopyGroup, ...]
    empty: tuple[tuple[int, tuple[int, ...], Any], ...]  # shards without an element: number, shape, dtype
    needs: Mapping[Any, int]  # device -> bytes of its copies
    most: Mapping[Any, int]  # device -> bytes of its largest group


def shards_of(wanted: Sequence[ToKeep]) -> list[jax.Array]:
    """Each shard as an array on one device."""
    found: list[jax.Array] = []
    for _, leaf, array in wanted:
        if len(array.sharding.device_set) == 1:  # to ask jax for the only shard there is takes 30 µs
            found.append(array)
        else:
            found += [array.addressable_data(shard.position) for shard in leaf.shards]
    return found


def arrange(plan: Plan, wanted: Sequence[ToKeep], arrays: Sequence[jax.Array]) -> CopyGroups:
    """Args: arrays: from `shards_of`."""
    numbers = [one.number + i for one in wanted for i in range(len(one.leaf.shards))]
    by_device: dict[Any, list[_Member]] = {}
    empty: list[tuple[int, tuple[int, ...], Any]] = []
    for index, (number, array) in enumerate(zip(numbers, arrays, strict=True)):
        if not array.nbytes:
            empty.append((number, array.shape, array.dtype))
            continue
        pieces = [plan.layout.pieces[piece] for piece in plan.pieces_of[number]]
        whole: Parts = (None,)
        parts = whole if len(pieces) == 1 else tuple(slices(Box(one.start, one.shape), pieces[0].start) for one in pieces)
        places = tuple(Place(number, one.offset, one.nbytes) for one in pieces)
        like = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        (device,) = array.devices()
        by_device.setdefault(device, []).append(_Member(index, like, parts, places))
    groups: list[CopyGroup] = []
    for device, members in by_device.items():
        members.sort(key=lambda one: (one.like.shape, str(one.like.dtype)))  # alike beside each other: groups alike
        groups += [_group(device, some) for some in _split(members)]
    needs = {device: sum(one.nbytes for one in members) for device, members in by_device.items()}
    most = {device: max(one.nbytes for one in groups if one.device == device) for device in needs}
    return CopyGroups(plan, tuple(groups), tuple(empty), needs, most)


def _split(members: list[_Member]) -> Iterator[list[_Member]]:
    some: list[_Member] = []
    for one in members:
        outputs = sum(len(other.parts) for other in some) + len(one.parts)
        if some and (outputs > GROUP or sum(other.nbytes for other in some) + one.nbytes > GROUP_BYTES):
            yield some
            some = []
        some.append(one)
    yield some


def _group(device: Any, members: list[_Member]) -> CopyGroup:
    return CopyGroup(device, tuple(members), sum(one.nbytes for one in members), (device, tuple(one.kind for one in members)))


class CopyPrograms:
    """The programs, by kind of group. Calls come from one thread at a time; they are compiled on others."""

    def __init__(self) -> None:
        self._compiled: dict[Hashable, Any] = {}  # None: it could not be compiled, or is being
        self._lock = threading.Lock()

    def copy(self, group: CopyGroup, arrays: Sequence[jax.Array]) -> tuple[Copied, list[tuple[int, jax.Array]]]:
        """Queue copies of a group's arrays.

        Args:
            arrays: of all groups.

        Returns:
            (copies whose bytes lie as in the slot, (shard, its copy) of the others)
        """
        own = [arrays[member.index] for member in group.members]
        places = [place for member in group.members for place in member.places]
        compiled = self._compiled.get(group.kind)
        if compiled is not None:
            try:
                return Copied(group, compiled(own), places), []
            except ValueError:  # says that the layouts disagree
                self._compiled[group.kind] = None
        copied, others = Copied(group, [], []), list[tuple[int, jax.Array]]()
        for member, copy in zip(group.members, jax.device_put(own, [one.sharding for one in own], may_alias=False), strict=True):
            if len(member.parts) > 1 or not _lies_straight(copy.format):
                others.append((member.places[0].shard, copy))
            else:
                copied.arrays.append(copy)
                copied.places.append(member.places[0])
        return copied, others

    def prepare(self, groups: CopyGroups) -> None:
        """Compile what is missing. Quick when all is there."""
        with self._lock:
            for group in groups.groups:
                if group.kind in self._compiled or len(self._compiled) >= MOST_PROGRAMS:
                    continue
                self._compiled[group.kind] = None
                try:
                    self._compiled[group.kind] = _compile(group)
                except Exception as error:  # each array is copied alone, which costs as much on the device
                    logger.warning("saves take longer to queue copies of the state than they need to, since this failed: %s", error)


def _compile(group: CopyGroup) -> Any:
    parts = [member.parts for member in group.members]

    def copy(arrays: list[jax.Array]) -> list[jax.Array]:
        return [
            jax.numpy.copy(array if part is None else array[part]) for array, own in zip(arrays, parts, strict=True) for part in own
        ]

    with jax.set_mesh(None):
        compiled = jax.jit(copy).lower([member.like for member in group.members]).compile()
    return compiled if all(map(_lies_straight, compiled.output_formats)) else None


def _lies_straight(form: Any) -> bool:
    """Whether the elements lie in row-major order."""
    layout = form.layout
    return not layout.tiling and tuple(layout.major_to_minor) == tuple(range(len(layout.major_to_minor)))
