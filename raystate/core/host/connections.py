"""The trainers that are connected to one host: who came, who left, who died, who has to end."""

from __future__ import annotations

from dataclasses import dataclass

from raystate.core.formats.events import TrainerExited
from raystate.core.formats.host_messages import Connected, Disconnected, Examined, HostCommand, Kill
from raystate.core.formats.names import HostId, group_of
from raystate.core.formats.orders import EndTrainers
from raystate.core.formats.reports import TrainerWord
from raystate.core.host.slot_sets import SetState, SlotSets

REMEMBERED_EXITS = 64


@dataclass(slots=True)
class Connection:
    """A trainer's connection to this host's door."""

    hello: Connected
    ended: str = ""  # why this host killed it
    hung: str = ""  # the same, if that is its own fault
    stack: str = ""


class Connections:
    """The trainers that are connected to one host.

    Args:
        host: its node.
        slot_sets: what their slots hold.

    Attributes:
        trainers: by connection.
        out: where commands go; the machine's, for the event at hand.
    """

    def __init__(self, host: HostId, slot_sets: SlotSets):
        self._host = host
        self._slot_sets = slot_sets
        self.trainers: dict[int, Connection] = {}
        self._exits: list[TrainerExited] = []
        self.out: list[HostCommand] = []

    def is_connected(self, one: SetState) -> bool:
        """Whether the trainer of that set is connected."""
        return any(trainer.hello.set_index == one.index for trainer in self.trainers.values())

    @property
    def suspects(self) -> tuple[int, ...]:
        """Sets whose trainer is not connected, and may still have slots of it: is their lock free?"""
        return tuple(
            one.index
            for one in self._slot_sets.sets.values()
            if not self.is_connected(one)
            and one.word is not None
            and (not one.exited or any(map(one.is_granted, range(len(one.slots)))))
        )

    # ---------------------------------------------------------------- they come and go

    def connected(self, event: Connected) -> None:
        """A trainer says who it is, perhaps once more: its slots may be others now."""
        known = self.trainers.get(event.connection)
        if known is None:
            self.trainers[event.connection] = Connection(event)
        else:
            known.hello = event

    def disconnected(self, event: Disconnected) -> bool:
        """Whether a trainer was connected there. Its end is told, unless it lives (and reconnects) or has done so already."""
        trainer = self.trainers.pop(event.connection, None)
        if trainer is None:
            return False
        hello = trainer.hello
        if any(other.hello.trainer == hello.trainer for other in self.trainers.values()):
            return True
        one = self._slot_sets.sets.get(hello.set_index)
        word = one.word if one is not None else None
        if event.alive and word is not None and not event.said_bye:
            return True
        if one is not None:
            one.end()
        clean = not trainer.ended and not trainer.hung and (event.said_bye or (word is not None and word.phase == "closing"))
        if clean:
            reason = "left"
        elif trainer.hung:
            reason = trainer.hung
        elif trainer.ended:
            reason = f"trainer rank {hello.rank} (pid {hello.pid}) was ended: {trainer.ended}"
        elif word is not None and word.phase == "failed":
            reason = word.error or f"trainer rank {hello.rank} (pid {hello.pid}) failed"
        else:
            reason = f"trainer rank {hello.rank} (pid {hello.pid}) died"
        self._say_exit(hello.lineage, hello.rank, clean=clean, reason=reason, trainer=trainer)
        return True

    def unlocked(self, one: SetState) -> None:
        """A set's lock is free: its connection had ended before, or its trainer died while no HostActor looked and it never rang."""
        word = one.word
        if word is None or one.exited:
            return
        one.end()
        reason = word.error if word.phase == "failed" and word.error else f"trainer rank {word.rank} died"
        self._say_exit(word.lineage, word.rank, clean=word.phase == "closing", reason=reason)

    def _say_exit(self, lineage: str, rank: int, *, clean: bool, reason: str, trainer: Connection | None = None) -> None:
        hung, stack = (False, "") if trainer is None else (bool(trainer.hung), trainer.stack)
        event = TrainerExited(
            host=self._host,
            lineage=lineage,
            rank=rank,
            clean=clean,
            reason=reason,
            ended=trainer is not None and bool(trainer.ended) and not hung,
            hung=hung,
            stack=stack,
        )
        if not clean:
            self._exits = [*self._exits[-(REMEMBERED_EXITS - 1) :], event]
        self.out.append(event)

    def tell_exits_again(self) -> None:
        """Tell all unclean ends once more: a Coordinator that came later has not heard of them."""
        self.out += self._exits

    def end(self, order: EndTrainers) -> None:
        """Kill the group's trainers, but for those that leave by themselves."""
        for trainer in self.trainers.values():
            hello = trainer.hello
            one = self._slot_sets.sets.get(hello.set_index)
            leaving = one is not None and one.word is not None and one.word.phase in ("closing", "failed")
            if group_of(hello.lineage) != group_of(order.lineage) or leaving:
                continue
            if not order.hanging and trainer.hung:
                continue  # it is being examined, and ends then
            if not order.hanging:
                trainer.ended = trainer.ended or order.reason
                self.out.append(Kill(pid=hello.pid, rank=hello.rank, reason=order.reason))
            elif hello.rank in order.hanging and not trainer.hung:
                trainer.hung = order.reason
                self.out.append(Kill(pid=hello.pid, rank=hello.rank, reason=order.reason, examine=hello.connection))

    def examined(self, event: Examined) -> None:
        """It is known where a hanging trainer was, or that it can't say."""
        if (trainer := self.trainers.get(event.connection)) is not None:
            trainer.stack = event.stack

    def seen(self) -> list[TrainerWord]:
        """The words of the trainers that are connected; of those that have no slots yet, what they said of themselves."""
        told: set[str] = set()
        found: list[TrainerWord] = []
        for trainer in self.trainers.values():
            hello = trainer.hello
            one = self._slot_sets.sets.get(hello.set_index)
            if hello.rank < 0 or hello.trainer in told:
                continue
            told.add(hello.trainer)
            if one is not None and one.word is not None:
                found.append(one.word)
            else:
                found.append(TrainerWord(rank=hello.rank, world=hello.world, lineage=hello.lineage))
        return found
