"""raystate diff: what changed from one step to another, and by how much."""

from __future__ import annotations

import dataclasses
import json
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.markup import escape

from raystate.cli.choosing import MOST_ROWS, AllOption, FilterOption, ItemOption, RegexOption, path_filter
from raystate.cli.console import JsonOption, StorageArgument, byte_progress, count, figure, out, print_json
from raystate.core.errors import ConfigError
from raystate.core.tree import ArraySpec
from raystate.inspection.differences import ArrayDifference, Comparison, ValueDifference, compare
from raystate.inspection.places import Checkpoints

_TEXT = 30  # characters of a value


class DiffSort(StrEnum):
    relative = "rel"
    absolute = "abs"
    elements = "count"
    name = "name"


def diff(
    storage: StorageArgument,
    a: Annotated[str, typer.Argument(metavar="A", help="a step, or 'latest'")],
    b: Annotated[str, typer.Argument(metavar="B", help="another step, or 'latest'")] = "latest",
    other: Annotated[
        str | None, typer.Option("--other", "-o", metavar="STORAGE", help="where B is, if elsewhere: another run or checkpoint")
    ] = None,
    item: ItemOption = None,
    glob: FilterOption = None,
    regex: RegexOption = None,
    sort: Annotated[DiffSort, typer.Option("--sort", "-s", help="largest first; or by name")] = DiffSort.relative,
    everything: AllOption = False,
    as_json: JsonOption = False,
) -> None:
    """Say which arrays and values differ between two steps, and by how much.

    Arrays are compared bit for bit. Of those that differ it shows how many elements do, the largest absolute difference, and the
    largest relative one. They are read in boxes, so arrays may be larger than memory. Exit code 0: equal, 1: not.

    \b
    Examples:
      raystate diff runs/lm 1000 1200                    what 200 steps changed
      raystate diff runs/lm 1000 1200 -f 'params.*'      the parameters alone
      raystate diff runs/a 500 500 --other runs/b        are two runs the same?
      raystate diff runs/lm 1000 --other gs://bucket/lm  and the copy's newest
    """
    wanted = path_filter(glob, regex)
    first = Checkpoints(storage)
    second = Checkpoints(other) if other is not None else first
    step_a, step_b = _step(first, a, "A"), _step(second, b, "B")
    with byte_progress(quiet=as_json) as progress:
        task = progress.add_task("comparing", total=None)
        found = first.read(
            step_a,
            lambda _, reader_a: second.read(
                step_b,
                lambda _, reader_b: compare(
                    reader_a,
                    reader_b,
                    wanted=lambda one, name: item in (None, one) and (wanted(name) if name else glob is None and regex is None),
                    on_bytes=lambda done, total: progress.update(task, completed=done, total=total),
                ),
            ),
        )
    if not found.arrays and not found.values and not found.same_values:
        raise ConfigError("nothing to compare: neither step has anything that --item, --filter and --regex let through")
    arrays = _sorted([one for one in found.arrays if one.status != "equal"], sort)
    places = [f"{one.storage.url} step {step}" for one, step in ((first, step_a), (second, step_b))]
    if as_json:
        print_json(
            {
                "a": {"storage": first.storage.url, "step": step_a},
                "b": {"storage": second.storage.url, "step": step_b},
                "differs": found.differs,
                "equal_arrays": len(found.arrays) - len(arrays),
                "equal_values": found.same_values,
                "arrays": [_array_json(one) for one in arrays],
                "values": [dataclasses.asdict(one) for one in found.values],
            }
        )
    else:
        out.print(f"A  {escape(places[0])}\nB  {escape(places[1])}\n")
        _show_arrays(arrays if everything else arrays[:MOST_ROWS])
        _show_values(found.values if everything else found.values[:MOST_ROWS])
        _show_sum(found, arrays, everything)
    if found.differs:
        raise typer.Exit(1)


def _step(checkpoints: Checkpoints, text: str, what: str) -> int:
    if text != "latest" and not text.isdecimal():
        raise ConfigError(
            f"{what}: expected a step's number or 'latest', not {text!r}; another storage is --other", field=what, got=text
        )
    return checkpoints.existing(None if text == "latest" else int(text))


def _sorted(arrays: list[ArrayDifference], sort: DiffSort) -> list[ArrayDifference]:
    """What cannot be measured first."""
    keys = {
        DiffSort.relative: lambda one: one.max_rel,
        DiffSort.absolute: lambda one: one.max_abs,
        DiffSort.elements: lambda one: one.differing,
    }
    if sort is DiffSort.name:
        return sorted(arrays, key=lambda one: (one.item, one.name))
    return sorted(arrays, key=lambda one: (one.status in ("values", "dtype"), -keys[sort](one)))


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
        out.print(f"{escape(name)}: {escape(_text(one.a))} became {escape(_text(one.b))}")


def _text(value: Any) -> str:
    if value is None:
        return "nothing"
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 1]}…"


def _show_sum(found: Comparison, arrays: list[ArrayDifference], everything: bool) -> None:
    hidden = 0 if everything else max(0, len(arrays) - MOST_ROWS) + max(0, len(found.values) - MOST_ROWS)
    if hidden:
        out.print(f"… and {hidden:,} more: --all, or fewer with --filter")
    if not found.differs:
        out.print(
            f"[green]equal[/]: {count(len(found.arrays), 'array')} and {count(found.same_values, 'other value')}, bit for bit"
        )
        return
    kinds = {status: sum(one.status == status for one in arrays) for status in dict.fromkeys(one.status for one in arrays)}
    words = {"values": "in values", "dtype": "in dtype", "shape": "in shape"}
    told = ", ".join(f"{number:,} {words.get(status, status)}" for status, number in kinds.items())
    out.print(
        f"\n{len(arrays):,} of {count(len(found.arrays), 'array')} differ{f' ({told})' if told else ''}; "
        f"{len(found.values):,} of {count(len(found.values) + found.same_values, 'other value')}"
    )


def _array_json(one: ArrayDifference) -> dict[str, Any]:
    sides = {side: {"shape": array.shape, "dtype": array.dtype} if array else None for side, array in (("a", one.a), ("b", one.b))}
    return {**dataclasses.asdict(one), **sides}
