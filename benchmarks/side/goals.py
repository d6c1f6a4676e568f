"""What the figures beside Orbax are to be at most, and whether they are."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.side.figures import Teller
from benchmarks.side.savers import OURS

DEFAULTS = ("Orbax v0", "Orbax v1")  # as users have them without an option
FASTEST, LIMIT = "the faster Orbax", "limit"


@dataclass(frozen=True, slots=True)
class Goal:
    """At most `times` what is named: FASTEST (of `DEFAULTS`), LIMIT, or a peer."""

    times: float
    beside: str = FASTEST

    def said(self, ours: float, peers: Mapping[str, Sequence[float]], limit: float | None) -> str:
        """The ratio, the goal, and whether it is met; "" if there is nothing to hold it against."""
        middle = {name: statistics.median(values) for name, values in peers.items()}
        bases = {
            FASTEST: min((value for name, value in middle.items() if name in DEFAULTS), default=None),
            LIMIT: limit,
            **middle,
        }
        base = bases.get(self.beside)
        if not base:
            return ""
        met = "met" if ours <= self.times * base else "NOT MET"
        return f"{ours / base:.2f}, {met}: <= {self.times:g} x {self.beside}"


# figure -> (its goals; of small arrays, its goals; the limit beside it)
FIGURES: dict[str, tuple[tuple[Goal, ...], tuple[Goal, ...], str | None]] = {
    "blocked, first save": ((), (Goal(0.2),), None),
    "blocked, second save": ((), (Goal(0.2),), None),
    "blocked, computing": ((Goal(0.05),), (Goal(0.2),), None),
    "blocked, ready": ((Goal(0.3),), (Goal(0.2),), None),
    "durable": ((Goal(0.6, "Orbax v0"), Goal(1.15, LIMIT)), (Goal(0.3),), "write, fsync"),
    "bytes on disk": ((), (), None),
    "restore from storage": ((Goal(0.7),), (Goal(0.3),), "read"),
    "restore from storage, other sharding": ((Goal(0.7),), (), "read"),
    "restore from memory": ((Goal(0.2), Goal(2, LIMIT)), (Goal(0.05),), "memcpy, fresh pages"),
}


def tell_beside(
    teller: Teller,
    name: str,
    found: Mapping[str, Sequence[float]],
    unit: str,
    *,
    of: str,
    goals: Sequence[Goal] = (),
    limit: tuple[str, Sequence[float]] | None = None,
) -> None:
    """Tell a figure of all contestants, with what the machine itself takes, and how it stands to its goals.

    Args:
        found: contestant -> its values.
        limit: (name, values).
    """
    peers = {who: values for who, values in found.items() if who != OURS}
    floor = None if limit is None else statistics.median(limit[1])
    said = [goal.said(statistics.median(found[OURS]), peers, floor) for goal in goals]
    beside = peers if limit is None else {**peers, f"limit, {limit[0]}": limit[1]}
    teller.add(name, found[OURS], unit, of=of, beside=beside, goals=[text for text in said if text])


def tell_case(teller: Teller, case: str, found: dict[str, dict[str, list[float]]], *, small: bool) -> None:
    """All figures of one state, from `Bench.seconds`."""
    limits = found["limits"]
    for figure, (goals, of_small, limit) in FIGURES.items():
        by = dict(found.get(figure, {}))
        if OURS not in by:
            continue
        if figure == "restore from memory":  # the others have no such thing: their warm restore is what a user has instead
            by |= {name: values for name, values in found["restore from storage"].items() if name != OURS}
        scale, unit = (2**-20, "MiB") if figure == "bytes on disk" else (1e3, "ms")
        tell_beside(
            teller,
            figure,
            {name: [scale * value for value in values] for name, values in by.items()},
            unit,
            of=case,
            goals=of_small if small else goals,
            limit=None if limit is None else (limit, [1e3 * value for value in limits[limit]]),
        )
    all_limits = ", ".join(f"{name} {1e3 * statistics.median(values):.3g}" for name, values in limits.items())
    teller.note(f"the machine itself, ms, {case}: {all_limits}")
