"""What `raystate report` tells of a run: gathered from its log, its ledger and its steps, and nothing that none of them knows."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from rich.progress import Progress

from raystate.inspection.history import PastStep, RunHistory, read_history
from raystate.inspection.listing import StepSummary, beside, given_up, summaries
from raystate.inspection.places import Checkpoints
from raystate.observe.ledger import LedgerContent, LoggedRecovery, read_ledger


@dataclass(frozen=True, kw_only=True)
class ReportedSave:
    """One durable step, of now or once.

    Attributes:
        past: as the log tells it.
        seconds: from the first order to write it to its publication; None: the ledger does not say.
        nbytes: in storage now; None: it is not there any more.
        problem: why it can't be looked at; "": it can.
    """

    past: PastStep
    seconds: float | None = None
    nbytes: int | None = None
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Productive step seconds ÷ wall seconds, of the time for which the log and the ledger answer.

    Attributes:
        wall_s: from the first to the last durable step of each attempt, summed up. What was before, after and between is not known.
        recovering_s: of it, from each death to the first new step after it, or to the next death.
        repeating_s: of it, for steps that were done once more: their number × `step_s`.
        step_s: seconds of a step, the median over neighbouring durable steps of one lineage; what saves cost is in it.
    """

    wall_s: float
    recovering_s: float
    repeating_s: float
    step_s: float

    @property
    def share(self) -> float:
        """Between 0 and 1."""
        return (self.wall_s - self.recovering_s - self.repeating_s) / self.wall_s


@dataclass(frozen=True, kw_only=True)
class ReportContent:
    """All that the page shows.

    Attributes:
        url: of the storage.
        history: from the log; None: there is none, as where Orbax alone wrote.
        saves: in the order of their commits.
        recoveries: (wall clock of its first new step, or of its end; recovery), oldest first.
        goodput: None: too little is known.
        problems: what is damaged, a sentence each.
        notes: what else a reader should know.
    """

    url: str
    history: RunHistory | None
    saves: tuple[ReportedSave, ...]
    recoveries: tuple[tuple[float, LoggedRecovery], ...] = ()
    goodput: Goodput | None = None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    made_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    def metrics(self) -> Mapping[str, list[tuple[int, float]]]:
        """Name -> (step, value) in the order of the commits; only of what is a number."""
        found: dict[str, list[tuple[int, float]]] = {}
        for save in self.saves:
            for name, value in save.past.metrics.items():
                if (number := _finite(value)) is not None:
                    found.setdefault(str(name), []).append((save.past.step, number))
        return found


def _finite(value: object) -> float | None:
    """What can be drawn; None: it is no number, or none of this size."""
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:  # JSON has integers of any length
        return None


def gather(storage: str, progress: Progress) -> ReportContent:
    """Read what there is.

    Raises:
        StepNotFoundError: there is neither a run nor a checkpoint; says what there is. StorageError. ConfigError: a newer raystate wrote
            the log.
    """
    checkpoints = Checkpoints(storage)
    task = progress.add_task("reading the log", total=None)
    history = None
    if checkpoints.single is None:
        history = read_history(checkpoints.storage, on_entry=lambda done, total: progress.update(task, completed=done, total=total))
    if history is None:
        checkpoints.existing(None)  # says what there is instead
    ledger = read_ledger(checkpoints.storage) if history is not None else LedgerContent()
    steps = checkpoints.steps()
    looks = progress.track(summaries(checkpoints, steps), total=len(steps), description="looking at steps")
    found = [one for one in looks if one is not None]
    saves = tuple(_saves(history, ledger, {one.step: one for one in found}))
    recoveries = tuple(sorted(ledger.recoveries, key=lambda one: one[0]))
    return ReportContent(
        url=checkpoints.storage.url,
        history=history,
        saves=saves,
        recoveries=recoveries,
        goodput=measure_goodput([one.past for one in saves], recoveries),
        problems=tuple(_problems(history, ledger, saves)),
        notes=tuple(_notes(checkpoints, history, saves)),
    )


