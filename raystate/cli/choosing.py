"""Which arrays of a step are shown."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from typing import Annotated

import typer

MOST_ROWS = 20  # of a table, unless all are asked for

FilterOption = Annotated[
    str | None,
    typer.Option(
        "--filter",
        "-f",
        metavar="GLOB",
        help="only paths that match, such as 'params.*.kernel' or '*/bias'; a path without * also stands for all below it",
    ),
]
ItemOption = Annotated[str | None, typer.Option("--item", "-i", metavar="ITEM", help="only this item of the step")]
AllOption = Annotated[bool, typer.Option("--all", "-a", help="every row, however many there are")]


def path_filter(glob: str | None) -> Callable[[str], bool]:
    """Whether a path, with dots between its keys, is wanted. In a glob slashes may stand for dots."""
    if glob is None:
        return lambda _path: True
    pattern = glob.replace("/", ".").strip(".")
    if any(char in pattern for char in "*?["):
        return lambda path: fnmatch.fnmatchcase(path.replace("/", "."), pattern)
    return lambda path: f"{path.replace('/', '.')}.".startswith(f"{pattern}.")
