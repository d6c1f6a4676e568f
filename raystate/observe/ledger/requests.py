"""How many requests to storage the run's processes have made, as each of them says: its HostActors in their reports, its ranks after each
restore, and the Coordinator's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from raystate.core.coordinator.facts import remember
from raystate.core.coordinator.machine import Coordinator
from raystate.core.formats.events import Claimed
from raystate.core.formats.messages import Event, RestoreTried
from raystate.observe.counted import process_counts, requests_in

Counts: TypeAlias = tuple[tuple[str, float], ...]
_REMEMBERED = 20_000  # processes


class Requests:
    """Sums of one attempt. What processes say are sums, too: a report that gets lost costs nothing once the next one is there.

    Args:
        machine: it knows what its hosts have said.
    """

    def __init__(self, machine: Coordinator) -> None:
        self._machine = machine
        self._before = requests_in(process_counts())  # of this process, by an attempt that was here
        self._known: frozenset[str] = frozenset()  # hosts that an earlier attempt has heard of: it has noted what they did
        self._said: dict[str, tuple[str, Counts]] = {}  # process -> (its incarnation, what it said last)
        self._sums: dict[str, float] = {}

    def look(self, event: Event) -> None:
        """The machine has taken an event."""
        match event:
            case Claimed(entry=entry, hosts=hosts):
                self._known = frozenset(hosts) if entry.attempt > 1 else frozenset()
            case RestoreTried(requests=said) if said:
                self._take(f"rank {event.rank}", event.lineage, said, dict)
            case _:
                pass

    def sums(self) -> dict[str, float]:
        """Those of all, in this attempt so far."""
        for view in self._machine.memory.views:
            if view.counts and view.incarnation:
                if view.host in self._known and view.host not in self._said:
                    remember(self._said, view.host, (view.incarnation, view.counts), most=_REMEMBERED)
                self._take(view.host, view.incarnation, view.counts, requests_in)
        found = dict(self._sums)
        _add(found, requests_in(process_counts()), self._before)
        return found

    def _take(self, process: str, incarnation: str, said: Counts, of: Callable[[Counts], dict[str, float]]) -> None:
        before = self._said.get(process, ("", ()))
        if before != (incarnation, said):
            _add(self._sums, of(said), of(before[1]) if before[0] == incarnation else {})
            remember(self._said, process, (incarnation, said), most=_REMEMBERED)


def _add(sums: dict[str, float], said: dict[str, float], before: dict[str, float]) -> None:
    for name, value in said.items():
        if (more := value - before.get(name, 0.0)) > 0:
            sums[name] = sums.get(name, 0.0) + more
