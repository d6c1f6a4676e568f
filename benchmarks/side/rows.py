"""The table's rows: each figure with its peers, its limit, its goal, and whether that is met."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.side.measure import spread
from benchmarks.side.savers import OURS

DEFAULTS = ("Orbax v0", "Orbax v1")  # as users have them without an option


@dataclass(frozen=True, kw_only=True)
class Goal:
    """At most `times` what is named.

    Attributes:
        beside: "fastest" (of `DEFAULTS`), a peer's name, or "limit".
    """

    times: float
    beside: str = "fastest"

    @property
    def text(self) -> str:
        """What the table says."""
        beside = {"fastest": "the faster Orbax"}.get(self.beside, self.beside)
        return f"<= {self.times:g} x {beside}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line. Values are {"median", "low", "high", "n"}, in `unit`.

    Attributes:
        limit: what the machine itself takes, and its "name".
        limits: of a case's first line: all that the machine itself takes for as many bytes, by name, in ms.
    """

    figure: str
    case: str
    unit: str
    ours: dict[str, float]
    peers: dict[str, dict[str, float]]
    limit: dict[str, Any] | None
    goals: tuple[Goal, ...] = ()
    note: str = ""
    limits: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])

    def base(self, goal: Goal) -> float | None:
        """What a goal is a multiple of; None: it was not measured."""
        if goal.beside == "limit":
            return self.limit["median"] if self.limit else None
        if goal.beside == "fastest":
            return min((peer["median"] for name, peer in self.peers.items() if name in DEFAULTS), default=None)
        return self.peers[goal.beside]["median"] if goal.beside in self.peers else None

    def ratio(self, goal: Goal) -> float | None:
        """Ours by the goal's base."""
        base = self.base(goal)
        return self.ours["median"] / base if base else None

    @property
    def met(self) -> bool | None:
        """None: there is no goal, or nothing to hold it against."""
        found = [(ratio, goal.times) for goal in self.goals if (ratio := self.ratio(goal)) is not None]
        return all(ratio <= times for ratio, times in found) if found else None

    def as_json(self) -> dict[str, Any]:
        """For scripts."""
        goals = [{"goal": goal.text, "at_most": goal.times, "ratio": self.ratio(goal)} for goal in self.goals]
        return {**asdict(self), "goals": goals, "met": self.met}


# figure -> (its goals; of small arrays, its goals; the limit beside it)
_FIGURES: dict[str, tuple[tuple[Goal, ...], tuple[Goal, ...], str | None]] = {
    "blocked, first save": ((), (Goal(times=0.2),), None),
    "blocked, second save": ((), (Goal(times=0.2),), None),
    "blocked, computing": ((Goal(times=0.05),), (Goal(times=0.2),), None),
    "blocked, ready": ((Goal(times=0.3),), (Goal(times=0.2),), None),
    "durable": ((Goal(times=0.6, beside="Orbax v0"), Goal(times=1.15, beside="limit")), (Goal(times=0.3),), "write, fsync"),
    "bytes on disk": ((), (), None),
    "restore from storage": ((Goal(times=0.7),), (Goal(times=0.3),), "read"),
    "restore from storage, other sharding": ((Goal(times=0.7),), (), "read"),
    "restore from memory": (
        (Goal(times=0.2, beside="fastest"), Goal(times=2, beside="limit")), (Goal(times=0.05),), "memcpy, fresh pages",
    ),
}  # fmt: skip


def rows_of(found: dict[str, Any], shape: str) -> list[Row]:
    """The lines of one case, from what `measure` gives."""
    seconds: dict[str, dict[str, list[float]]] = dict(found["seconds"])
    limits = seconds.pop("limits", {})
    rows: list[Row] = []
    for figure, (goals, of_small, limit) in _FIGURES.items():
        by = dict(seconds.get(figure, {}))
        if OURS not in by:
            continue
        if figure == "restore from memory":  # the others have no such thing: their warm restore is what a user has instead
            by |= {name: values for name, values in seconds["restore from storage"].items() if name != OURS}
        in_bytes = figure == "bytes on disk"
        scale = 2**-20 if in_bytes else 1e3
        spreads = {name: spread([scale * value for value in values]) for name, values in by.items()}
        beside = {"name": limit, **spread([1e3 * value for value in limits[limit]])} if limit in limits else None
        note = found["facts"].get(f"{figure}: bytes read / bytes needed")
        rows.append(
            Row(
                figure=figure,
                case=found["case"],
                unit="MiB" if in_bytes else "ms",
                ours=spreads.pop(OURS),
                peers=spreads,
                limit=beside,
                goals=of_small if shape == "small" else goals,
                note=f"{note:.3f} x the bytes needed were read" if note is not None else "",
                limits={} if rows else {name: spread([1e3 * value for value in values]) for name, values in limits.items()},
            )
        )
    return rows


def rows_of_save_cost(found: dict[str, Any]) -> list[Row]:
    """Training time lost per save, from benchmarks/save_cost.py."""
    per_save, case = found["per_save"], f"{found['state_mib']} MiB, steps of {found['step_ms']:.0f} ms"
    rows: list[Row] = []
    for name, what in (("raystate", ""), ("raystate, snapshot every step", ", and a snapshot of every step")):
        if name in per_save:
            rows.append(
                Row(
                    figure=f"training time lost per save{what}", case=case, unit="ms",
                    ours=spread([per_save[name]["lost_ms"]]), peers={"Orbax v0": spread([per_save["orbax"]["lost_ms"]])},
                    limit=None, goals=(Goal(times=0.2, beside="Orbax v0"),) if not what else (),
                )
            )  # fmt: skip
    return rows


def rows_of_recovery(found: dict[str, Any]) -> list[Row]:
    """Kill to next new step, from benchmarks/recovery.py."""
    rows: list[Row] = []
    for rank in sorted({one["rank"] for one in found["raystate"]}):
        took = {name: spread([1e3 * one["to_new_step_s"] for one in kills if one["rank"] == rank]) for name, kills in found.items()}
        repeated = max(one["repeated_steps"] for one in found["raystate"] if one["rank"] == rank)
        peers = {"JaxTrainer with Orbax": took["plain"]} if "plain" in took else {}
        rows.append(
            Row(
                figure=f"kill -9 of rank {rank} to the next new step", case="two ranks, one node", unit="ms", ours=took["raystate"],
                peers=peers, limit=None, goals=(Goal(times=0.25, beside="JaxTrainer with Orbax"),),
                note=f"at most {repeated} steps repeated",
            )
        )  # fmt: skip
    return rows


def row_of_memory(peak_mib: dict[str, float], case: str, allowed_mib: float) -> Row:
    """Peak of extra memory while saving, in MiB by contestant."""
    values = {name: spread([value]) for name, value in peak_mib.items()}
    return Row(
        figure="extra memory while saving, peak", case=case, unit="MiB", ours=values.pop(OURS), peers=values,
        limit={"name": "3 slots + 64 MiB", **spread([allowed_mib])}, goals=(Goal(times=1, beside="limit"),),
    )  # fmt: skip


def rows_of_start(found: dict[str, list[float]]) -> list[Row]:
    """What starting costs, in ms by figure. Their limits are those of the issue's table, not the machine's."""
    limits = {"import raystate": 30.0, "first StateManager on a running Ray": 1500.0}
    return [
        Row(
            figure=figure, case="", unit="ms", ours=spread(values), peers={},
            limit={"name": "as long as is wanted", **spread([limits[figure]])}, goals=(Goal(times=1, beside="limit"),),
        )
        for figure, values in found.items()
    ]  # fmt: skip
