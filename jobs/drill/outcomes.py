"""What came of the faults: which count, what was broken, and the sums. Needs neither Ray nor a clock."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

NONE = -1  # no step


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """What was known just before a fault. Steps are -1 where there is none.

    Attributes:
        alive: the target was alive.
        trained: the newest step that the training had made.
        stable: the newest step that was complete in memory, with its copies.
        durable: the newest durable step.
        phase: what the Coordinator was doing; "unknown": it did not say.
    """

    alive: bool
    trained: int
    stable: int
    durable: int
    phase: str


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One fault, and what followed.

    Attributes:
        kind, aim, target: what was struck; `node` and `rank`, if it has one.
        struck_s, over_s: when, and by when it was safe again; seconds since 1970, by the driver's clock.
        before: what was known just before.
        start: the step that a new worker group went on from; None: none had to start.
        tier: where that step came from.
        reached: the newest step of the workers that were struck.
        sizes: how many ranks the worker groups had that have started since.
        seconds: from the fault to the first new step.
        safe_s: from the end of the fault to a newer step that is complete in memory (after an outage: durable); None: not seen.
        violations: promises that were broken.
    """

    number: int
    kind: str
    aim: str
    target: str
    before: Before
    node: str = ""
    rank: int = NONE
    struck_s: float = 0.0
    over_s: float = 0.0
    start: int | None = None
    tier: str = ""
    reached: int = NONE
    sizes: tuple[int, ...] = ()
    seconds: float | None = None
    safe_s: float | None = None
    violations: list[str] = field(default_factory=list[str])

    @property
    def recovered(self) -> bool:
        """It trains again, and what it trains is safe again."""
        return self.seconds is not None and self.safe_s is not None

    @property
    def steps_lost(self) -> int:
        """Steps that had to be computed again."""
        return 0 if self.start is None else max(0, self.reached - self.start)

    def note_sizes(self, before: Sequence[int], after: Sequence[int], *, also: bool) -> int:
        """Note the groups that have started since.

        Args:
            before: sizes of all groups until the fault.
            after: of all until now.
            also: something else was killed beside it.

        Returns:
            How many of the starts nothing explains: neither the fault, nor that the run has grown.
        """
        self.sizes = tuple(after[len(before) :])
        grown = sum(size > smaller for smaller, size in itertools.pairwise(after[max(0, len(before) - 1) :]))
        return max(0, len(self.sizes) - grown - (self.start is not None) - also)

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return {**dataclasses.asdict(self), "recovered": self.recovered, "steps_lost": self.steps_lost}


def why_not_counted(before: Before, trained_at_last: int) -> str:
    """Why a fault doesn't count; "": it does.

    Args:
        before: what was known before it.
        trained_at_last: the newest step at the fault before it, counted or not.
    """
    if not before.alive:
        return "its target was not alive"
    if before.trained <= trained_at_last:
        return "no new step was made since the fault before it"
    return ""


def least_step(before: Before, *, spares_memory: bool, kept: int) -> int:
    """The oldest step from which a run may go on after a fault.

    Args:
        before: what was known before it.
        spares_memory: all that hosts hold in memory survives it.
        kept: the newest step that was ever stable, or restored, since the last fault that took memory away.
    """
    return max(before.durable, before.stable, kept if spares_memory else NONE)


def check(outcome: Outcome, *, least: int, durable_after: int, restored_wrong: Iterable[str] = ()) -> None:
    """Add to an outcome's violations what it shows.

    Args:
        least: see `least_step`.
        durable_after: the newest durable step once the run is back.
        restored_wrong: what was seen of values that are not those of their step.
    """
    before = outcome.before
    if outcome.start is not None and outcome.start < least:
        why = "durable" if least == before.durable else "safe in memory"
        outcome.violations.append(f"the run went on from step {outcome.start}, and step {least} was {why}")
    if durable_after < before.durable:
        outcome.violations.append(f"the newest durable step went from {before.durable} back to {durable_after}")
    outcome.violations.extend(restored_wrong)


# ---------------------------------------------------------------- sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of some numbers: the middle, the one that 95% don't exceed, the largest; None if there are none."""

    median: float | None
    p95: float | None
    max: float | None


