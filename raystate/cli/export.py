"""raystate export: a step to another place, in a format that others read."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer
from rich.markup import escape

from raystate.arena import parse_memory
from raystate.cli.bars import TransferBar
from raystate.cli.console import JsonOption, StorageArgument, count, out, print_json, size, step_or_latest
from raystate.core.formats.errors import ConfigError


def export(
    storage: StorageArgument,
    step: Annotated[str, typer.Argument(metavar="STEP", help="number of the step, or 'latest'")],
    dst: Annotated[str, typer.Argument(metavar="DST", help="a path, or any URL that fsspec knows: gs://, s3://, zip://::file.zip, …")],
    form: Annotated[
        str | None,
        typer.Option("--format", metavar="FORMAT", help="safetensors, orbax (plain Orbax v0) or copy (the step as it is). "
                     "Default: by the ending of DST, else copy"),
    ] = None,
    item: Annotated[str | None, typer.Option("--item", metavar="NAME", help="an item of arrays instead of the state")] = None,
    match: Annotated[
        str | None, typer.Option("--match", metavar="REGEX", help="only leaves whose dotted name matches: params.dense.kernel")
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", metavar="DTYPE", help="cast floating-point arrays, such as to bfloat16")] = None,
    shard_size: Annotated[
        str, typer.Option("--shard-size", metavar="SIZE", help="most bytes of arrays in one safetensors file, such as 2GB or 500MB")
    ] = "5GB",
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="read everything back and compare")] = True,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Write a step to another place: safetensors, plain Orbax, or a copy.

    It writes all or nothing, as far as DST allows, and never replaces a file there. It streams arrays: a few boxes of 64 MiB are in
    memory at a time. A leaf's name is its path joined by dots.

    \b
    Examples:
      raystate export runs/lm 1200 model.safetensors
      raystate export runs/lm latest gs://bucket/hf --format safetensors
      raystate export runs/lm 1200 w.safetensors --match '^params'
      raystate export runs/lm 1200 orbax/ --format orbax
      raystate export gs://bucket/lm 1200 s3://other/lm
      raystate export runs/lm 1200 zip://::step.zip
    """
    from raystate.transfer import export_step  # it loads JAX

    with TransferBar(quiet=as_json) as bar:
        report = export_step(
            storage,
            step_or_latest(step),
            dst,
            format=form,  # pyright: ignore[reportArgumentType]  # checked there
            item=item,
            match=match,
            dtype=dtype,
            shard_bytes=parse_size(shard_size, "shard-size"),
            verify=verify,
            progress=bar.show,
        )
    if as_json:
        print_json(dataclasses.asdict(report))
        return
    shown = report.files if len(report.files) <= 10 else report.files[:8]
    if report.format != "copy" and report.format != "orbax":
        for file in shown:
            out.print(f"{size(file.size):>10}  {escape(file.name)}")
        if len(shown) < len(report.files):
            out.print(f"            and {len(report.files) - len(shown)} more")
    arrays = f"{count(report.arrays, 'array')}, " if report.arrays else ""
    checked = "verified" if report.verified else "not verified"
    out.print(
        f"step {report.step} as {report.format}: {arrays}{count(len(report.files), 'file')}, {size(report.nbytes)} in "
        f"{escape(report.url)}, {checked}"
    )


def parse_size(text: str, option: str) -> int:
    """Bytes of "5GB", "500 MiB" or "1000000".

    Raises:
        ConfigError: it is no size.
    """
    try:
        return parse_memory(text, total_bytes=0)  # so that no percentage is one
    except ConfigError:
        message = f"--{option}: expected a size such as 5GB or 500MB, not {text!r}"
        raise ConfigError(message, field=option, got=text) from None
