"""What a node holds of a snapshot in memory, and what it can ask others for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from raystate.arrays.restore import ReadRequest
from raystate.core.formats.boxes import Box
from raystate.core.formats.errors import RaystateError
from raystate.core.formats.names import HostId
from raystate.core.formats.tree import Layout
from raystate.machine.checksum import Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One trainer's part of a snapshot, and who has it.

    Attributes:
        layout: of that trainer.
        data: uint8, the slot's data region; None: it is not on this node.
        crc32c: per piece of the layout.
        rank: of that trainer.
        holder: for error messages.
        hosts: other nodes that have it.
    """

    layout: Layout
    data: np.ndarray | None
    crc32c: tuple[int, ...]
    rank: int = 0
    holder: str = ""
    hosts: tuple[HostId, ...] = ()


@dataclass(slots=True, kw_only=True)
class BytesTaken:
    """Array bytes that one process has taken.

    Attributes:
        memory: from its own node's memory.
        peer: from other nodes' memory, over the network.
    """

    memory: int = 0
    peer: int = 0


class FarBox(NamedTuple):
    """A box of one piece in another node's memory.

    Attributes:
        host: which node.
        rank, piece: whose, and the index into the pieces of that rank's layout.
        box: relative to the piece.
        nbytes: of the box.
    """

    host: HostId
    rank: int
    piece: int
    box: Box
    nbytes: int


class Elsewhere(Protocol):
    """What can be had if this node's memory has not all of a snapshot."""

    def holdings(self) -> Sequence[Holding] | None:
        """More of what only other nodes have, each rank's part once; None: there is no more."""
        ...

    def fetch(self, boxes: Sequence[FarBox]) -> Iterator[tuple[int, Bytes | RaystateError]]:
        """Get them, in any order: (index, the bytes in row-major order). StepNotFoundError: that node does not have that rank's part;
        CorruptCheckpointError: that piece is damaged there; any other error: the node can't be reached now."""
        ...

    def rest(self) -> bool:
        """Wait a moment for nodes that could not be reached. False: they have had their time."""
        ...

    def stored(self, requests: Sequence[ReadRequest]) -> list[np.ndarray] | None:
        """The same boxes out of storage. None: these bytes are not there."""
        ...
