"""raystate story: what became of a step, and why."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.text import Text

from raystate.cli.console import JsonOption, out, print_json
from raystate.core.errors import ConfigError, StepNotFoundError
from raystate.runtime.record import AttemptRecord, read_record, run_folders
from raystate.runtime.story import Decision, Moment, Story, known_steps, tell

_LOG_DIR = "--log_dir="  # of a raylet, Ray's process on each node
_INDENT = 16  # below the time
_STYLES = {"warning": "yellow", "error": "red"}


def story(
    step: Annotated[int, typer.Argument(metavar="STEP", help="number of the step", min=0)],
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER",
            help="the run's `record_dir`, on the node of its Coordinator; without it this node's newest Ray session, or the Ray that runs",
        ),
    ] = None,
    run: Annotated[str | None, typer.Option("--run", metavar="NAME", help="where there are several runs: this one")] = None,
    as_json: JsonOption = False,
) -> None:
    """Tell what became of a step: each event, what the Coordinator decided then, and why.

    It reads what the Coordinator has written down on its node, also while it goes on. The record is a few megabytes: of a long run
    it holds the last hours.

    \b
    Examples:
      raystate story 1200                     on the node of the Coordinator
      raystate story 1200 --run lm            where there are several runs
      raystate story 1200 /shared/records     the run's record_dir
    """
    place, attempts = _record(folder, run)
    told = tell(step, attempts)
    if not told.moments:
        raise StepNotFoundError(f"{place} tells nothing of step {step}; {_what_there_is(attempts)}", step=step)
    if as_json:
        print_json({"record": str(place), **dataclasses.asdict(told)})
    else:
        _show(told, place)


def _record(folder: Path | None, run: str | None) -> tuple[Path, list[AttemptRecord]]:
    root = folder if folder is not None else _ray_logs() / "raystate"
    found = _records([root], run)
    if not found and folder is None:
        found = _records([logs / "raystate" for logs in logs_of_raylets()], run)
    if len(found) == 1:
        ((path, attempts),) = found.items()
        return path, attempts
    what = f"of run {run!r} " if run is not None else ""
    if not found:
        hint = "name the folder, if Ray has its logs or the run its record_dir elsewhere"
        if folder is not None:
            hint = "give the run's record_dir, or the folder `raystate` among Ray's logs, on the node of the run's Coordinator"
        there = "" if root.exists() else ", which does not exist"
        raise ConfigError(f"there is no record {what}in {root.absolute()}{there}; {hint}", field="folder", got=str(root))
    runs = {str(path): attempts[-1].settings.run if attempts else "nothing yet" for path, attempts in found.items()}
    listed = "".join(f"\n  {path} (run {name!r})" for path, name in runs.items())
    raise ConfigError(
        f"there are records {what or 'of several runs '}in {root}; name one of these folders:{listed}", field="folder"
    )


def _records(roots: list[Path], run: str | None) -> dict[Path, list[AttemptRecord]]:
    found = {path: read_record(path) for root in roots for path in run_folders(root)}
    if run is None:
        return found
    return {path: attempts for path, attempts in found.items() if any(one.settings.run == run for one in attempts)}


def _ray_logs() -> Path:
    """Where Ray keeps the logs of the newest session, by Ray's own rule."""
    on_linux = sys.platform.startswith("linux")
    root = os.environ.get("RAY_TMPDIR") or (os.environ.get("TMPDIR") if on_linux else None)
    return Path(root or ("/tmp" if os.name == "posix" else tempfile.gettempdir())) / "ray" / "session_latest" / "logs"


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
