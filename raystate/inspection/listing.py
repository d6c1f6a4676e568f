"""What there is, in short: each step in one line, and what lies beside the steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from raystate.core.formats.entries import lost_saves
from raystate.core.formats.errors import CorruptCheckpointError, RaystateError
from raystate.core.formats.names import SnapshotId
from raystate.core.formats.texts import of_step
from raystate.inspection.metadata import files_of, moment, shown_items
from raystate.inspection.places import Checkpoints
from raystate.orbax.step_reader import ItemKind, StepReader
from raystate.storage import LogReader, Storage, marked_save, number_in, runs_in
from raystate.storage.names import STATE

_LOOKS = 8  # steps that are looked at at a time


@dataclass(frozen=True, kw_only=True)
class StepSummary:
    """One step.

    Attributes:
        step: number of completed steps.
        folder: where it lies below the storage; "": the storage is the step.
        save: the save of a run that wrote it, as its marker says; None: none does, as of a step that Orbax alone wrote.
        committed_at: when, UTC; None where no file says it.
        nbytes: of all its objects in storage.
        objects: how many.
        items: item -> what it is stored as.
        metrics: what was saved with it.
        problem: why it cannot be looked at; "": it can. That does not mean that its arrays are fine: `raystate verify`.
    """

    step: int
    folder: str
    save: str | None = None
    committed_at: datetime | None = None
    nbytes: int = 0
    objects: int = 0
    items: Mapping[str, ItemKind] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""


def summarize(checkpoints: Checkpoints, step: int) -> StepSummary | None:
    """One of `checkpoints.steps()`; None: it was retired meanwhile.

    Raises:
        StorageError: storage failed, which says nothing about the step.
    """
    folder = checkpoints.folder(step)
    files = files_of(checkpoints, step)
    facts: dict[str, Any] = {"step": step, "folder": folder, "nbytes": sum(info.size for info in files), "objects": len(files)}
    try:
        # Not with its package: that may have megabytes, and nothing of what is asked here needs it.
        reader = checkpoints.open(step) if not folder else StepReader(checkpoints.storage, folder, step=step)
        facts |= {"items": shown_items(reader), "metrics": reader.metrics()}
        facts |= {"save": marked_save(checkpoints.storage, step) if folder == str(step) else reader.save}
        return StepSummary(**facts, committed_at=moment(reader.times()[1]))
    except (CorruptCheckpointError, FileNotFoundError) as error:
        return StepSummary(**facts, problem=str(error)) if step in checkpoints.steps() else None


def summaries(checkpoints: Checkpoints, steps: Sequence[int]) -> Iterator[StepSummary | None]:
    """Of each as `summarize`, in order, several at a time."""
    with ThreadPoolExecutor(_LOOKS, thread_name_prefix="raystate-looks") as pool:
        yield from pool.map(lambda step: summarize(checkpoints, step), steps)


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run of a folder of runs. `steps`: how many are durable; `newest`: of these, None if there is none."""

    name: str
    url: str
    steps: int
    newest: StepSummary | None


def runs_below(storage: Storage) -> Iterator[RunSummary]:
    """The runs in a folder of them, as a sweep has it; each is looked at when it is asked for."""
    for name in runs_in(storage):
        run = Checkpoints(f"{storage.url}/{name}")
        steps = run.steps()
        yield RunSummary(name=name, url=run.storage.url, steps=len(steps), newest=summarize(run, steps[-1]) if steps else None)


def given_up(storage: Storage) -> dict[SnapshotId, str] | None:
    """Steps for which `save` had returned True, and that are not durable, each with its reason: the
    newest that the run's log knows. None: it can't be read."""
    try:
        return {one: of_step(one.step, why) for one, why in lost_saves(LogReader(storage).tail())}
    except RaystateError:
        return None


def beside(checkpoints: Checkpoints) -> list[str]:
    """Folders that are named like steps and are none: unfinished saves, or copies that have lost their marker; at most a few."""
    if checkpoints.single is not None:
        return []
    steps = {checkpoints.folder(step) for step in checkpoints.steps()}
    found = [info.name for info in checkpoints.storage.list(recursive=False) if info.is_folder]
    return [name for name in found if (bare := name.rstrip("/")) not in steps and bare != STATE and number_in(bare) is not None]
