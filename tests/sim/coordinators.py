"""Simulated Coordinator processes: core's Coordinator, and every command carried out step by step against the storage."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from raystate.core.coordinator.machine import NO_REST, Coordinator
from raystate.core.formats.entries import own_commits
from raystate.core.formats.log import claim_entry
from raystate.core.formats.messages import (
    Answer,
    Append,
    Appended,
    BuildPackage,
    CarriedOut,
    CarryOut,
    Claimed,
    Discard,
    Finish,
    HostOrder,
    Intent,
    LiveStep,
    Log,
    LogEntry,
    Packaged,
    SnapshotId,
    Tick,
    Write,
)
from raystate.machine.own_time import OwnTime
from tests.sim.faults import spring_folder_trap
from tests.sim.nodes import Proc
from tests.sim.storage import FILES, MARKER, Package, Token
from tests.steps import keep_newest

if TYPE_CHECKING:
    from tests.sim.world import World

TICK_S = 2.5
BATCHED = 0.1  # of the events come just before another one
KEPT = 2  # steps that retention keeps
_JUDGES = re.compile(
    # Of steps that gave way to newer ones while storage was slow a host may say that it does not hold them any more.
    r"is (down|silent)|made no step|failed \(try(?!.*does not hold)|did not (finish|construct|close)|is withdrawn|waited|are? not reported"
)


class CoordinatorProc(Proc):
    """One process; asleep, it goes on exactly where it was."""

    def __init__(self, world: World, writer: str, dead: tuple[int, ...]):
        super().__init__()
        self.world = world
        self.writer = writer
        self.core = Coordinator(world.settings)
        self.dead_before = dead
        born_s = world.now_s
        self.own_time = OwnTime(lambda: world.now_s - born_s)
        self.over = False

    # ---------------------------------------------------------------- the claim

    def claim(self) -> None:
        world, storage = self.world, self.world.storage
        if storage.outage:
            world.on(self, 1.0, self.claim)
            return
        tail = storage.log[-1] if storage.log else None
        entry = claim_entry(tail, self.writer, "run", dead=self.dead_before)
        world.on(self, 0.05 + 0.1 * world.random(), self._claim, entry)

    def _claim(self, entry: LogEntry) -> None:
        world = self.world
        if not world.storage.create(entry):
            self.claim()
            return
        nodes = [node for node in world.nodes if node.up and node.actor is not None and node.actor.alive]
        world.claimed(self)
        self.feed(
            Claimed(
                entry=entry,
                hosts=tuple(node.id for node in nodes),
                dead=self.dead_before,
            )
        )
        for node in nodes:
            world.hello(self, node)
        world.on(self, TICK_S, self.tick)

    def tick(self) -> None:
        self.feed(_TICK)
        if not self.over:
            self.world.on(self, TICK_S, self.tick)

    # ---------------------------------------------------------------- events in, commands out

    def feed(self, event: Any) -> None:
        if not self.alive:
            return
        if more := event is not _TICK and self.world.random() < BATCHED:
            self.world.on(self, 0.1 * self.world.random(), self.feed, _TICK)
        commands = self.core.handle(event, self.own_time(), more=more)
        if more:  # judged by the hosts that were known then: the batch may bring another one
            self.world.check_stable(self, SnapshotId(self.core.snapshots._lineage, self.core.snapshots.stable))
        for command in commands:
            kind = type(command)
            if isinstance(command, Log):
                if command.text.startswith(NO_REST):
                    self.world.violated(f"the Coordinator settles: {command.text}")
                if self.world.is_still and _JUDGES.search(command.text):
                    self.world.violated(f"standing still is no fault of others: {command.text}")
                if self.world.tracing:
                    self.world.trace.append((self.world.now_s, f"{self.writer} log", command.text))
                continue
            self.world.emitted(self, command)
            (CoordinatorProc._order if isinstance(command, HostOrder) else _DO[kind])(self, command)

    def _answer(self, command: Answer) -> None:
        self.world.answer(command)

    def _order(self, command: Any) -> None:
        self.world.order(self, command)

    # ---------------------------------------------------------------- storage, step by step

    def _step(self, fn: Any, *args: Any) -> None:
        """One storage request. A process that sleeps or dies does so between two."""
        world = self.world
        world.on(self, (0.05 + 0.3 * world.random()) * world.pace, fn, *args)

    def _append(self, command: Append) -> None:
        self._step(self._append_now, command.entry)

    def _falls_asleep(self, where: str) -> bool:
        """Between deciding and doing: the fault that leaves a zombie in the middle of an operation."""
        return self.world.trap == where and self.world.sleep_now(self)

    def _append_now(self, entry: LogEntry) -> None:
        if self._falls_asleep("append"):
            self._step(self._append_now, entry)
            return
        world, storage = self.world, self.world.storage
        seq = entry.seq
        new = [one.save for one in own_commits(entry)]
        is_next = seq == len(storage.log) + 1
        if new and is_next:
            spring_folder_trap(world)
        if storage.outage:
            self._step(self.feed, Appended(seq=seq, outcome="failed", error="storage is out"))
            return
        lost = [save for save in new if save not in storage.packages]
        if lost and is_next and "append_unfounded" not in world.mutations:
            self._step(self.feed, Appended(seq=seq, outcome="refused", error=f"the package of {lost[0]} is gone"))
            return
        made = storage.create(entry)
        if not made and "stale_commits" in world.mutations and entry.kind == "commit" and storage.log[-1].writer != self.writer:
            made = storage.create(world.renumbered(entry))
        if world.lost_acks > 0:
            world.lost_acks -= 1
            outcome = Appended(seq=seq, outcome="failed", error="connection reset")
        elif made:
            outcome = Appended(seq=seq, outcome="ok")
        else:
            outcome = Appended(seq=seq, outcome="taken", tail=storage.log[-1])
        self._step(self.feed, outcome)

    def _build(self, command: BuildPackage) -> None:
        self._step(self._build_now, command)

    def _build_now(self, command: BuildPackage) -> None:
        world, storage = self.world, self.world.storage
        error = ""
        pieces: dict[int, Token] = {}
        if storage.outage:
            error = "storage is out"
        else:
            parts = storage.parts.get(command.save, {})
            for host in command.hosts:
                pieces.update(parts.get(host, {}))
            if "merge_strangers" in world.mutations:
                for save in sorted(storage.parts, reverse=True):
                    for tokens in storage.parts[save].values():
                        pieces.update({rank: token for rank, token in tokens.items() if token[1] == command.step})
            size = world.world_of(command.lineage)
            missing = [rank for rank in range(size) if rank not in pieces]
            if missing and "no_coverage" not in world.mutations:
                error = f"ranks {missing} are not covered"
            else:
                storage.packages[command.save] = Package(command.step, command.save, size, pieces)
                storage.work.add(command.save)
        kept = keep_newest(KEPT)([*command.live, LiveStep(step=command.step, save=command.save)])
        self._step(self.feed, Packaged(save=command.save, error=error, kept=tuple(kept)))
        if "publish_first" in world.mutations and not error:
            intent = Intent(kind="commit", step=command.step, save=command.save, attempt=self.core.attempt, seq=-1)
            self._publish(intent)

    def _carry_out(self, command: CarryOut) -> None:
        if command.intent.kind == "commit":
            self._publish(command.intent)
        else:
            self._retire(command.intent)

    def _publish(self, intent: Intent) -> None:
        if self.world.storage.is_directory:
            self._step(self._rename, intent)
            return
        names = (MARKER, *FILES) if "marker_first" in self.world.mutations else (*FILES, MARKER)
        self._step(self._put, intent, names)

    def _put(self, intent: Intent, names: tuple[str, ...]) -> None:
        if self._falls_asleep("publish"):
            self._step(self._put, intent, names)
            return
        storage = self.world.storage
        error = ""
        if storage.outage:
            error = "storage is out"
        elif not storage.put(intent.step, names[0], intent.save or ""):
            error = f"{names[0]} of step {intent.step} is there with other bytes"
        elif len(names) > 1:
            self._step(self._put, intent, names[1:])
            return
        self._step(self.feed, CarriedOut(intent=intent, error=error))

    def _rename(self, intent: Intent) -> None:
        if self._falls_asleep("publish"):
            self._step(self._rename, intent)
            return
        storage = self.world.storage
        error = ""
        if storage.outage:
            error = "storage is out"
        elif not storage.rename(intent.step, intent.save or ""):
            error = f"step {intent.step} is there from another save, or its source is gone"
        self._step(self.feed, CarriedOut(intent=intent, error=error))

    def _retire(self, intent: Intent) -> None:
        if intent.aside:
            self.world.storage.aside.add(intent.step)
        names: tuple[tuple[str, ...], ...] = ((MARKER, *FILES),) if self.world.storage.is_directory else ((MARKER,), FILES)
        self._step(self._remove, intent, names)

    def _remove(self, intent: Intent, names: tuple[tuple[str, ...], ...]) -> None:
        if self._falls_asleep("retire"):
            self._step(self._remove, intent, names)
            return
        storage = self.world.storage
        error = ""
        if storage.outage:
            error = "storage is out"
        else:
            storage.remove(intent.step, intent.save, names[0], aside=intent.aside)
            if len(names) > 1:
                self._step(self._remove, intent, names[1:])
                return
        self._step(self.feed, CarriedOut(intent=intent, error=error))

    def _discard(self, command: Discard) -> None:
        if self.world.random() < 0.3:
            return  # best effort
        self._step(self._discard_now, command)

    def _discard_now(self, command: Discard) -> None:
        storage = self.world.storage
        if (command.step, command.save) in storage.committed:
            self.world.violated(f"visible means complete: save {command.save} is committed and its parts are discarded")
        storage.parts.pop(command.save, None)
        storage.work.discard(command.save)

    # ---------------------------------------------------------------- the end

    def _finish(self, command: Finish) -> None:
        self.over = True
        if command.by_attempt is None:
            self.world.finished(self, command)
        else:
            self.world.superseded(self)


_TICK = Tick()
_DO: dict[type, Any] = {
    Answer: CoordinatorProc._answer,
    Write: CoordinatorProc._order,
    BuildPackage: CoordinatorProc._build,
    Append: CoordinatorProc._append,
    CarryOut: CoordinatorProc._carry_out,
    Discard: CoordinatorProc._discard,
    Finish: CoordinatorProc._finish,
}