def _saves(history: RunHistory | None, ledger: LedgerContent, found: Mapping[int, StepSummary]) -> Iterable[ReportedSave]:
    told: set[int] = set()
    for past in history.steps if history is not None else ():
        logged = ledger.saves.get(past.save or "")
        seconds = logged.seconds if logged is not None else None
        here = found.get(past.step)
        if here is not None and here.save in (None, past.save):
            told.add(past.step)  # also one that is retired in the log and still there
        if past.fate != "live":
            here = None
        if here is not None:
            past = _with(past, here)
        yield ReportedSave(
            past=past,
            seconds=seconds,
            nbytes=here.nbytes if here is not None else None,
            problem=here.problem if here is not None else "",
        )
    for step, here in sorted(found.items()):  # of no log: Orbax's own, or of entries that can't be read
        if step not in told:
            past = _with(PastStep(step=step, save=here.save, attempt=0), here)
            yield ReportedSave(past=past, nbytes=here.nbytes, problem=here.problem)


def _with(past: PastStep, here: StepSummary) -> PastStep:
    """What the log does not say of a step that is there."""
    time_s = past.time_s or (here.committed_at.timestamp() if here.committed_at is not None else None)
    metrics: Mapping[str, Any] = past.metrics or here.metrics
    return dataclasses.replace(past, time_s=time_s, metrics=metrics)


def _problems(history: RunHistory | None, ledger: LedgerContent, saves: Sequence[ReportedSave]) -> Iterable[str]:
    if history is not None:
        for name, problem in history.damaged:
            yield f"log: {name}: {problem}. Facts that only this entry holds are missing here"
        for name in ledger.damaged:
            yield f"ledger: {name} can't be read and is left out"
    for save in saves:
        if save.problem:
            yield f"step {save.past.step}: {save.problem}"


def _notes(checkpoints: Checkpoints, history: RunHistory | None, saves: Sequence[ReportedSave]) -> Iterable[str]:
    if history is None:
        yield "There is no log of raystate here, so only what the steps themselves tell is shown: no attempts, recoveries or removed steps."
    for save in saves:
        if history is not None and save.past.fate == "live" and save.nbytes is None:
            yield f"Step {save.past.step} is committed in the log and not visible: on its way, or lost; `raystate verify` tells which."
    for one in (given_up(checkpoints.storage) or {}).values():
        yield f"save() had promised a step that is not durable. {one[0].upper()}{one[1:]}"
    for name in beside(checkpoints):
        yield f"{name} is no complete step: an unfinished save, or a copy that has lost its marker."


def measure_goodput(steps: Sequence[PastStep], recoveries: Sequence[tuple[float, LoggedRecovery]]) -> Goodput | None:
    """From what is known; None if no attempt has two durable steps with a time, or no two neighbours tell how long a step takes."""
    by_attempt: dict[int, list[tuple[float, PastStep]]] = {}
    for step in steps:
        if step.time_s is not None and step.save is not None:
            by_attempt.setdefault(step.attempt, []).append((step.time_s, step))
    wall_s = recovering_s = 0.0
    repeated = 0
    paces: list[float] = []
    for attempt, timed in by_attempt.items():
        timed.sort(key=lambda one: one[0])
        begin_s, end_s = timed[0][0], timed[-1][0]
        wall_s += end_s - begin_s
        for (before_s, before), (after_s, after) in itertools.pairwise(timed):
            if after.lineage and after.lineage == before.lineage and after.step > before.step:
                paces.append((after_s - before_s) / (after.step - before.step))
        for back_s, recovery in recoveries:
            if recovery.attempt == attempt and begin_s <= back_s <= end_s:
                recovering_s += back_s - max(begin_s, back_s - max(0.0, recovery.seconds))
                repeated += max(0, recovery.steps_repeated)
    if wall_s <= 0 or not paces:
        return None
    step_s = statistics.median(paces)
    recovering_s = min(recovering_s, wall_s)
    repeating_s = min(repeated * step_s, wall_s - recovering_s)
    return Goodput(wall_s=wall_s, recovering_s=recovering_s, repeating_s=repeating_s, step_s=step_s)
