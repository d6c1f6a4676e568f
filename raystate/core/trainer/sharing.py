"""Which boxes of a snapshot a process takes from whom: from its own node's memory what is there, the rest from the other nodes.

Every process decides this for itself, with what all of them know. It takes no element twice, and so deals out what several nodes have
that each of them gives about as much as the others: to this process, and, as each process begins with another node, to all together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from raystate.core.formats.boxes import Box, cut, difference, intersection
from raystate.core.formats.names import HostId

HERE = HostId("")  # this process's own node: its memory is read without asking anybody


class HeldPiece(NamedTuple):
    """A piece of an array in memory.

    Attributes:
        box: of the global array.
        rank: whose snapshot it is part of.
        piece: index into the pieces of that rank's layout.
        hosts: those that have it; `HERE` among them: this node.
    """

    box: Box
    rank: int
    piece: int
    hosts: tuple[HostId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedBox:
    """A box that a process needs.

    Attributes:
        number: the caller's name for it.
        box: of the global array.
        itemsize: bytes of an element.
        held: every piece of the array that may be used.
    """

    number: int
    box: Box
    itemsize: int
    held: Sequence[HeldPiece]


class Take(NamedTuple):
    """A box that is to be taken out of one piece. Its elements are the caller's `number`; `box` is of the global array."""

    number: int
    box: Box
    held: HeldPiece
    host: HostId


class Missing(NamedTuple):
    """A box that no host has."""

    number: int
    box: Box


def share_out(
    wanted: Sequence[WantedBox], *, rank: int, most_bytes: int, load: Mapping[HostId, int] | None = None
) -> tuple[list[Take], list[Missing]]:
    """Who gives what.

    Args:
        wanted: by one process, at once.
        rank: of that process.
        most_bytes: that are taken from another node in one go; a single element may be larger.
        load: bytes that it has asked the other nodes for before.

    Returns:
        What to take, and the boxes that no host has. Together they are the boxes that are wanted,
        without overlap.
    """
    hosts = sorted({host for want in wanted for held in want.held for host in held.hosts} - {HERE})
    turn = {host: (number - rank) % len(hosts) for number, host in enumerate(hosts)}
    loads = dict.fromkeys(hosts, 0) | dict(load or {})
    takes: list[Take] = []
    missing: list[Missing] = []
    for want in wanted:
        rest = [want.box]
        for box, pieces in _by_box(want):
            here = next((held for held in pieces if HERE in held.hosts), None)
            left: list[Box] = []
            for needed in rest:
                common = intersection(needed, box)
                if common is None:
                    left.append(needed)
                    continue
                left += difference(needed, common)
                if here is not None:
                    takes.append(Take(want.number, common, here, HERE))
                    continue
                for part in cut(common, most_bytes // want.itemsize):
                    held, host = min(
                        ((held, host) for held in pieces for host in held.hosts), key=lambda one: (loads[one[1]], turn[one[1]])
                    )
                    loads[host] += part.size * want.itemsize
                    takes.append(Take(want.number, part, held, host))
            rest = left
            if not rest:
                break
        missing += [Missing(want.number, box) for box in rest]
    return takes, missing


def _by_box(want: WantedBox) -> list[tuple[Box, list[HeldPiece]]]:
    """The pieces that a host has, those of the same elements together, in the order of use.

    This node's come first, and of these one that is exactly the wanted box: it can be used where it
    lies. Then come those that have the most of it.
    """
    same: dict[Box, list[HeldPiece]] = {}
    for held in want.held:
        if held.hosts and intersection(want.box, held.box) is not None:
            same.setdefault(held.box, []).append(held)
    if len(same) < 2:
        return list(same.items())

    def order(one: tuple[Box, list[HeldPiece]]) -> tuple[bool, bool, int]:
        common = intersection(want.box, one[0])
        assert common is not None
        return all(HERE not in held.hosts for held in one[1]), one[0] != want.box, -common.size

    return sorted(same.items(), key=order)
