"""raystate verify: is what lies in storage what was written?"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import Progress, TaskID

from raystate.cli.bars import byte_progress, count_progress
from raystate.cli.console import JsonOption, StorageArgument, count, out, print_json, size, step_or_latest
from raystate.core.formats.errors import ConfigError, StepNotFoundError
from raystate.inspection.places import Checkpoints
from raystate.inspection.verification import BadObject, StepReport, verify_log, verify_step
from raystate.legacy.directory import LegacyCheckpoint
from raystate.orbax.step_files import ReplacedError


def verify(
    storage: StorageArgument,
    step: Annotated[
        str | None, typer.Argument(metavar="STEP", help="a step, or 'latest'; default: all steps and the run's log")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check every object of a step, or of a run, against what was committed.

    It reads a directory through, and asks a bucket for the checksums of its objects. Of a step that Orbax alone wrote, it reads
    everything that the step's metadata name, and lists what it can't check. Exit code 1 if anything is bad.

    \b
    Examples:
      raystate verify gs://bucket/lm          all steps, and the log
      raystate verify runs/lm latest          the newest step
      raystate verify runs/lm 1200 --json     for a script: what is bad
    """
    checkpoints = Checkpoints(storage)
    run = checkpoints.storage
    if isinstance(checkpoints.single, LegacyCheckpoint):
        raise ConfigError(
            f"{run.url} is in an older form of flax's, which has no checksums to verify against; raystate inspect shows what it holds",
            field="storage", got=run.url,
        )  # fmt: skip
    log: tuple[BadObject, ...] = ()
    if step is not None:
        steps = [checkpoints.existing(step_or_latest(step))]
    elif checkpoints.single is not None:
        steps = [checkpoints.existing(None)]
    else:
        steps = checkpoints.steps()
        with count_progress(quiet=as_json) as progress:
            watch = functools.partial(_update, progress, progress.add_task("checking the log", total=None))
            log = verify_log(run, on_entry=watch)
        if not steps and not log:
            checkpoints.existing(None)  # says why there are none
    reports: list[StepReport] = []
    retired: list[int] = []
    with byte_progress(quiet=as_json) as progress:
        for one in steps:
            task = progress.add_task(f"step {one}", total=None)
            report = _verified(checkpoints, one, functools.partial(_update, progress, task))
            if report is not None:
                reports.append(report)
            elif step is not None or checkpoints.single is not None:  # it was named
                raise checkpoints.retired(one)
            else:
                retired.append(one)
            progress.remove_task(task)
    bad = [*log, *(bad for report in reports for bad in report.bad)]
    if as_json:
        print_json(
            {
                "storage": run.url,
                "log": [dataclasses.asdict(one) for one in log],
                "steps": [dataclasses.asdict(report) for report in reports],
                "retired": retired,
                "bad": len(bad),
            }
        )
    else:
        for report in reports:
            _show(report)
        for one in log:
            out.print(f"[red]bad[/]  {escape(one.name)}: {escape(one.problem)}")
        if retired:
            out.print(f"retired meanwhile: {count(len(retired), 'step')}")
        verdict = f"[red]{count(len(bad), 'bad object')}[/]" if bad else "[green]nothing bad[/]"
        out.print(f"{count(len(reports), 'step')} of {escape(run.url)}: {verdict}")
    if bad:
        raise typer.Exit(1)


def _verified(checkpoints: Checkpoints, step: int, on_bytes: Callable[[int, int], None]) -> StepReport | None:
    """None: it was retired meanwhile. A step that was saved anew is looked at anew."""
    while True:
        save, (home, folder) = checkpoints.save_of(step), checkpoints.home(step)
        found: StepReport | StepNotFoundError
        try:
            found = verify_step(home, step, folder=folder, on_bytes=on_bytes)
        except StepNotFoundError as error:
            found = error
        except ReplacedError:
            continue
        if isinstance(found, StepReport) and not found.bad:
            return found
        if step not in checkpoints.steps():
            return None
        if checkpoints.save_of(step) == save:
            if isinstance(found, StepNotFoundError):
                raise found
            return found


def _update(progress: Progress, task: TaskID, done: int, total: int) -> None:
    progress.update(task, completed=done, total=total)


def _show(report: StepReport) -> None:
    what = "object" if report.kind == "raystate" else "array"
    against = "against its package" if report.kind == "raystate" else "no package: only what can be read was checked"
    mark = "[red]BAD[/]" if report.bad else "[green]ok [/]"
    out.print(f"{mark}  step {report.step}: {count(report.objects, what)}, {size(report.nbytes)}, {against}")
    for one in report.bad:
        out.print(f"     [red]{escape(one.name)}[/] {escape(one.problem)}")
    for sentence in report.unchecked:
        out.print(f"     [yellow]not checked[/] {escape(sentence)}")
