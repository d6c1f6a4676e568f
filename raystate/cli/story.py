"""raystate story: what became of a step, and why."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.text import Text

from raystate.actors.ray_discovery import ray_folder
from raystate.cli.console import JsonOption, StorageArgument, out, print_json, when
from raystate.core.formats.errors import ConfigError, RaystateError, StepNotFoundError
from raystate.observe.record import AttemptRecord, read_record, run_folders
from raystate.observe.story import Decision, Moment, Story, known_steps, tell
from raystate.storage import canonical_url

_LOG_DIR = "--log_dir="  # of a raylet, Ray's process on each node
_INDENT = 16  # below the time
_STYLES = {"warning": "yellow", "error": "red"}


def story(
    storage: StorageArgument,
    step: Annotated[
        int | None, typer.Argument(metavar="[STEP]", help="number of the step; the newest by default", min=0, show_default=False)
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            "--record",
            metavar="FOLDER",
            help="the run's `record_dir` on its Coordinator's node; default: this node's newest Ray session, else its running Ray",
        ),
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="NAME", help="the run of this name, if the storage had several")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Tell what became of a step: each event, what the Coordinator decided then, and why.

    It reads the record that the Coordinator keeps on its node, also while the run goes on. The record is a few megabytes large: of a
    long run it holds the last hours.

    \b
    Examples:
      raystate story gs://bucket/lm   the newest step, on the Coordinator's node
      raystate story gs://bucket/lm 1200
      raystate story runs/lm 1200 --record /shared/records
    """
    place, attempts = _record(canonical_url(storage), record, run)
    step = max(known_steps(attempts), default=0) if step is None else step
    told = tell(step, attempts)
    if not told.moments:
        raise StepNotFoundError(f"{place} tells nothing of step {step}; {_what_there_is(attempts)}", step=step)
    if as_json:
        print_json({"record": str(place), **dataclasses.asdict(told)})
    else:
        _show(told, place)


def _record(url: str, folder: Path | None, run: str | None) -> tuple[Path, list[AttemptRecord]]:
    root = folder if folder is not None else ray_folder() / "session_latest" / "logs" / "raystate"
    unread: list[RaystateError] = []  # perhaps of other runs, which another version has written
    there = _records([root], unread)
    found = _of(there, url, run)
    if not found and folder is None:
        there |= _records([logs / "raystate" for logs in logs_of_raylets()], [])
        found = _of(there, url, run)
    if len(found) == 1:
        ((path, attempts),) = found.items()
        return path, attempts
    if unread and not found:
        raise unread[0]
    what = f"run {run!r} in {url}" if run is not None else url
    if found:
        raise ConfigError(f"there are several records of {what}; name one by --run or --record:{_listed(found)}", field="record")
    hint = "name the folder by --record, if Ray has its logs or the run its record_dir elsewhere"
    if folder is not None:
        hint = "give the run's record_dir, or the folder `raystate` among Ray's logs, on the node of the run's Coordinator"
    absent = "" if root.exists() else ", which does not exist"
    others = f"; there are these:{_listed(there)}" if there else f"; {hint}"
    raise ConfigError(f"there is no record of {what} in {root.absolute()}{absent}{others}", field="record", got=str(root))


def _records(roots: list[Path], unread: list[RaystateError]) -> dict[Path, list[AttemptRecord]]:
    found: dict[Path, list[AttemptRecord]] = {}
    for path in (path for root in roots for path in run_folders(root)):
        try:
            found[path] = read_record(path)
        except RaystateError as error:
            unread.append(error)
    return found


def _of(records: dict[Path, list[AttemptRecord]], url: str, run: str | None) -> dict[Path, list[AttemptRecord]]:
    def is_meant(one: AttemptRecord) -> bool:
        return one.settings.storage == url and run in (None, one.settings.run)

    return {path: attempts for path, attempts in records.items() if any(map(is_meant, attempts))}


def _listed(records: dict[Path, list[AttemptRecord]]) -> str:
    """Each with its storage, its name and when its newest event was."""
    return "".join(f"\n  {_told_of(attempts)}, in {path}" for path, attempts in records.items())


def _told_of(attempts: list[AttemptRecord]) -> str:
    if not attempts:
        return "nothing yet"
    newest = attempts[-1]
    until = when(datetime.fromtimestamp(newest.records[-1].time_s, UTC)) if newest.records else "no event yet"
    return f"{newest.settings.storage}, run {newest.settings.run!r}, until {until}"


def logs_of_raylets() -> list[Path]:
    """The logs of every Ray that runs on this node, wherever its `--temp-dir` is: their command lines name them."""
    found: dict[Path, None] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            program, *options = (process / "cmdline").read_bytes().decode(errors="surrogateescape").split("\0")
            if os.path.basename(program) == "raylet":
                found |= {Path(one.removeprefix(_LOG_DIR)): None for one in options if one.startswith(_LOG_DIR)}
    return list(found)


def _what_there_is(attempts: list[AttemptRecord]) -> str:
    steps = known_steps(attempts)
    if not steps:
        return "no step has come that far yet"
    return f"it knows {len(steps)} steps from {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"it knows step {steps[0]}"


# ---------------------------------------------------------------- on a terminal


def _show(told: Story, place: Path) -> None:
    first_s = told.moments[0].time_s
    out.print(f"[bold]Step {told.step} of run {escape(told.run)}[/]  [dim]{_day(first_s)}, from {escape(str(place))}[/]")
    attempt, day = -1, _day(first_s)
    for moment in told.moments:
        if moment.attempt != attempt:
            attempt = moment.attempt
            out.print(f"\n[dim]attempt {attempt}[/]")
        if _day(moment.time_s) != day:
            day = _day(moment.time_s)
            out.print(f"[dim]{day}[/]")
        _show_moment(moment)
    out.print()
    out.print(f"[bold]In short[/]  {_in_short(told)}")


def _show_moment(moment: Moment) -> None:
    _block(_clock(moment.time_s), Text(moment.event), "dim")
    for decision in moment.decisions:
        _show_decision(decision)


def _show_decision(decision: Decision) -> None:
    style = _STYLES.get(decision.level, "")
    _block("→", Text(decision.text, style=style or "cyan"), style or "cyan")
    if decision.reason and decision.reason not in decision.text:
        _block("", Text(f"because: {decision.reason}", style="dim"), "")


def _block(mark: str, text: Text, style: str) -> None:
    """A mark at the left of a text, which is wrapped at its own left edge."""
    lines = text.wrap(out, max(40, out.width - _INDENT)) if out.is_terminal else [text]
    for number, line in enumerate(lines):
        line.rstrip()
        left = Text((mark if number == 0 else "").rjust(_INDENT - 2), style=style)
        out.print(left, line, sep="  ")


def _in_short(told: Story) -> str:
    if not told.milestones:
        return "nothing came of it here"
    (first, first_s), *later = told.milestones.items()
    parts = [f"{first} {_clock(first_s)}", *(f"{name} +{at_s - first_s:.3f} s" for name, at_s in later)]
    return ", ".join(parts) + ("" if "durable" in told.milestones else "; not durable as far as this record goes")


def _clock(time_s: float) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(time_s))}.{int(time_s % 1 * 1000):03d}"


def _day(time_s: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(time_s))
