"""What a HostActor does, without Ray: owns the arena, watches the trainers' control words, reports, and writes shards.

One thread looks at the doorbell and the words; remote calls come in on other threads. One lock guards the bookkeeping; bytes are
moved outside it, under a hold on the slot.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raystate import fault_points
from raystate.actors.doorbell import BYE, Hello, has_hung_up, listen, peer_pid
from raystate.actors.naming import give_way
from raystate.actors.share import write_share
from raystate.arena import HostArena, Slot, SlotHeader, SlotSet, crc32c
from raystate.core.errors import CorruptCheckpointError, StaleAttemptError, StepNotFoundError
from raystate.core.host import applies, carried_on, grant, host_word, is_discarded, is_granted, is_newer_advice, summarize
from raystate.core.messages import (
    Advice,
    Event,
    HostId,
    HostReported,
    HostSummary,
    HostUp,
    HostWord,
    Invalidate,
    Invalidated,
    Staged,
    TrainerExited,
    TrainerWord,
    Write,
)
from raystate.core.slots import SlotView
from raystate.core.tree import DataObject, Layout, SlotTable, TreeSpec
from raystate.storage import StepFolder, Storage
from raystate.storage.names import attempt_of

logger = logging.getLogger("raystate.host")

REPORT_INTERVAL_S = 0.05  # reports are coalesced to at most one per interval
HEARTBEAT_S = 1.0
REMEMBERED_EXITS = 64
REMEMBERED_SAVES = 4
BASE = "base.json"
WRITERS = 2  # saves at once: one is the rule, a second when the Coordinator has given the first up
LOOK_INTERVAL_S = 0.25  # words are looked at even when no bell rings (a lost ring costs no more than this)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPart:
    """What a HostActor wrote for a save: everything the Coordinator needs to merge, without the array bytes."""

    host: HostId
    writer: str
    trees: tuple[TreeSpec, ...]
    objects: dict[str, list[DataObject]]  # item -> data objects, named relative to the item's folder
    claims: dict[str, list[tuple[int, tuple[int, ...], tuple[int, ...]]]]  # item -> (leaf, start, shape) written
    tables: dict[int, SlotTable]  # rank -> items, metrics, values


@dataclass(frozen=True, slots=True, kw_only=True)
class RankData:
    """One rank's piece of a snapshot, as bytes: how another node gets it."""

    layout: bytes
    table: bytes
    data: np.ndarray | None  # uint8[data_bytes]; None when only the small part was asked for


@dataclass(slots=True)
class _Trainer:
    """A connected trainer process."""

    hello: Hello
    pid: int
    connection: socket.socket
    said_bye: bool = False
    ended: bool = False  # by this HostActor
    buffer: bytes = b""


@dataclass(slots=True)
class _SetState:
    """What the host knows of one slot set beyond what stands in shared memory."""

    grants: list[int]
    content: list[Staged | None]
    holds: list[int]
    discard: list[bool]  # invalidate when the last hold is gone
    word: TrainerWord | None = None
    word_seq: int = -1
    host_word: HostWord | None = None
    exit_reported: bool = False
    known_done: list[int] = field(default_factory=list)


