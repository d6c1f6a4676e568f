"""Which arrays of a large tree are shown: filters by name, and sums by the beginning of the names."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from raystate.core.formats.errors import ConfigError

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
RegexOption = Annotated[
    str | None, typer.Option("--regex", "-r", metavar="REGEX", help="only paths in which this regular expression is found")
]
ItemOption = Annotated[str | None, typer.Option("--item", "-i", metavar="ITEM", help="only this item of the step")]
DepthOption = Annotated[
    int | None, typer.Option("--depth", "-d", metavar="N", min=1, help="sum up all arrays below the first N keys of their paths")
]
AllOption = Annotated[bool, typer.Option("--all", "-a", help="every row, however many there are")]


def path_filter(glob: str | None, regex: str | None) -> Callable[[str], bool]:
    """Whether a path, with dots between its keys, is wanted. In a glob slashes may stand for dots.

    Raises:
        ConfigError: the regular expression is none.
    """
    try:
        found = re.compile(regex).search if regex is not None else None
    except re.error as error:
        raise ConfigError(f"--regex: {regex!r} is no regular expression: {error}", field="regex", got=regex) from error
    pattern = glob.replace("/", ".").strip(".") if glob is not None else None
    plain = pattern is not None and not any(char in pattern for char in "*?[")

    def wanted(path: str) -> bool:
        dotted = path.replace("/", ".")
        if pattern is None:
            matches = True
        elif plain:
            matches = dotted == pattern or dotted.startswith(f"{pattern}.")
        else:
            matches = fnmatch.fnmatchcase(dotted, pattern)
        return matches and (found is None or found(path) is not None)

    return wanted


def did_you_mean(names: Sequence[str]) -> str:
    """The end of a sentence about a name that is none of those there are; "" without a close one."""
    return f"; did you mean {' or '.join(map(repr, names))}?" if names else ""


@dataclass(frozen=True, kw_only=True)
class PathSum:
    """All arrays below one prefix. `path` is the array's own if it is the only one."""

    path: str
    arrays: int
    nbytes: int
    stored: int


Row = tuple[tuple[str, ...], int, int]  # of one array its path, and its bytes in memory and in storage


def groups(rows: list[Row], *, depth: int | None) -> list[PathSum]:
    """Sums by the first `depth` keys of the paths; None: as deep as fits `MOST_ROWS`."""
    if depth is not None:
        return _sums(rows, depth)
    found = _sums(rows, 1)
    for deeper in range(2, max((len(path) for path, _, _ in rows), default=0) + 1):
        if len(next_one := _sums(rows, deeper)) > MOST_ROWS:
            break
        found = next_one
    return found


def _sums(rows: list[Row], depth: int) -> list[PathSum]:
    below: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        below.setdefault(row[0][:depth], []).append(row)
    return [
        PathSum(
            path=".".join(key if len(found) > 1 else found[0][0]),
            arrays=len(found),
            nbytes=sum(nbytes for _, nbytes, _ in found),
            stored=sum(stored for _, _, stored in found),
        )
        for key, found in below.items()
    ]
