"""The tables of raystate diff."""

from __future__ import annotations

import json
from collections import defaultdict
from enum import StrEnum
from typing import Any

from rich.markup import escape

from raystate.cli.choosing import MOST_ROWS
from raystate.cli.console import count, figure, out
from raystate.core.formats.tree import ArraySpec
from raystate.inspection.differences import ArrayDifference, Comparison, ValueDifference

_TEXT = 30  # characters of a value


class DiffSort(StrEnum):
    by_relative = "rel"
    by_absolute = "abs"
    by_count = "count"
    by_name = "name"


def sorted_differences(arrays: list[ArrayDifference], sort: DiffSort) -> list[ArrayDifference]:
    """The largest first, or by name. What cannot be measured first."""
    keys = {
        DiffSort.by_relative: lambda one: one.max_rel,
        DiffSort.by_absolute: lambda one: one.max_abs,
        DiffSort.by_count: lambda one: one.differing,
    }
    if sort is DiffSort.by_name:
        return sorted(arrays, key=lambda one: (one.item, one.name))
    return sorted(arrays, key=lambda one: (one.status in ("values", "dtype"), -keys[sort](one)))


def show_comparison(found: Comparison, *, sort: DiffSort, depth: int | None, everything: bool) -> None:
    """Print what differs: the largest differences, or sums below the first `depth` keys of the paths."""
    arrays = sorted_differences(found.differing, sort)
    hidden = max(0, len(found.values) - MOST_ROWS)
    if depth is None:
        hidden += max(0, len(arrays) - MOST_ROWS)
        _show_arrays(arrays if everything else arrays[:MOST_ROWS])
    else:
        hidden += _show_groups(found.arrays, depth=depth, sort=sort, everything=everything)
    if found.values and found.differing:
        out.print()
    _show_values(found.values if everything else found.values[:MOST_ROWS])
    if hidden and not everything:
        out.print(f"… and {hidden:,} more: --all, or fewer with --filter, --depth")
    _show_sum(found, arrays)


def _show_groups(arrays: tuple[ArrayDifference, ...], *, depth: int, sort: DiffSort, everything: bool) -> int:
    """Returns how many rows are not shown."""
    below: dict[str, list[ArrayDifference]] = defaultdict(list)
    for one in arrays:
        beginning = ".".join(one.name.split(".")[:depth])
        below[beginning if one.item == "state" else f"{one.item}:{beginning}"].append(one)
    rows = [
        (max(x.max_rel for x in group), max(x.max_abs for x in group), sum(x.status != "equal" for x in group), len(group), name)
        for name, group in below.items()
    ]
    rows = [row for row in rows if row[2]]
    column = {DiffSort.by_relative: 0, DiffSort.by_absolute: 1, DiffSort.by_count: 2, DiffSort.by_name: 4}[sort]
    rows.sort(key=lambda row: row[column], reverse=sort is not DiffSort.by_name)
    shown = rows if everything else rows[:MOST_ROWS]
    if shown:
        out.print(f"[bold]{'max rel':>9}  {'max abs':>9}  {'arrays that differ':<20}  below[/]")
    for relative, absolute, differing, total, name in shown:
        out.print(f"{figure(relative):>9}  {figure(absolute):>9}  {f'{differing:,} of {total:,}':<20}  {escape(name)}")
    return len(rows) - len(shown)


def _show_arrays(arrays: list[ArrayDifference]) -> None:
    if not arrays:
        return
    out.print(f"[bold]{'max rel':>9}  {'max abs':>9}  {'elements that differ':<24}  array[/]")
    for one in arrays:
        name = escape(one.name if one.item == "state" else f"{one.item}:{one.name}")
        if one.status in ("values", "dtype"):
            share = f"{one.differing:,} of {one.elements:,}"
            out.print(f"{figure(one.max_rel):>9}  {figure(one.max_abs):>9}  {share:<24}  {name}{escape(_remark(one))}")
        else:
            out.print(f"[yellow]{_what(one):<46}[/]  {name}")


def _what(one: ArrayDifference) -> str:
    match one.status:
        case "only in A":
            return f"only in A: {_kind(one.a)}"
        case "only in B":
            return f"only in B: {_kind(one.b)}"
        case "shape":
            return escape(f"{_kind(one.a)} became {_kind(one.b)}")
        case _:
            return escape(f"unreadable: {one.problem}")


def _remark(one: ArrayDifference) -> str:
    remarks = [f"{one.not_finite:,} NaN or infinite"] if one.not_finite else []
    if one.status == "dtype" and one.a is not None and one.b is not None:
        remarks.append(f"{one.a.dtype} became {one.b.dtype}")
    elif one.differing and not one.max_abs and not one.not_finite:
        remarks.append("only the sign of zeros")
    return f"  ({'; '.join(remarks)})" if remarks else ""


def _kind(array: ArraySpec | None) -> str:
    return f"{array.dtype}[{','.join(map(str, array.shape))}]" if array is not None else ""


def _show_values(values: tuple[ValueDifference, ...]) -> None:
    for one in values:
        name = one.name if one.item == "state" else f"{one.item}:{one.name}" if one.name else one.item
        if one.only_in:
            what = f"only in {one.only_in}: {_text(one.a if one.only_in == 'A' else one.b)}"
        else:
            what = f"{_text(one.a)} became {_text(one.b)}"
        out.print(f"{escape(name)}: {escape(what)}")


def _text(value: Any) -> str:
    bare = isinstance(value, str) and value.isprintable() and not _reads_as_another(value)
    text = value if bare else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 1]}…"


def _reads_as_another(text: str) -> bool:
    """A string that would look like a number, a truth value, null or nothing."""
    try:
        return not isinstance(json.loads(text), dict | list)
    except ValueError:
        return not text


def _show_sum(found: Comparison, arrays: list[ArrayDifference]) -> None:
    if not found.differs:
        out.print(
            f"[green]equal[/], bit for bit: {count(len(found.arrays), 'array')} and {count(found.same_values, 'other value')}"
        )
        return
    kinds = {status: sum(one.status == status for one in arrays) for status in dict.fromkeys(one.status for one in arrays)}
    words = {"values": "in values", "dtype": "in dtype", "shape": "in shape"}
    told = ", ".join(f"{number:,} {words.get(status, status)}" for status, number in kinds.items())
    parts = [f"{len(arrays):,} of {count(len(found.arrays), 'array')} differ{f' ({told})' if told else ''}"] if found.arrays else []
    if others := len(found.values) + found.same_values:
        parts.append(f"{len(found.values):,} of {count(others, 'other value')}{'' if parts else ' differ'}")
    out.print(f"\n{'; '.join(parts)}")