class HostService:
    """See the module. `tell` hands an event to the Coordinator: it must not block and may lose it (reports are repeated)."""

    def __init__(
        self,
        *,
        arena: HostArena,
        storage: Storage,
        host: HostId,
        incarnation: str,
        tell: Callable[[Event], None],
    ):
        self._arena = arena
        self._storage = storage
        self._host = host
        self._incarnation = incarnation
        self._tell = tell
        self._lock = threading.RLock()
        self._advice: Advice | None = None
        self._base = self._load_base()  # the newest Invalidate that was applied
        self._sets: dict[int, _SetState] = {}
        self._trainers: dict[socket.socket, _Trainer] = {}
        self._saves: dict[str, Future[HostPart]] = {}  # save id -> its one execution
        self._used_up: set[str] = set()  # save ids whose outcome nobody can want any more
        self._exits: list[TrainerExited] = []
        self._attempt: int | None = None  # the newest that was heard of; older ones are ignored
        self._seq = 0
        self._reported: HostSummary | None = None
        self._last_report_s = -1e9
        self._stopping = False
        for slot_set in arena.sets:
            self._adopt(slot_set)
        self._server = listen(arena.path)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._writers = ThreadPoolExecutor(WRITERS, thread_name_prefix="raystate-write", initializer=give_way)
        self._wake_r, self._wake_w = socket.socketpair()
        self._wake_r.setblocking(False)
        self._selector.register(self._wake_r, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="raystate-host", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ adoption

    def _adopt(self, slot_set: SlotSet) -> None:
        """Bookkeeping for a set, from what stands in shared memory: a restarted HostActor goes on where the last one was killed."""
        count = len(slot_set.slots)
        state = _SetState(
            grants=[0] * count, content=[None] * count, holds=[0] * count, discard=[False] * count, known_done=[0] * count
        )
        cell = slot_set.host_cell.read()
        if cell is not None:
            state.host_word = host_word_from_json(cell[1])
            state.grants = list(state.host_word.grants) or state.grants
        self._sets[slot_set.index] = state
        self._read_word(slot_set, state)
        done = state.word.done if state.word is not None else ()
        for slot in slot_set.slots:
            if slot.index >= len(done) or done[slot.index] >= state.grants[slot.index]:
                state.content[slot.index] = self._read_content(slot)
        state.known_done = list(done) or [0] * count
        if state.word is not None and not self._arena.trainer_alive(slot_set):
            # Died while no HostActor looked: said once the thread runs. Its unfinished slots come back to us.
            state.known_done = list(state.grants)
            self._return_grants(slot_set, state)

    def _return_grants(self, slot_set: SlotSet, state: _SetState) -> None:
        """The trainer is gone: slots it was filling hold nothing; those it had finished keep their content."""
        for slot in slot_set.slots:
            state.content[slot.index] = self._read_content(slot)
        if state.word is not None:
            done = list(state.word.done) + [0] * len(state.grants)
            state.grants = [min(grant, done[i]) for i, grant in enumerate(state.grants)]

    @staticmethod
    def _read_content(slot: Slot) -> Staged | None:
        content = slot.read()
        if content is None:
            return None
        header = content.header
        return Staged(
            rank=header.rank,
            world=header.world,
            lineage=header.lineage,
            step=header.step,
            layout=header.layout,
            durable=header.durable,
            nbytes=header.data_bytes,
        )

    # ------------------------------------------------------------ the watching thread

    def _run(self) -> None:
        self._tell(HostUp(host=self._host, incarnation=self._incarnation))
        next_look_s = 0.0
        while not self._stopping:
            wait_s = max(0.0, min(next_look_s, self._next_report_s()) - time.monotonic())
            ready = self._selector.select(min(wait_s, LOOK_INTERVAL_S))
            with self._lock:
                for key, _ in ready:
                    self._on_ready(key.fileobj)  # type: ignore[arg-type]
                try:
                    self._look()
                except Exception:
                    logger.exception("looking at the control words failed; trying again")
            next_look_s = time.monotonic() + LOOK_INTERVAL_S

    def _next_report_s(self) -> float:
        pending = self._reported is None
        return self._last_report_s + (REPORT_INTERVAL_S if pending else HEARTBEAT_S)

    def _on_ready(self, source: socket.socket) -> None:
        if source is self._wake_r:
            with contextlib.suppress(BlockingIOError):
                self._wake_r.recv(4096)
        elif source is self._server:
            connection, _ = self._server.accept()
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ)
            self._trainers[connection] = _Trainer(
                hello=Hello(rank=-1, world=0, lineage="", incarnation=""), pid=peer_pid(connection), connection=connection
            )
        else:
            self._on_trainer(source)

    def _on_trainer(self, connection: socket.socket) -> None:
        trainer = self._trainers[connection]
        try:
            data = connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._on_gone(trainer)
            return
        *lines, trainer.buffer = (trainer.buffer + data).split(b"\n")
        for line in lines:
            if line == BYE:
                trainer.said_bye = True
            elif line:
                trainer.hello = Hello.from_line(line)

    def _on_gone(self, trainer: _Trainer) -> None:
        self._selector.unregister(trainer.connection)
        trainer.connection.close()
        del self._trainers[trainer.connection]
        hello = trainer.hello
        if hello.rank < 0:
            return
        if any(other.hello.incarnation == hello.incarnation for other in self._trainers.values()):
            return  # it has reconnected already
        state = self._sets.get(hello.set_index)
        if state is not None:
            slot_set = self._arena.sets[self._position(hello.set_index)]
            self._read_word(slot_set, state)
            if not self._arena.trainer_alive(slot_set):
                self._return_grants(slot_set, state)
            state.exit_reported = True
        clean = trainer.said_bye or (state is not None and state.word is not None and state.word.phase == "closing")
        how = "was ended" if trainer.ended else "died"
        reason = "left" if clean else f"trainer rank {hello.rank} (pid {trainer.pid}) {how}"
        self._say_exit(
            TrainerExited(host=self._host, lineage=hello.lineage, rank=hello.rank, clean=clean, reason=reason, ended=trainer.ended)
        )

    def _say_exit(self, event: TrainerExited) -> None:
        if not event.clean:
            self._exits = [*self._exits[-(REMEMBERED_EXITS - 1) :], event]  # told again to a Coordinator that comes later
        self._tell(event)

    def _position(self, set_index: int) -> int:
        return next(i for i, slot_set in enumerate(self._arena.sets) if slot_set.index == set_index)

    def _look(self) -> None:
        """Read every word, take over what was staged, grant what may be reused, report if anything changed."""
        for slot_set in self._arena.sets:
            state = self._sets[slot_set.index]
            self._read_word(slot_set, state)
            self._take_staged(slot_set, state)
            self._say_unseen_death(slot_set, state)
        self._grant()
        self._report()

    def _read_word(self, slot_set: SlotSet, state: _SetState) -> None:
        cell = slot_set.trainer_cell.read()
        if cell is None or cell[0] == state.word_seq:
            return
        state.word_seq = cell[0]
        state.word = trainer_word_from_json(cell[1])

    def _take_staged(self, slot_set: SlotSet, state: _SetState) -> None:
        if state.word is None:
            return
        for slot in slot_set.slots:
            done = state.word.done[slot.index] if slot.index < len(state.word.done) else 0
            if done > state.known_done[slot.index]:
                state.known_done[slot.index] = done
                state.content[slot.index] = self._read_content(slot)

    def _say_unseen_death(self, slot_set: SlotSet, state: _SetState) -> None:
        """A trainer that died while this HostActor was away never rings: its lock is free and nobody is connected."""
        word = state.word
        if word is None or state.exit_reported or self._connected(slot_set.index) or word.phase == "closing":
            return
        if not self._arena.trainer_alive(slot_set):
            state.exit_reported = True
            self._return_grants(slot_set, state)
            reason = f"trainer rank {word.rank} died while its HostActor was away"
            self._say_exit(TrainerExited(host=self._host, lineage=word.lineage, rank=word.rank, clean=False, reason=reason))

    def _connected(self, set_index: int) -> _Trainer | None:
        return next((t for t in self._trainers.values() if t.hello.set_index == set_index), None)

    def _views(self) -> list[SlotView]:
        return [
            SlotView(
                set_index=slot_set.index,
                slot_index=i,
                granted=is_granted(state.grants, state.word, i),
                content=state.content[i],
                holds=state.holds[i],
            )
            for slot_set in self._arena.sets
            for state in (self._sets[slot_set.index],)
            for i in range(len(state.grants))
        ]

    def _grant(self) -> None:
        """Hand out what may be reused, and tell every connected trainer what it has to know."""
        ready: dict[int, SlotSet] = {}
        for slot_set in self._arena.sets:
            state, trainer = self._sets[slot_set.index], self._connected(slot_set.index)
            if trainer is not None and state.word is not None and state.word.lineage == trainer.hello.lineage:
                ready[slot_set.index] = slot_set
        advice = self._advice
        current = [i for i in ready if advice is not None and self._lineage(i) == advice.lineage]
        changed = grant({i: self._sets[i].grants for i in current}, self._views(), advice, current)
        for index, grants in changed.items():
            state = self._sets[index]
            for i, number in enumerate(grants):
                if number != state.grants[i]:
                    state.content[i] = None
                    ready[index].slots[i].invalidate()
            state.grants = list(grants)
        for index, slot_set in ready.items():
            state = self._sets[index]
            # Advice about another lineage is not for this trainer, but it must learn that its run has failed.
            told = advice if index in current or (advice is not None and advice.failure is not None) else None
            word = host_word(state.grants, told)
            if word != state.host_word:
                state.host_word = word
                slot_set.host_cell.write(host_word_to_json(word))

    def _lineage(self, set_index: int) -> str:
        word = self._sets[set_index].word
        return word.lineage if word is not None else ""

    def _report(self, *, force: bool = False) -> None:
        summary = self._summary()
        now_s = time.monotonic()
        changed = self._reported is None or dataclasses.replace(summary, seq=0) != dataclasses.replace(self._reported, seq=0)
        since_s = now_s - self._last_report_s
        if not (force or (changed and since_s >= REPORT_INTERVAL_S) or since_s >= HEARTBEAT_S):
            if changed:
                self._reported = None  # due as soon as the interval allows
            return
        self._seq += 1
        self._reported = dataclasses.replace(summary, seq=self._seq)
        self._last_report_s = now_s
        self._tell(HostReported(summary=self._reported))

    def _summary(self) -> HostSummary:
        words = [state.word for index, state in self._sets.items() if state.word is not None and self._connected(index) is not None]
        # Those that have no slots yet, because they have never called save.
        words += [
            TrainerWord(lineage=trainer.hello.lineage, rank=trainer.hello.rank, world=trainer.hello.world)
            for trainer in self._trainers.values()
            if trainer.hello.rank >= 0 and trainer.hello.set_index < 0
        ]
        return summarize(
            self._host,
            self._incarnation,
            self._seq,
            self._views(),
            words,
            base=self._base,
            advice=self._advice,
            attempt=self._attempt,
        )

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_w.send(b"x")

    # ------------------------------------------------------------ calls of trainers

    def allot(
        self, *, incarnation: str, rank: int, pid: int, data_bytes: int, table_bytes: int, buffer_bytes: int, slots: int
    ) -> tuple[str, int]:
        """Slots for a trainer: (path of the set, its index). CapacityError when they don't fit."""
        with self._lock:
            self._arena.drop_stale_sets(keep=self._wanted)
            for index in set(self._sets) - {slot_set.index for slot_set in self._arena.sets}:
                del self._sets[index]
            slot_set = self._arena.allot(
                trainer=incarnation,
                rank=rank,
                pid=pid,
                data_bytes=data_bytes,
                table_bytes=table_bytes,
                buffer_bytes=buffer_bytes,
                slots=slots,
            )
            count = len(slot_set.slots)
            state = _SetState(
                grants=[0] * count, content=[None] * count, holds=[0] * count, discard=[False] * count, known_done=[0] * count
            )
            old = self._sets.get(slot_set.index)
            if old is not None:
                state.holds, state.discard = old.holds, old.discard
            for slot in slot_set.slots:
                if not state.discard[slot.index]:
                    state.content[slot.index] = self._read_content(slot)
            state.host_word = HostWord(grants=tuple(state.grants))
            slot_set.host_cell.write(host_word_to_json(state.host_word))
            self._sets[slot_set.index] = state
            return str(slot_set.path), slot_set.index

    def _wanted(self, header: SlotHeader) -> bool:
        """Whether a recovery or a running save may still need this slot's set: as long as nobody has invalidated it."""
        advice = self._advice
        return (
            advice is None or not advice.decided or header.lineage == advice.lineage or (header.lineage, header.step) in advice.keep
        )

    def contents(self) -> list[tuple[str, int, Staged]]:
        """What is held here: (set path, slot index, what)."""
        with self._lock:
            return [
                (str(slot_set.path), i, content)
                for slot_set in self._arena.sets
                for i, content in enumerate(self._sets[slot_set.index].content)
                if content is not None
            ]

    def fetch(self, *, lineage: str, step: int, rank: int, with_data: bool) -> RankData:
        """One rank's piece of a snapshot for another node. StepNotFoundError if it isn't here."""
        with self._holding(lineage, step, (rank,)) as found:
            if rank not in found:
                raise StepNotFoundError(
                    f"host {self._host[:8]} does not hold rank {rank} of step {step}", step=step, host=self._host, rank=rank
                )
            slot = found[rank]
            content = slot.read()
            assert content is not None
            table = SlotTable.from_bytes(content.table)
            data = np.array(content.data) if with_data else None
            return RankData(layout=self._arena.get_layout(table.layout_ref), table=content.table, data=data)

    @contextlib.contextmanager
    def _holding(self, lineage: str, step: int, ranks: tuple[int, ...]) -> Iterator[dict[int, Slot]]:
        """The slots with these ranks' pieces; none is reused or invalidated before the end of the block."""
        found: dict[int, Slot] = {}
        held: list[tuple[_SetState, int]] = []
        with self._lock:
            for slot_set in self._arena.sets:
                state = self._sets[slot_set.index]
                for i, content in enumerate(state.content):
                    if (
                        content is not None
                        and content.lineage == lineage
                        and content.step == step
                        and content.rank in ranks
                        and content.rank not in found
                        and not state.discard[i]
                    ):
                        found[content.rank] = slot_set.slots[i]
                        state.holds[i] += 1
                        held.append((state, i))
        try:
            yield found
        finally:
            with self._lock:
                for state, i in held:
                    state.holds[i] -= 1
                    if state.holds[i] == 0 and state.discard[i]:
                        state.discard[i] = False
                        self._discard_slot_of(state, i)
            self._wake()

    def _discard_slot_of(self, state: _SetState, slot_index: int) -> None:
        for slot_set in self._arena.sets:
            if self._sets.get(slot_set.index) is state:
                slot_set.slots[slot_index].invalidate()
                state.content[slot_index] = None

    # ------------------------------------------------------------ calls of the Coordinator

    def _is_stale(self, attempt: int) -> bool:
        """Whether an order comes from an attempt that has been superseded, as far as this host knows."""
        if self._attempt is not None and attempt < self._attempt:
            return True
        if self._attempt is None or attempt > self._attempt:
            self._attempt = attempt
            for event in self._exits:
                self._tell(event)
        return False

    def advise(self, advice: Advice) -> None:
        with self._lock:
            if self._is_stale(advice.attempt) or not is_newer_advice(advice, self._advice):
                return
            self._advice = carried_on(advice, self._advice)
        self._wake()

    def invalidate(self, command: Invalidate) -> None:
        """Discard what a recovery has given up, then say so. One that is not newer than the last changes nothing."""
        with self._lock:
            if self._is_stale(command.attempt):
                return
            if applies(command, self._base):
                self._base = command
                self._keep_base(command)
                for slot_set in self._arena.sets:
                    self._discard_given_up(slot_set, command)
            self._report(force=True)
        self._tell(Invalidated(host=self._host, lineage=command.lineage, step=command.step))

    def _load_base(self) -> Invalidate | None:
        """A restarted HostActor must know what its predecessor had discarded by."""
        try:
            return Invalidate(**json.loads((self._arena.path / BASE).read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def _keep_base(self, command: Invalidate) -> None:
        part = self._arena.path / f"{BASE}.part"
        part.write_text(json.dumps(dataclasses.asdict(command)))
        part.replace(self._arena.path / BASE)

    def _discard_given_up(self, slot_set: SlotSet, command: Invalidate) -> None:
        state = self._sets[slot_set.index]
        for i, content in enumerate(state.content):
            if content is None or not is_discarded(command, content.lineage, content.step):
                continue
            if state.holds[i]:
                state.discard[i] = True
            else:
                slot_set.slots[i].invalidate()
            state.content[i] = None

    def end_trainers(self, *, lineage: str, reason: str) -> int:
        """SIGKILL this lineage's trainers on this node; how many."""
        with self._lock:
            doomed = [t for t in self._trainers.values() if t.hello.lineage == lineage and not t.said_bye]
            for trainer in doomed:
                trainer.ended = trainer.ended or not has_hung_up(trainer.connection)  # else it was dead already, of itself
                logger.warning("ending trainer rank %d (pid %d): %s", trainer.hello.rank, trainer.pid, reason)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(trainer.pid, signal.SIGKILL)
        return len(doomed)

    def write(self, command: Write) -> HostPart:
        """Write this host's owned shards of a snapshot under the save's unique names.

        A save id is executed once: the same command again gets the same outcome.
        """
        with self._lock:
            if self._is_stale(attempt_of(command.save) or 0):
                raise StaleAttemptError(f"save {command.save} is of a superseded attempt", step=command.step, host=self._host)
            if command.save in self._used_up:
                raise StepNotFoundError(f"save {command.save} was executed before on host {self._host[:8]}", step=command.step)
            running = self._saves.get(command.save)
            if running is None:
                # On a thread that gives way to training; TensorStore's own threads inherit that from it.
                running = self._saves[command.save] = self._writers.submit(self._write, command)
                for old in [save for save, one in self._saves.items() if one.done()][:-REMEMBERED_SAVES]:
                    del self._saves[old]
                    self._used_up.add(old)
        return running.result()

    def _write(self, command: Write) -> HostPart:
        with self._holding(command.lineage, command.step, command.ranks) as found:
            missing = sorted(set(command.ranks) - set(found))
            if missing:
                raise StepNotFoundError(
                    f"host {self._host[:8]} does not hold ranks {missing} of step {command.step}", step=command.step
                )
            return self._write_found(command, found)

    def _write_found(self, command: Write, found: dict[int, Slot]) -> HostPart:
        writer = f"{command.save}h{self._host[:12]}"
        folder = StepFolder(self._storage, command.step, command.save)
        trees: tuple[TreeSpec, ...] = ()
        tables: dict[int, SlotTable] = {}
        pieces: dict[int, list[tuple[int, tuple[int, ...], np.ndarray]]] = {}
        for rank, slot in sorted(found.items()):
            content = slot.read()
            assert content is not None
            table = tables[rank] = SlotTable.from_bytes(content.table)
            layout = Layout.from_bytes(self._arena.get_layout(table.layout_ref))
            trees = trees or layout.trees
            for piece, expected in zip(layout.pieces, table.crc32c, strict=True):
                if not piece.owned:
                    continue
                data = content.data[piece.offset : piece.offset + piece.nbytes]
                if crc32c(data) != expected:
                    name = layout.trees[piece.tree].leaves[piece.leaf].name
                    raise CorruptCheckpointError(
                        f"step {command.step}: {name!r} of rank {rank} was damaged in the memory of host {self._host[:8]}",
                        step=command.step, rank=rank, path=name, host=self._host,
                    )  # fmt: skip
                pieces.setdefault(piece.tree, []).append((piece.leaf, piece.start, as_array(data, layout, piece)))
        objects: dict[str, list[DataObject]] = {}
        claims: dict[str, list[tuple[int, tuple[int, ...], tuple[int, ...]]]] = {}
        for index, tree in enumerate(trees):
            mine = pieces.get(index, [])
            claims[tree.item] = [(leaf, start, array.shape) for leaf, start, array in mine]
            if mine:
                objects[tree.item] = write_share(self._storage, folder.write_prefix, writer, tree, mine)
        fault_points.reached("writing")
        return HostPart(host=self._host, writer=writer, trees=trees, objects=objects, claims=claims, tables=tables)

    # ------------------------------------------------------------ end

    def close(self, *, remove_arena: bool) -> None:
        with self._lock:
            self._stopping = True
        self._wake()
        self._thread.join(timeout=10.0)
        self._writers.shutdown(wait=False, cancel_futures=True)
        for trainer in list(self._trainers.values()):
            trainer.connection.close()
        self._selector.close()
        self._server.close()
        self._wake_r.close()
        self._wake_w.close()
        self._arena.close(remove=remove_arena)


def as_array(data: np.ndarray, layout: Layout, piece: Any) -> np.ndarray:
    """The piece's bytes as an array of its dtype and shape, without a copy."""
    import ml_dtypes  # noqa: F401 - registers bfloat16 and friends with numpy

    spec = layout.trees[piece.tree].leaves[piece.leaf].array
    assert spec is not None
    return data.view(np.dtype(spec.dtype)).reshape(piece.shape)


def trainer_word_to_json(word: TrainerWord) -> bytes:
    return json.dumps(dataclasses.asdict(word), separators=(",", ":")).encode()


def trainer_word_from_json(data: bytes) -> TrainerWord:
    return TrainerWord(**_with_tuples(json.loads(data)))


def host_word_to_json(word: HostWord) -> bytes:
    return json.dumps(dataclasses.asdict(word), separators=(",", ":")).encode()


def host_word_from_json(data: bytes) -> HostWord:
    from raystate.core.messages import Failure, Proposal

    raw = json.loads(data)
    if raw["proposal"] is not None:
        raw["proposal"] = Proposal(**raw["proposal"])
    if raw["failure"] is not None:
        raw["failure"] = Failure(**raw["failure"])
    return HostWord(**_with_tuples(raw))


def _with_tuples(raw: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no tuples."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()}
