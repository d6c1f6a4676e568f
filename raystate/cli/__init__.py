"""The `raystate` command. Exit codes: 0 fine, 1 found a problem, 2 bad usage."""

from __future__ import annotations

import sys

import typer

from raystate.cli import diff, gc, inspect, ls, story, verify
from raystate.core.errors import ConfigError, RaystateError, StepNotFoundError

app = typer.Typer(
    help="Look after runs that raystate keeps, in a directory or in gs://.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("ls")(ls.ls)
app.command("inspect")(inspect.inspect)
app.command("diff")(diff.diff)
app.command("verify")(verify.verify)
app.command("gc")(gc.gc)
app.command("story")(story.story)


@app.callback()
def _top() -> None:
    """With a callback, a single command keeps its name."""


def main() -> None:
    """Entry point: no traceback for what a user can put right."""
    try:
        app()
    except RaystateError as error:
        print(f"raystate: {error.message}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError | StepNotFoundError) else 1)
