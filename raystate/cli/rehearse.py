"""raystate rehearse: would a restart of this script work?"""

from __future__ import annotations

import dataclasses
import signal
import sys
from typing import Annotated

import typer

from raystate.cli.bars import wait_progress
from raystate.cli.console import JsonOption, out, print_json


def rehearse(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="a Python script that trains, or with -m a module")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGUMENT]...", help="arguments of the script", show_default=False)
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as with python -m")] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1.0, help="time limit of each of the three runs")
    ] = 600.0,
    scratch: Annotated[
        str | None,
        typer.Option(metavar="PLACE", help="folder or bucket for the scratch folder; all nodes must reach it", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find out before the training begins whether a restart would work.

    It runs the script three times. The first run makes two saves, and the second goes on from there for two more. The third makes
    four, undisturbed, and the command compares all that was saved with these, bit by bit. It says which leaf, item or iterator would
    fail or differ, and how to mend it. The runs write to a scratch folder, which is removed, and not to the script's own storage.
    Anything else that the script writes is written three times.

    \b
    Examples:
      raystate rehearse train.py
      raystate rehearse train.py --config small.yaml
      raystate rehearse -m jobs.train_lm --config configs/lm_cpu.yaml
    """
    from raystate.rehearsal import rehearse_command

    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the scratch folder and the processes end, too
    with wait_progress(f"rehearsing a restart of {script}", quiet=as_json):
        result = rehearse_command(script, arguments or [], module=module, timeout_s=timeout_s, scratch=scratch)
    if as_json:
        print_json({"ok": result.ok, **dataclasses.asdict(result)})
    else:
        out.print(str(result), markup=False)
    raise typer.Exit(0 if result.ok else 1)
