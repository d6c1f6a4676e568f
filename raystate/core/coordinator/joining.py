"""How the ranks of a worker group come together: all of them, each from one host, and of one mind about how many they are."""

from __future__ import annotations

from collections.abc import Callable, Collection

from raystate.core.coordinator.context import Barrier, Context, ranks_text
from raystate.core.formats.questions import Joined
from raystate.core.formats.replies import JoinReply
from raystate.core.formats.texts import counted


class Joining:
    """One group, from its first rank on.

    Attributes:
        members: by rank, those that have come.
        barrier: those that wait for the others; None: no rank waits.
    """

    def __init__(self, context: Context, name: str, world: int):
        self._context = context
        self.name = name
        self.world = world
        self.members: dict[int, Joined] = {}
        self.barrier: Barrier | None = None
        self._opened_s = 0.0
        self._reply: JoinReply | None = None

    def add(self, event: Joined) -> bool:
        """A rank has come. Whether all have now, and wait for the reply."""
        first = self.members.get(event.rank)
        if first is not None and first.host != event.host:
            self._refuse(
                event,
                f"rank {event.rank} of group {event.group} joined from two hosts: {first.host} and {event.host}",
                rank=event.rank,
                hosts=[first.host, event.host],
            )
            return False
        if event.world != self.world or not 0 <= event.rank < event.world:
            self._refuse(
                event,
                f"rank {event.rank} (host {event.host}) of group {event.group} has world size {event.world}, but rank "
                f"{min(self.members, default=event.rank)} has {self.world}",
                rank=event.rank,
                expected=self.world,
                got=event.world,
            )
            return False
        self.members.setdefault(event.rank, event)
        if self._reply is not None:
            self._context.answer(event.ask, self._reply)
            return False
        if self.barrier is None:
            self.barrier, self._opened_s = Barrier(), self._context.now_s
        self.barrier.add(event.rank, event.ask)
        return len(self.members) == self.world and self.barrier.is_full(self.world)

    def _refuse(self, event: Joined, message: str, **details: object) -> None:
        """The group cannot be what its ranks say: no rank of it may start."""
        asks = [event.ask]
        if self.barrier is not None:
            asks += [ask for ask in self.barrier.everybody() if ask != event.ask]
            self._begin_anew(event.world)
        self._context.log("debug", message)  # those who asked raise it
        self._context.fail(asks, "ConfigError", message, **details)

    def _begin_anew(self, world: int) -> None:
        self.barrier, self.members, self.world = None, {}, world

    def answer(self, reply: JoinReply) -> None:
        """All have come, and go on with this."""
        barrier, self.barrier, self._reply = self.barrier, None, reply
        for ask in [] if barrier is None else barrier.everybody():
            self._context.answer(ask, reply)

    def replaced(self, by: str) -> None:
        """Another group has come instead."""
        asks = [] if self.barrier is None else self.barrier.everybody()
        text = f"group {self.name} was replaced by {by} while it joined"
        self._context.fail(asks, "StaleAttemptError", text, replaced=True)

    def turn(self, why_not_here: Callable[[Collection[int], str, float, float], str]) -> None:
        """Refuse those who wait too long for ranks that don't come. `why_not_here`: see `Joins`."""
        context, barrier = self._context, self.barrier
        if barrier is None:
            return
        waited_s, missing = context.now_s - self._opened_s, barrier.missing(self.world)
        if not (why := why_not_here(missing, "construct a StateManager", waited_s, context.settings.start_timeout_s)):
            return
        here = ranks_text(sorted(self.members), {rank: join.host for rank, join in self.members.items()})
        message = f"of {counted(self.world, 'rank')}, {why}; {here} did"
        context.log("debug", message)
        context.fail(barrier.everybody(), "BarrierTimeoutError", message, missing_ranks=missing, phase="start", waited_s=waited_s)
        self._begin_anew(self.world)
