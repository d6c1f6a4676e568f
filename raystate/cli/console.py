"""What the commands have in common on a terminal."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console

StorageArgument = Annotated[str, typer.Argument(metavar="STORAGE", help="a directory, file://… or gs://bucket/prefix")]
JsonOption = Annotated[bool, typer.Option("--json", help="one JSON document on standard output, for scripts")]

out = Console(highlight=False, soft_wrap=True)
progress_out = Console(stderr=True)


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=2, sort_keys=True))


def size(nbytes: float) -> str:
    """Bytes for people: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1024 or unit == "TiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError("unreachable")


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
