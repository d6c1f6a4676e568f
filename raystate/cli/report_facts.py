"""What `raystate report` tells of a run: gathered from its log, its ledger and its steps, and nothing that none of them knows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from rich.progress import Progress

from raystate.cli.report_life import Life, Start, life_of
from raystate.core.coordinator.context import named
from raystate.inspection.history import PastStep, RunHistory, read_history
from raystate.inspection.listing import StepSummary, beside, given_up, summaries
from raystate.inspection.places import Checkpoints
from raystate.observe.goodput import Goodput, goodput
from raystate.observe.ledger.lines import LoggedRecovery, LoggedSave
from raystate.observe.ledger.reader import LedgerContent, read_ledger
from raystate.observe.timeline import Timeline, timeline_of


@dataclass(frozen=True, kw_only=True)
class ReportedSave:
    """One durable step, of now or once.

    Attributes:
        past: as the log tells it.
        seconds: from the first order to write it to its publication; None: the ledger does not say.
        writing_s: of these, until all hosts had written; None: the ledger does not say.
        nbytes: in storage now; None: it is not there any more.
        problem: why it can't be looked at; "": it can.
    """

    past: PastStep
    seconds: float | None = None
    writing_s: float | None = None
    nbytes: int | None = None
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class ReportContent:
    """All that the page shows.

    Attributes:
        url: of the storage.
        history: from the log; None: there is none, as where Orbax alone wrote.
        saves: in the order of their commits.
        recoveries: (wall clock of its first new step, or of its end; recovery), oldest first.
        goodput: where the run's time went; None: no ledger tells.
        timeline: what `goodput` was made from.
        life: what happened.
        left_out: how many objects and lines of the ledger can't be read, or were written by a newer raystate.
        problems: what is damaged, a sentence each.
        notes: what else a reader should know.
    """

    url: str
    history: RunHistory | None
    saves: tuple[ReportedSave, ...]
    recoveries: tuple[tuple[float, LoggedRecovery], ...] = ()
    goodput: Goodput | None = None
    timeline: Timeline | None = None
    life: Life = field(default_factory=Life)
    left_out: Mapping[str, int] = field(default_factory=dict[str, int])
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    made_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def restarts(self) -> tuple[Start, ...]:
        """Starts that followed another group of the same use of the run, oldest first."""
        return tuple(one for one in self.life.starts if one.why)

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
    timeline = timeline_of(ledger.lines)
    return ReportContent(
        url=checkpoints.storage.url,
        history=history,
        saves=saves,
        recoveries=ledger.recoveries,
        goodput=goodput(timeline) if timeline.end_s > timeline.begin_s else None,
        timeline=timeline,
        life=life_of(ledger.lines),
        left_out={
            "damaged_objects": ledger.damaged_objects,
            "damaged_lines": ledger.damaged_lines,
            "newer_objects": len(ledger.newer),
            "newer_lines": ledger.newer_lines,
        },
        problems=tuple(_problems(history, ledger, saves)),
        notes=tuple(_notes(checkpoints, history, saves)),
    )


def _saves(history: RunHistory | None, ledger: LedgerContent, found: Mapping[int, StepSummary]) -> Iterable[ReportedSave]:
    told: set[int] = set()
    by_id = ledger.saves
    noted_s = {one.what.save: one.t for one in ledger.lines if isinstance(one.what, LoggedSave)}
    for past in history.steps if history is not None else ():
        logged = by_id.get(past.save or "")
        if past.save in noted_s:  # the ledger's clocks are brought together; that of a commit may have been set
            past = dataclasses.replace(past, time_s=noted_s[past.save])
        here = found.get(past.step)
        if here is not None and here.save in (None, past.save):
            told.add(past.step)  # also one that is retired in the log and still there
        if past.fate != "live":
            here = None
        if here is not None:
            past = _with(past, here)
        yield ReportedSave(
            past=past,
            seconds=logged.seconds if logged is not None else None,
            writing_s=(logged.writing_s or None) if logged is not None else None,
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
        yield from ledger.left_out
    for save in saves:
        if save.problem:
            yield f"step {save.past.step}: {save.problem}"


def _notes(checkpoints: Checkpoints, history: RunHistory | None, saves: Sequence[ReportedSave]) -> Iterable[str]:
    if history is None:
        yield "There is no log of raystate here, so only what the steps themselves tell is shown: no attempts, recoveries or removed steps."
    for save in saves:
        if history is not None and save.past.fate == "live" and save.nbytes is None:
            yield f"Step {save.past.step} is committed in the log and not visible: on its way, or lost; `raystate verify` tells which."
    if lost := given_up(checkpoints.storage):
        steps, why = sorted(one.step for one in lost), list(lost.values())[-1]
        durable = max((save.past.step for save in saves if save.past.fate == "live"), default=-1)
        is_safe = f", and all of them are older than step {durable}, which is durable" if steps[-1] <= durable else ""
        yield f"save() had promised steps that are not durable: {named([*map(str, steps)])}{is_safe}. The newest reason: {why}."
    for name in beside(checkpoints):
        yield f"{name} is no complete step: an unfinished save, or a copy that has lost its marker."


def facts_of(report: ReportContent) -> dict[str, Any]:
    """For scripts: the numbers of the page. Times are seconds since 1970; what is not known is None."""
    goodput = report.goodput
    return {
        "storage": report.url,
        "run": report.history.run if report.history is not None else None,
        "wall_s": goodput.wall_s if goodput is not None else None,
        "goodput": goodput.ratio if goodput is not None else None,
        "seconds_by_cause": dict(goodput.seconds_by_cause) if goodput is not None else None,
        "waiting_by_section": dict(goodput.waiting) if goodput is not None else None,
        "step_s": goodput.step_s if goodput is not None else None,
        "saves": [
            {"step": one.past.step, "time_s": one.past.time_s, "fate": one.past.fate}
            | {"seconds": one.seconds, "writing_s": one.writing_s, "nbytes": one.nbytes}
            for one in report.saves
        ],
        "recoveries": [{"time_s": back_s, **dataclasses.asdict(one)} for back_s, one in report.recoveries],
        "starts": [dataclasses.asdict(one) for one in report.life.starts],
        "events": [dataclasses.asdict(one) for one in report.life.moments],
        "requests": {kind: int(many) for kind, many in report.life.requests.items()} or None,
        "slow_ranks": [dataclasses.asdict(one) for one in report.life.slow],
        "left_out": dict(report.left_out),
        "problems": list(report.problems),
        "notes": list(report.notes),
    }
