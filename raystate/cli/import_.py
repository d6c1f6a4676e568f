"""raystate import: steps from elsewhere into a run."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer
from rich.markup import escape

from raystate.cli.bars import TransferBar
from raystate.cli.console import JsonOption, count, out, print_json, size


def import_(
    src: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="safetensors file, folder or index, or a checkpoint or directory of them by Orbax; path or URL",
        ),
    ],
    dst: Annotated[
        str,
        typer.Argument(metavar="DST", help="storage of the run: a directory, file://…, gs://bucket/prefix or s3://bucket/prefix"),
    ],
    step: Annotated[
        int | None,
        typer.Option("--step", metavar="N", min=0, help="import only step N; for safetensors, the step number to give it"),
    ] = None,
    flat: Annotated[bool, typer.Option("--flat", help="for safetensors: keep dotted names as the keys of one dict")] = False,
    run: Annotated[str | None, typer.Option("--run", metavar="NAME", help="the run's name, for its log")] = None,
    takeover: Annotated[
        bool, typer.Option("--takeover", help="import even if a run has used this storage; a live run is ended")
    ] = False,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="read everything back and compare")] = True,
    as_json: JsonOption = False,
) -> None:
    """Bring steps into a run, which then goes on from the newest of them.

    It writes all steps, and then commits them through the run's log. An import that was interrupted may be repeated: a step that is
    there already, with the same content, stays as it is. It refuses a number that exists with another content. It refuses a storage
    that a run has used, too, unless --takeover. It executes nothing in SRC, and reads no pickle.

    \b
    Examples:
      raystate import model.safetensors runs/tune --step 0
      raystate import gs://bucket/hf runs/tune --step 0
      raystate import /data/orbax_run gs://bucket/lm
      raystate import /data/orbax_run runs/lm --step 1200
    """
    from raystate.transfer import import_steps, open_source  # it loads JAX

    steps = open_source(src, step=step, flat=flat)
    with TransferBar(quiet=as_json) as bar:
        report = import_steps(dst, steps, run=run, takeover=takeover, verify=verify, progress=bar.show)
    if as_json:
        print_json(dataclasses.asdict(report))
        return
    for number, sentences in report.left_out.items():
        for sentence in sentences:
            out.print(f"step {number}: [yellow]left out[/] {escape(sentence)}")
    if report.present:
        are = "is" if len(report.present) == 1 else "are"
        out.print(f"{_numbers(report.present)} {are} in {escape(report.url)} already, with the same content")
    if report.steps:
        checked = "verified" if report.verified else "not verified"
        out.print(
            f"{_numbers(report.steps)} in {escape(report.url)}: {count(report.arrays, 'array')}, {size(report.nbytes)}, {checked}"
        )


def _numbers(steps: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, steps[-10:]))
    return f"{len(steps):,} steps, the newest {shown}," if len(steps) > 10 else f"step{'s' * (len(steps) > 1)} {shown}"