def spread(values: Sequence[float]) -> Spread:
    """The p95 is the smallest of the values that at least 95% of them don't exceed."""
    if not values:
        return Spread(median=None, p95=None, max=None)
    ordered = sorted(values)
    return Spread(median=statistics.median(ordered), p95=ordered[math.ceil(0.95 * len(ordered)) - 1], max=ordered[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """All faults of a kind, or of a phase."""

    name: str
    faults: int
    recovered: int
    steps_lost: Spread
    seconds: Spread
    safe_s: Spread


def rows(outcomes: Sequence[Outcome], name: Callable[[Outcome], str], order: Sequence[str]) -> list[Row]:
    """One row for each name that was seen; those in `order` first."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(name(outcome), []).append(outcome)
    names = [one for one in order if one in groups] + sorted(groups.keys() - set(order))
    return [
        Row(
            name=one,
            faults=len(groups[one]),
            recovered=sum(outcome.recovered for outcome in groups[one]),
            steps_lost=spread([outcome.steps_lost for outcome in groups[one]]),
            seconds=spread([outcome.seconds for outcome in groups[one] if outcome.seconds is not None]),
            safe_s=spread([outcome.safe_s for outcome in groups[one] if outcome.safe_s is not None]),
        )
        for one in names
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A whole drill.

    Attributes:
        outcomes: of the faults that count.
        not_counted: why others don't.
        left_out: kind -> why it could not be injected.
        bit_equal: the end of the run has the bits of the undisturbed run's; None: it was not compared.
        same_order: of an elastic run, instead: it has seen the examples in the undisturbed run's order, with its losses within
            `training.TOLERANCE`; None: not compared.
        violations: of the run as a whole; those of single faults are with them.
        steps: of the run.
        took_s: from the first fault to the end of the last.
        unasked: restarts that no fault explains.
        fit_s: from the call of `fit` to its return, by the driver's clock.
        not_durable: promised steps that storage never got, as the end of the run has named them, and why. No broken promise: where
            storage fails or is too slow, the contract is that an error names them.
    """

    seed: int
    wanted: int
    outcomes: tuple[Outcome, ...]
    not_counted: tuple[str, ...]
    left_out: dict[str, str]
    bit_equal: bool | None
    violations: tuple[str, ...]
    steps: int
    took_s: float
    unasked: int
    same_order: bool | None = None
    not_durable: tuple[str, ...] = ()
    fit_s: float = 0.0

    @property
    def recovered(self) -> int:
        return sum(outcome.recovered for outcome in self.outcomes)

    @property
    def all_violations(self) -> list[str]:
        of_faults = [f"fault {one.number} ({one.kind}): {text}" for one in self.outcomes for text in one.violations]
        return [*of_faults, *self.violations]

    @property
    def held(self) -> bool:
        """All faults were injected, the run came back from each, and everything that is promised was kept."""
        complete = len(self.outcomes) == self.wanted == self.recovered
        return complete and (self.bit_equal or self.same_order) is True and not self.all_violations

    def facts(self, kinds: Sequence[str], phases: Sequence[str]) -> dict[str, Any]:
        """For JSON."""

        def table(found: list[Row]) -> dict[str, Any]:
            return {row.name: {key: value for key, value in dataclasses.asdict(row).items() if key != "name"} for row in found}

        return {
            "seed": self.seed,
            "faults": len(self.outcomes),
            "recovered": self.recovered,
            "bit_equal": self.bit_equal,
            "same_order": self.same_order,
            "violations": self.all_violations,
            "held": self.held,
            "steps": self.steps,
            "seconds": self.took_s,
            "not_counted": list(self.not_counted),
            "left_out": self.left_out,
            "unasked_restarts": self.unasked,
            "not_durable": list(self.not_durable),
            "fit_s": self.fit_s,
            "by_kind": table(rows(self.outcomes, lambda one: one.kind, kinds)),
            "by_phase": table(rows(self.outcomes, lambda one: one.before.phase, phases)),
            "each": [outcome.facts() for outcome in self.outcomes],
        }
