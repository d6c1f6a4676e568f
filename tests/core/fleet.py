"""A Coordinator with one rank on each of many hosts: what an event costs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from raystate.core.coordinator.machine import Coordinator
from raystate.core.formats.log import claim_entry
from raystate.core.formats.messages import (
    Advise,
    Answer,
    Append,
    Appended,
    Ask,
    BuildPackage,
    CarriedOut,
    CarryOut,
    Claimed,
    Command,
    EndTrainers,
    Event,
    Finish,
    FlushAsked,
    FlushReply,
    HostId,
    HostReported,
    HostSummary,
    Invalidate,
    Joined,
    JoinReply,
    LeaveAsked,
    LeaveReply,
    Log,
    Packaged,
    RestoreAsked,
    RestoreChoice,
    RestoreSettled,
    RestoreTried,
    Settings,
    SnapshotId,
    Staged,
    StopAsked,
    Tick,
    TrainerExited,
    TrainerWord,
    Write,
    Written,
)


class Fleet:
    """One rank on each of many hosts, and a Coordinator; answers to its commands wait in `later` until `settle`."""

    def __init__(self, count: int):
        self.count = count
        self.core = Coordinator(Settings(run="r", storage="s", host_timeout_s=1e6, replicas=0))
        self.now_s = 0.0
        self.later: list[Event] = []
        self.seq = [0] * count
        self.held: list[tuple[Staged, ...]] = [()] * count
        self.seen: list[tuple[TrainerWord, ...]] = [()] * count
        self.advised: list[tuple[int, int] | None] = [None] * count
        self.base: list[Invalidate | None] = [None] * count
        self.dirty: dict[int, None] = {}
        self.lineage = ""
        self.number = 0
        self.asks = 0
        self.said: list[Any] = []
        self._next: Event | None = Claimed(entry=claim_entry(None, "w", "r"))

    # ---------------------------------------------------------------- events

    def send(self, event: Event) -> None:
        """With the next event, or the end of the batch."""
        self._pass_on(more=True)
        self._next = event

    def look(self) -> None:
        """The batch ends here."""
        self._pass_on(more=False)

    def _pass_on(self, *, more: bool) -> None:
        event, self._next = self._next, None
        if event is not None:
            self.now_s += 1e-4
            for command in self.core.handle(event, self.now_s, more=more):
                self._obey(command)

    def _obey(self, command: Command) -> None:
        if isinstance(command, Advise):
            host = int(command.host)
            self.advised[host] = (command.advice.attempt, command.advice.seq)
            self.dirty[host] = None
        elif isinstance(command, Invalidate):
            self.base[int(command.host)] = command
            self.dirty[int(command.host)] = None
        elif isinstance(command, Write):
            self.later.append(Written(host=command.host, save=command.save))
        elif isinstance(command, BuildPackage):
            self.later.append(Packaged(save=command.save, kept=(command.step, *(one.step for one in command.live))))
        elif isinstance(command, Append):
            self.later.append(Appended(seq=command.entry.seq, outcome="ok"))
        elif isinstance(command, CarryOut):
            self.later.append(CarriedOut(intent=command.intent))
        elif isinstance(command, Answer):
            self.said.append(command.reply)
        else:
            assert isinstance(command, Log | EndTrainers | Finish), command

    def settle(self) -> None:
        """Answers, and the reports that say which advice has come, until nothing is left."""
        self.look()
        while self.later or self.dirty:
            waiting, self.later = self.later, []
            for event in waiting:
                self.send(event)
            told, self.dirty = self.dirty, {}
            for host in told:
                self.report(host)
            self.send(Tick())
            self.look()

    def report(self, host: int) -> None:
        self.seq[host] += 1
        self.send(
            HostReported(
                summary=HostSummary(
                    host=HostId(str(host)),
                    incarnation=f"i{host}",
                    seq=self.seq[host],
                    staged=self.held[host],
                    trainers=self.seen[host],
                    advised=self.advised[host],
                    base=self.base[host],
                    attempt=1,
                )
            )
        )

    def word(self, host: int, step: int, pending: tuple[int, ...] = (), **more: Any) -> None:
        seen = TrainerWord(
            rank=host, world=self.count, lineage=self.lineage, newest_step=step, number=self.number, pending=pending, **more
        )
        self.seen[host] = (seen,)
        self.report(host)

    def ask(self) -> Ask:
        self.asks += 1
        return Ask(f"q{self.asks}")

    # ---------------------------------------------------------------- what a run does

    def join(self, group: str) -> None:
        for host in range(self.count):
            self.seen[host] = ()
            self.report(host)
        for host in range(self.count):
            self.send(Joined(ask=self.ask(), group=group, rank=host, world=self.count, host=HostId(str(host))))
        self.settle()
        self.lineage = next(one.lineage for one in reversed(self.said) if isinstance(one, JoinReply))

    def restore(self) -> RestoreChoice:
        self.number += 1
        for host in range(self.count):
            self.word(host, -1)
        for host in range(self.count):
            self.send(RestoreAsked(ask=self.ask(), lineage=self.lineage, rank=host, word=self.number))
        self.settle()
        choice = next(one for one in reversed(self.said) if isinstance(one, RestoreChoice))
        for host in range(self.count):
            said = {"step": choice.step, "begins": choice.begins, "tier": choice.tier}
            self.send(RestoreTried(ask=self.ask(), lineage=self.lineage, rank=host, ok=True, **said))
        self.settle()
        assert sum(isinstance(one, RestoreSettled) for one in self.said[-self.count :]) == self.count
        self.lineage = choice.begins
        for host in range(self.count):
            self.word(host, choice.step)
        self.settle()
        return choice

    def stage(self, host: int, step: int, *, promised: bool, newest: int | None = None) -> None:
        piece = Staged(rank=host, world=self.count, lineage=self.lineage, step=step, layout="L", promised=promised)
        self.held[host] = (*self.held[host][-2:], piece)
        self.word(host, step if newest is None else newest)

    def step(self, step: int, *, promised: bool = False) -> None:
        """Each rank calls save(), stages, and its host reports both."""
        for host in range(self.count):
            self.word(host, step, (step,))
        for host in range(self.count):
            self.stage(host, step, promised=promised)
        self.settle()
        assert self.core.snapshots.stable == (step, 0)
        assert not promised or self.core.journal.durable_step == step

    def flush(self, step: int) -> None:
        """All ranks are a step further and wait for a promised one, of which the last rank's copy comes late."""
        self.number += 1
        late = self.count - 1
        for host in range(self.count):
            self.word(host, step, (step,))
        for host in range(late):
            self.stage(host, step, promised=True)
        promised = (SnapshotId(self.lineage, step, 0),)
        for host in range(self.count):
            self.send(FlushAsked(ask=self.ask(), lineage=self.lineage, rank=host, promised=promised, word=self.number + 1))
        self.number += 1
        for host in range(self.count):
            self.word(host, step + 1, (step,) if host == late else ())
        self.settle()
        before = len(self.said)
        self.stage(late, step, promised=True, newest=step + 1)
        self.settle()
        replies = self.said[before:]
        assert len(replies) == self.count
        assert all(isinstance(one, FlushReply) and (one.durable_step, one.errors) == (step, ()) for one in replies)

    def stop(self, newest: int) -> None:
        """All ranks agree on a step to stop at, and come there."""
        self.send(StopAsked(reason="enough", within_s=None))
        self.settle()
        proposal = self.core.snapshots.proposal
        assert proposal is not None
        answer = {"ack_id": proposal.id, "ack_ok": True, "ack_step": newest}
        for step in (newest, proposal.step):
            for host in range(self.count):
                self.word(host, step, **answer)
            self.settle()
        assert self.core.snapshots.proposal == dataclasses.replace(proposal, state="confirmed")

    def close(self, step: int) -> None:
        """All ranks end with a step that is not durable yet."""
        self.number += 1
        for host in range(self.count):
            self.stage(host, step, promised=False)
        last = SnapshotId(self.lineage, step, 0)
        for host in range(self.count):
            self.send(LeaveAsked(ask=self.ask(), lineage=self.lineage, rank=host, last=last, word=self.number))
        self.settle()
        assert [one.step for one in self.said[-self.count :] if isinstance(one, LeaveReply)] == [step] * self.count

    def recover(self, group: str) -> None:
        """A rank dies; the next group restores what all hold."""
        self.send(TrainerExited(host=HostId("0"), lineage=self.lineage, rank=0, clean=False, reason="killed"))
        self.settle()
        self.join(group)
        assert self.restore().tier == "memory"


def ready(count: int) -> Fleet:
    fleet = Fleet(count)
    fleet.join("g")
    fleet.restore()
    fleet.step(1)
    return fleet


PHASES: dict[str, Callable[[Fleet], None]] = {
    "a snapshot": lambda fleet: fleet.step(2),
    "a durable step": lambda fleet: fleet.step(3, promised=True),
    "a recovery": lambda fleet: fleet.recover("h"),
    "a flush": lambda fleet: fleet.flush(4),
    "a stop": lambda fleet: fleet.stop(5),
    "a close": lambda fleet: fleet.close(50),
}
