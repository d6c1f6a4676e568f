"""Transfers of snapshots from other HostActors into slots of this host.

The host that keeps the copy fetches it, chunk after chunk, on threads that give way to training.
The source holds its slot only for the time of a chunk, so no dead reader can keep a slot. A piece
that was overwritten in between is not found for the next chunk. The slot's header is written last,
once the bytes match the checksums that the trainer has made, and only if the machine still wants
it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

from raystate.arena import HostArena, Slot, SlotSet, crc32c
from raystate.arena.copies import find_copies
from raystate.core.formats.errors import CapacityError, CorruptCheckpointError, RaystateError
from raystate.core.formats.host_messages import (
    CopyEnded,
    CopyMeasured,
    EndCopy,
    FetchCopy,
    FillCopy,
    HostEvent,
    SetFound,
)
from raystate.core.formats.messages import HostId
from raystate.core.formats.tree import Layout, SlotTable
from raystate.machine.counts import counts
from raystate.machine.own_time import own_time
from raystate.machine.priority import give_way
from raystate.runtime.parts import PieceHead
from raystate.waits import AT_ONCE_S, PEER_CALL_S, TRANSFER_S

logger = logging.getLogger("raystate.host")

CHUNK_BYTES = 16 * 1024 * 1024
TRANSFERS = 4  # at once, each from another host


class Peers(Protocol):
    """How a HostActor calls another one."""

    def call(self, host: HostId, method: str, timeout_s: float, request: dict[str, Any]) -> Any:
        """Its answer, or the RaystateError that it raised; TimeoutError or another RaystateError if it can't be reached."""
        ...


class _Bringing:
    """One on its way: its slot is known once the machine has given it one."""

    def __init__(self, order: FetchCopy):
        self.order = order
        self.fill: FillCopy | None = None
        self.slot: Slot | None = None
        self.head: PieceHead | None = None


class Copier:
    """Carries out the machine's transfers to this host.

    Args:
        arena: of this host.
        peers: the other HostActors; None: there are none to be called.
        feed: hands an event to the machine, which answers with commands at once.
        found: what the machine is told of a set.
        lock: that of `feed`.
    """

    def __init__(
        self,
        arena: HostArena,
        peers: Peers | None,
        feed: Callable[[HostEvent], None],
        found: Callable[[SlotSet], SetFound],
        lock: threading.RLock,
    ):
        self._arena = arena
        self._peers = peers
        self._feed = feed
        self._found = found
        self._lock = lock
        self._transfers: dict[int, _Bringing] = {}
        self._stopping = False
        self._running: set[Future[None]] = set()
        self._pool = ThreadPoolExecutor(TRANSFERS, thread_name_prefix="raystate-copy", initializer=give_way)

    def carry_out(self, command: FetchCopy | FillCopy | EndCopy) -> None:
        """Do what the machine asks for; under the lock of `feed`, so that nothing comes between its decision and this."""
        if isinstance(command, FetchCopy):
            if not self._stopping:
                transfer = self._transfers[command.transfer] = _Bringing(command)
                self._running.add(run := self._pool.submit(self._run, command.transfer, transfer))
                run.add_done_callback(self._running.discard)
            return
        transfer = self._transfers[command.transfer]
        if isinstance(command, FillCopy):
            transfer.fill = command
        elif command.address is not None:
            assert transfer.slot is not None and transfer.head is not None
            transfer.slot.commit(transfer.head.content, transfer.head.table)
            counts.add("copied_bytes/peer", transfer.head.content.nbytes)
        else:
            logger.debug("no copy of step %d: %s", transfer.order.snapshot.step, command.reason)

    def close(self) -> None:
        """Transfers end at their next chunk; one whose source doesn't answer is not waited for: this process ends, too."""
        with self._lock:
            self._stopping = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        wait(list(self._running), timeout=AT_ONCE_S)

    # ------------------------------------------------------------ one transfer, on its thread

    def _run(self, number: int, transfer: _Bringing) -> None:
        order = transfer.order
        try:
            self._bring(number, transfer)
        except Exception as error:
            what = f"copy of step {order.snapshot.step} of rank {order.rank} from host {order.source[:8]}"
            text = error.message if isinstance(error, RaystateError) else f"{type(error).__name__}: {error}"
            logger.info("%s: %s", what, text)
            self._feed(CopyEnded(transfer=number, error=text, no_memory=isinstance(error, CapacityError)))
        finally:
            if transfer.slot is not None:
                transfer.slot.close()
            with self._lock:
                self._transfers.pop(number, None)

    def _bring(self, number: int, transfer: _Bringing) -> None:
        deadline_s = own_time() + TRANSFER_S
        head: PieceHead = self._call(transfer, "piece_head", {})
        transfer.head = head
        ref = self._arena.put_layout(head.layout)
        try:
            if ref != SlotTable.from_bytes(head.table).layout_ref:
                raise CorruptCheckpointError("its layout is not the one that its table names")
            self._fetch(number, transfer, head, deadline_s)
        finally:
            self._arena.let_go_layout(ref)

    def _fetch(self, number: int, transfer: _Bringing, head: PieceHead, deadline_s: float) -> None:
        held = find_copies(self._arena.sets, transfer.order.rank, data_bytes=head.content.nbytes, table_bytes=len(head.table))
        made = held is None
        if held is None:
            held = self._arena.make_copies(transfer.order.rank, head.held)
        with self._lock:
            if made:
                self._arena.sets.append(held)
                self._feed(self._found(held))
            self._feed(CopyMeasured(transfer=number, index=held.index))
            fill = transfer.fill
            if fill is None:
                return  # it was dropped
            slot = transfer.slot = _open_slot(held, fill.address.slot)
            slot.check(head.content, len(head.table))
            slot.begin()
        self._fill(transfer, slot, head, deadline_s)
        self._feed(CopyEnded(transfer=number, content=head.content))

    def _fill(self, transfer: _Bringing, slot: Slot, head: PieceHead, deadline_s: float) -> None:
        data = slot.data_mut
        for start in range(0, head.content.nbytes, CHUNK_BYTES):
            if self._stopping or own_time() > deadline_s:
                raise RaystateError("this HostActor ends" if self._stopping else f"it took longer than {TRANSFER_S:g} s")
            size = min(CHUNK_BYTES, head.content.nbytes - start)
            chunk = self._call(transfer, "piece_chunk", {"start": start, "size": size})
            if chunk.nbytes != size:
                raise CorruptCheckpointError(f"{chunk.nbytes} bytes came instead of {size}")
            data[start : start + size] = chunk
        table, layout = SlotTable.from_bytes(head.table), Layout.from_bytes(head.layout)
        for piece, expected in zip(layout.pieces, table.crc32c, strict=True):
            if crc32c(data[piece.offset : piece.offset + piece.nbytes]) != expected:
                raise CorruptCheckpointError("its bytes don't match their crc32c")

    def _call(self, transfer: _Bringing, method: str, request: dict[str, Any]) -> Any:
        order = transfer.order
        if self._peers is None:
            raise RaystateError(f"host {order.source[:8]} can't be called from here")
        what = {"lineage": order.snapshot.lineage, "step": order.snapshot.step, "rank": order.rank}
        return self._peers.call(order.source, method, PEER_CALL_S, {**what, **request})


def _open_slot(held: SlotSet, number: int) -> Slot:
    """The slot, to be written to: only this copy has it, by the machine's word."""
    info = held.info
    return Slot(held.slots[number].path, index=number, table_bytes=info.table_bytes, data_bytes=info.data_bytes, role="trainer")
