"""The diffs that the documentation shows, and the programs that they are about."""

from __future__ import annotations

import re
from pathlib import Path


def hunks_of(page: Path, *, after: str = "") -> list[list[str]]:
    """The first diff of a page behind that text: its groups of lines between empty ones."""
    found = re.search(rf"{re.escape(after)}.*?```diff\n(.*?)```", page.read_text(), re.DOTALL)
    assert found is not None, f"{page} has no diff behind {after!r}"
    return [hunk.splitlines() for hunk in found[1].strip("\n").split("\n\n")]


def apply_hunk(source: str, hunk: list[str], *, indents: tuple[str, ...] = ("",)) -> str:
    """A program with one hunk, which fits at one place of it.

    Args:
        source: the program.
        hunk: lines that begin with " ", "-" or "+". A context line need only begin as the program's.
        indents: how much deeper the program may have it.
    """
    lines = source.splitlines()
    old = [line for line in hunk if line[0] in " -"]
    for indent in indents:
        for start in range(len(lines) - len(old) + 1):
            if all(_fits(line, indent, theirs) for line, theirs in zip(old, lines[start:], strict=False)):
                kept = iter(lines[start : start + len(old)])
                new: list[str] = []
                for line in hunk:
                    theirs = next(kept) if line[0] in " -" else indent + line[1:]
                    new += [theirs] * (line[0] in " +")
                return "\n".join([*lines[:start], *new, *lines[start + len(old) :], ""])
    raise AssertionError(f"the diff doesn't fit: {hunk}")


def _fits(line: str, indent: str, theirs: str) -> bool:
    wanted = f"{indent}{line[1:]}"
    return theirs == wanted if line[0] == "-" else theirs.startswith(wanted)
