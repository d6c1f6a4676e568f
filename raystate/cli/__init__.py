"""The `raystate` command. Exit codes: 0 fine, 1 found a problem, 2 bad usage."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from raystate import __version__
from raystate.cli import diff, export, gc, import_, inspect, ls, rehearse, report, rm, status, story, verify
from raystate.core.formats.errors import ConfigError, RaystateError, StepNotFoundError
from raystate.core.formats.texts import printable

app = typer.Typer(
    help="""Manage raystate runs, and inspect any Orbax checkpoint.

    STORAGE is a directory, gs://bucket/prefix or s3://bucket/prefix: of a run, or the folder of one step or checkpoint.

    \b
    Begin with:
      raystate ls STORAGE          which steps are there?
      raystate inspect STORAGE     what is in the newest?
      raystate diff STORAGE 1 2    what changed from step 1 to step 2?
      raystate verify STORAGE      is all of it as it was written?
      raystate report STORAGE --out run.html    the run's story on one page
      raystate rehearse train.py   would a restart of this script work?

    Exit codes: 0 fine, 1 found a problem or a difference, 2 bad usage.""",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # frames and colours say nothing more, and break lines that are meant to be copied
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("ls")(ls.ls)
app.command("inspect", short_help="Look inside a step: its arrays, items, metrics, times.")(inspect.inspect)
app.command("diff", short_help="Tell what differs between two steps, and how much.")(diff.diff)
app.command("verify", short_help="Check that storage holds what was committed.")(verify.verify)
app.command("gc", short_help="Remove what crashed attempts and retired steps left.")(gc.gc)
app.command("rm", short_help="Delete a run, or one of its steps.")(rm.rm)
app.command("export", short_help="Write a step elsewhere: safetensors, plain Orbax, a copy.")(export.export)
app.command("import", short_help="Bring steps from elsewhere into a run.")(import_.import_)
app.command("status", short_help="Show what the runs of a Ray cluster are doing.")(status.status)
app.command("report", short_help="Write a run's story as one HTML page.")(report.report)
app.command("story", short_help="Tell what became of a step, and why.")(story.story)
app.command(
    "rehearse",
    short_help="Find out before the training whether a restart would work.",
    context_settings={"allow_interspersed_args": False},  # what follows SCRIPT is the script's own
)(rehearse.rehearse)


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"raystate {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    _: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print raystate's version and end.")
    ] = False,
) -> None:
    """With a callback, a single command keeps its name."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # what a step is called may be text that no terminal can show
        sys.stdout.reconfigure(errors="backslashreplace")


def main() -> None:
    """Entry point: no traceback for what a user can put right."""
    try:
        app(prog_name="raystate")
    except RaystateError as error:
        print(f"raystate: {printable(error.message)}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError | StepNotFoundError) else 1)
