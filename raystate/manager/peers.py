"""One snapshot in other nodes' memory, as far as a restoring process needs it: asked for by boxes, of several nodes at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from raystate.arrays.holdings import FarBox
from raystate.core.formats.errors import CorruptCheckpointError, RaystateError, StepNotFoundError
from raystate.core.formats.messages import HostId, RestoreChoice
from raystate.machine.checksum import Bytes, crc32c
from raystate.manager.session import Session
from raystate.runtime.link import HostCall
from raystate.runtime.parts import PieceBoxes, PieceHead
from raystate.waits import AGAIN_S, PEER_CALL_S

CALL_BYTES = 16 << 20  # asked for in one call; a single box may be larger


class FarPieces:
    """Calls of the HostActors that hold the snapshot of a choice.

    Args:
        session: of this process.
        choice: what is restored.
    """

    def __init__(self, session: Session, choice: RestoreChoice):
        self._session = session
        snapshot = choice.in_memory
        assert snapshot is not None, "there is one to be asked for"
        self._what = snapshot._asdict()
        # A HostActor that was killed is back soon. Where nothing else has the bytes it is worth more to wait for it.
        self._patience_s = session.config.host_timeout_s * (1 if choice.stored else 3)
        self._deadline_s: float | None = None

    def rest(self) -> bool:
        """Wait a moment for nodes that could not be reached. False: they have had their time, all in all."""
        link = self._session.link
        if self._deadline_s is None:
            self._deadline_s = link.clock() + self._patience_s
        if link.clock() > self._deadline_s:
            return False
        link.rest(seconds=AGAIN_S)
        return True

    def heads(self, holders: Mapping[int, Sequence[HostId]]) -> tuple[dict[int, PieceHead], dict[int, str]]:
        """All but the array bytes of some ranks' pieces.

        Args:
            holders: rank -> the nodes that may have it.

        Returns:
            What was found, and why the rest was not.
        """
        found: dict[int, PieceHead] = {}
        why: dict[int, str] = {}
        untried = {rank: self._in_turn(rank, hosts) for rank, hosts in holders.items()}
        silent = {rank: list[HostId]() for rank in holders}
        while len(found) < len(holders):
            ranks = [rank for rank in holders if rank not in found and untried[rank]]
            if not ranks:
                if not any(hosts for rank, hosts in silent.items() if rank not in found) or not self.rest():
                    break
                untried, silent = silent, {rank: list[HostId]() for rank in holders}
                continue
            calls = [HostCall(untried[rank].pop(0), "piece_head", {**self._what, "rank": rank}) for rank in ranks]
            for index, got in self._call(calls):
                rank, host = ranks[index], calls[index].host
                if isinstance(got, PieceHead):
                    found[rank] = got
                    continue
                why[rank] = f"node {host[:8]}: {_error_of(got).message}"
                if not isinstance(got, StepNotFoundError):
                    silent[rank].append(host)
        return found, {rank: why.get(rank, "no node holds it") for rank in holders if rank not in found}

    def _in_turn(self, rank: int, hosts: Sequence[HostId]) -> list[HostId]:
        """Processes begin with different nodes."""
        first = (rank + self._session.rank) % max(1, len(hosts))
        return [*hosts[first:], *hosts[:first]]

    def fetch(self, boxes: Sequence[FarBox]) -> Iterator[tuple[int, Bytes | RaystateError]]:
        """See `arrays.holdings.Elsewhere`."""
        parts = _parts(boxes)
        calls = [self._boxes_call(boxes, part) for part in parts]
        for index, got in self._call(calls):
            if not isinstance(got, PieceBoxes):
                error = _error_of(got)
                yield from ((one, error) for one in parts[index])
                continue
            start = 0
            for one, expected in zip(parts[index], got.crc32c, strict=True):
                if expected is None:
                    yield one, CorruptCheckpointError("the bytes it holds don't match their crc32c")
                    continue
                data = got.data[start : start + boxes[one].nbytes]
                start += boxes[one].nbytes
                came = data.nbytes == boxes[one].nbytes and crc32c(data) == expected
                yield one, data if came else CorruptCheckpointError("its bytes were damaged on the way")

    def _boxes_call(self, boxes: Sequence[FarBox], part: Sequence[int]) -> HostCall:
        first = boxes[part[0]]
        asked = [(boxes[one].piece, *boxes[one].box) for one in part]
        return HostCall(first.host, "piece_boxes", {**self._what, "rank": first.rank, "boxes": asked})

    def _call(self, calls: Sequence[HostCall]) -> Iterator[tuple[int, Any]]:
        return self._session.link.call_hosts(calls, PEER_CALL_S)


def _parts(boxes: Sequence[FarBox]) -> list[list[int]]:
    """Those of one rank on one node together, as many as one call may bring."""
    parts: list[list[int]] = []
    open_: dict[tuple[HostId, int], tuple[list[int], int]] = {}
    for index, box in enumerate(boxes):
        key = (box.host, box.rank)
        part, nbytes = open_.get(key, (list[int](), 0))
        if not part or nbytes + box.nbytes > CALL_BYTES:
            part, nbytes = list[int](), 0
            parts.append(part)
        part.append(index)
        open_[key] = (part, nbytes + box.nbytes)
    return parts


def _error_of(got: Any) -> RaystateError:
    """Of a call without an answer."""
    return got if isinstance(got, RaystateError) else RaystateError(f"it can't be reached ({got})")
