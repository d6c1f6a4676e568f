"""A drill as the run's own ledger tells it: where each second went, and each fault with its cause."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobs.drill.outcomes import Outcome
from raystate.observe.goodput import goodput
from raystate.observe.ledger.lines import (
    AttemptBegan,
    CoordinatorStood,
    GroupEnded,
    HostChanged,
    Hung,
    LoggedRecovery,
    Noted,
    Noticed,
    SaveLost,
    StorageChanged,
)
from raystate.observe.timeline import timeline_of

MOST_SHARE = 0.01  # of the driver's wall clock, that may be missing or too much, and that may be unknown
MOST_S = 2.0  # of a drill that is so short: the ends of its last actors and the return of fit are in no ledger
CLOCKS_S = 1.0  # that a line's time and the driver's may differ
TELLS = (AttemptBegan, CoordinatorStood, GroupEnded, HostChanged, Hung, LoggedRecovery, Noticed, SaveLost, StorageChanged)
BREAKS = (AttemptBegan, GroupEnded, Hung)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A fault, as the ledger tells it.

    Attributes:
        cause: its line's own words; "": none is there.
        is_right: it is of that kind, on that host or rank, in that time.
    """

    number: int
    kind: str
    cause: str
    is_right: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """Of a whole run, beside what its driver has measured.

    Attributes:
        driver_s: from the call of `fit` to its return.
        seconds_by_cause: as `raystate.observe.goodput` has them.
        told: of each fault.
    """

    driver_s: float
    seconds_by_cause: Mapping[str, float]
    told: tuple[Told, ...] = ()

    @property
    def sum_s(self) -> float:
        return sum(self.seconds_by_cause.values())

    @property
    def off(self) -> float:
        """By which share of the driver's wall clock the sum is more."""
        return self.sum_s / self.driver_s - 1

    @property
    def unknown(self) -> float:
        """Share of the driver's wall clock."""
        return self.seconds_by_cause["unknown"] / self.driver_s

    def problems(self) -> list[str]:
        """All that is not as it must be, a sentence each."""
        found: list[str] = []
        most = max(MOST_SHARE, MOST_S / self.driver_s)
        if abs(self.off) > most:
            found.append(f"the ledger has {self.sum_s:.1f} s, and the driver measured {self.driver_s:.1f} s ({self.off:+.1%})")
        if self.unknown > most:
            found.append(f"of {self.seconds_by_cause['unknown']:.1f} s ({self.unknown:.1%}) the ledger does not tell the cause")
        for one in self.told:
            if not one.is_right:
                found.append(f"of fault {one.number} ({one.kind}) the ledger tells {one.cause or 'nothing'}")
        return found


def account(lines: Sequence[Noted], outcomes: Iterable[Outcome], driver_s: float) -> Accounting:
    """Of a run that has ended.

    Args:
        lines: of its ledger.
        outcomes: of the faults.
        driver_s: from the call of `fit` to its return.
    """
    found = goodput(timeline_of(lines))
    return Accounting(
        driver_s=driver_s,
        seconds_by_cause=found.seconds_by_cause,
        told=tuple(told(lines, one) for one in outcomes),
    )


def struck(fact: Mapping[str, Any]) -> Outcome:
    """A fault, as the drill's JSON has it."""
    names = ("number", "kind", "aim", "target", "before", "node", "rank", "struck_s", "over_s")
    return Outcome(**{name: fact[name] for name in names})


def told(lines: Iterable[Noted], outcome: Outcome) -> Told:
    """Their lines of a fault, from its beginning until the run was safe again."""
    lines = list(lines)
    of_storage = [one for one in lines if isinstance(one.what, StorageChanged) and one.t < outcome.struck_s - CLOCKS_S]
    # Where storage failed already, it does not fail anew.
    of_time = [one for one in of_storage[-1:] if _OF[outcome.kind] is _of_storage and _of_storage(one.what, outcome)]
    of_time += [one for one in lines if outcome.struck_s - CLOCKS_S <= one.t <= outcome.over_s + CLOCKS_S]
    is_of = _OF[outcome.kind]
    right = next((one.what for one in of_time if is_of(one.what, outcome)), None)
    if right is not None:
        return Told(number=outcome.number, kind=outcome.kind, cause=_words(right), is_right=True)
    others = [one.what for one in of_time if isinstance(one.what, TELLS)]
    if outcome.kind == "clock":  # it breaks nothing: of it the ledger must tell nothing
        others = [one.what for one in of_time if isinstance(one.what, BREAKS) and one.t >= outcome.struck_s]
    is_right = outcome.kind == "clock" and not others
    cause = _words(others[0]) if others else "nothing, and nothing happened" if is_right else ""
    return Told(number=outcome.number, kind=outcome.kind, cause=cause, is_right=is_right)


# ---------------------------------------------------------------- which line tells of which fault


def _of_death(what: object, one: Outcome) -> bool:
    return isinstance(what, GroupEnded | LoggedRecovery) and what.cause == f"the process of rank {one.rank} died"


def _of_hang(what: object, one: Outcome) -> bool:
    return isinstance(what, Hung) and one.rank in what.ranks


def _of_host(what: object, one: Outcome) -> bool:
    return isinstance(what, HostChanged) and what.host == one.node and what.state in ("new", "down")


def _of_node(what: object, one: Outcome) -> bool:
    return isinstance(what, HostChanged) and what.host == one.node and what.state == "down"


def _of_notice(what: object, one: Outcome) -> bool:
    return isinstance(what, Noticed) and what.host == one.node


def _of_attempt(what: object, _: Outcome) -> bool:
    return isinstance(what, AttemptBegan)


def _of_stand(what: object, _: Outcome) -> bool:
    return isinstance(what, AttemptBegan | CoordinatorStood)  # as soon as it counts as dead, another one begins


def _of_storage(what: object, _: Outcome) -> bool:
    return isinstance(what, StorageChanged) and not what.works


def _of_nothing(_what: object, _: Outcome) -> bool:
    return False


_OF: Mapping[str, Callable[[object, Outcome], bool]] = {
    "trainer": _of_death,
    "host": _of_host,
    "coordinator": _of_attempt,
    "node": _of_node,
    "drain": _of_notice,
    "outage": _of_storage,
    "stall": _of_storage,
    "stop-trainer": _of_hang,
    "stop-host": _of_host,
    "stop-coordinator": _of_stand,
    "stop-node": _of_node,
    "shrink": _of_node,
    "clock": _of_nothing,
}


def _words(what: object) -> str:
    match what:
        case AttemptBegan(reason=reason):
            return f"another Coordinator: {reason}"
        case CoordinatorStood(seconds=seconds):
            return f"the Coordinator stood still for {seconds:.1f} s"
        case GroupEnded(cause=cause) | LoggedRecovery(cause=cause):
            return cause or "the group ended"
        case HostChanged(host=host, state=state, why=why):
            return f"host {host[:8]} {state}{f': {why}' if why else ''}"
        case Hung(ranks=ranks):
            return f"rank {', '.join(map(str, ranks))} hung"
        case Noticed(host=host, reason=reason):
            return f"notice for {f'host {host[:8]}' if host else 'the run'}: {reason}"
        case SaveLost(step=step, why=why):
            return f"step {step} given up: {why}"
        case StorageChanged(works=works, why=why):
            return f"storage {'works again' if works else 'fails'}{f': {why}' if why else ''}"
        case _:
            return ""
