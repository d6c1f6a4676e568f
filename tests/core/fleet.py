"""A Coordinator with one rank on each of many hosts: what an event costs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from raystate.core.formats.messages import Command, FlushReply, LeaveReply, StopAsked
from tests.core.driver import Driver


class Fleet(Driver):
    """One rank on each of many hosts. Events wait until `settle` passes them on, a batch at a time."""

    def __init__(self, count: int):
        self.waiting: list[Any] = []
        self.hosts = [str(number) for number in range(count)]
        super().__init__(keep_last=None)

    def send(self, event: Any) -> list[Command]:
        self.waiting.append(event)
        return []

    def settle(self) -> None:
        """Until nothing is left of the answers, and of the reports that say which advice has come."""
        while self.waiting:
            batch, self.waiting = self.waiting, []
            for left, event in zip(range(len(batch) - 1, -1, -1), batch, strict=True):
                self.now_s += 1e-4
                self.took(self.core.handle(event, self.now_s, more=left > 0))

    # ---------------------------------------------------------------- what a run does

    def step(self, step: int, *, promised: bool = False) -> None:
        """Each rank calls save(), stages, and its host reports both."""
        self.say(step, pending=(step,))
        self.stage(step, promised=promised)
        self.settle()
        assert self.core.snapshots.stable == step
        assert not promised or self.core.journal.durable_step == step

    def wait_for(self, step: int) -> None:
        """All ranks are a step further and wait for a promised one, of which the last rank's copy comes late."""
        late = self.world - 1
        self.say(step, pending=(step,))
        for rank in range(late):
            self.hold(rank, step, promised=True)
        for rank in range(self.world):
            self.flush(rank, self.key(step), word=self.numbers[rank] + 1)
        self.say(step + 1, pending=(step,))
        self.settle()
        assert not self.replies(FlushReply)
        self.hold(late, step, promised=True)
        self.word(late, step + 1)
        self.settle()
        assert [(one.durable_step, one.errors) for one in self.replies(FlushReply)] == [(step, ())] * self.world

    def stop(self, newest: int) -> None:
        """All ranks agree on a step to stop at, and come there."""
        self.send(StopAsked(reason="enough", within_s=None))
        self.settle()
        asked = self.proposal
        confirmed = self.agree(at=newest)
        self.say(asked.step, ack_id=asked.id, ack_ok=True, ack_step=newest)
        self.settle()
        assert confirmed == dataclasses.replace(asked, state="confirmed") == self.proposal

    def close(self, step: int) -> None:
        """All ranks end with a step that is not durable yet."""
        self.stage(step)
        self.leave(self.key(step))
        self.settle()
        assert [one.step for one in self.replies(LeaveReply)] == [step] * self.world

    def recover(self, group: str) -> None:
        """A rank dies; the next group restores what all hold."""
        self.exits(0)
        self.join(self.hosts, group)
        assert self.restore().tier == "memory"


def ready(count: int) -> Fleet:
    fleet = Fleet(count)
    fleet.join(fleet.hosts)
    fleet.restore()
    fleet.step(1)
    return fleet


PHASES: dict[str, Callable[[Fleet], None]] = {
    "a snapshot": lambda fleet: fleet.step(2),
    "a durable step": lambda fleet: fleet.step(3, promised=True),
    "a recovery": lambda fleet: fleet.recover("h"),
    "a flush": lambda fleet: fleet.wait_for(4),
    "a stop": lambda fleet: fleet.stop(5),
    "a close": lambda fleet: fleet.close(50),
}
