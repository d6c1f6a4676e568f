"""raystate diff: what changed from one step to another, and by how much."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import typer
from rich.markup import escape

from raystate.cli.bars import byte_progress, count_progress, watched
from raystate.cli.choosing import MOST_ROWS, AllOption, FilterOption, ItemOption, path_filter
from raystate.cli.console import JsonOption, StorageArgument, count, figure, out, print_json, step_or_latest
from raystate.core.formats.errors import ConfigError
from raystate.core.formats.tree import ArraySpec
from raystate.inspection.differences import ArrayDifference, Comparison, ValueDifference, compare
from raystate.inspection.places import Checkpoints

_TEXT = 30  # characters of a value


def diff(
    storage: StorageArgument,
    a: Annotated[str, typer.Argument(metavar="A", help="a step, or 'latest'")],
    b: Annotated[str, typer.Argument(metavar="B", help="another step, or 'latest'")] = "latest",
    other: Annotated[
        str | None, typer.Option("--other", "-o", metavar="STORAGE", help="where B is, if elsewhere: another run or checkpoint")
    ] = None,
    item: ItemOption = None,
    glob: FilterOption = None,
    everything: AllOption = False,
    as_json: JsonOption = False,
) -> None:
    """Say which arrays and values differ between two steps, and by how much.

    It compares arrays bit for bit. Of each that differs it shows the largest absolute difference, and the largest relative one. It
    reads arrays in boxes, so they may be larger than memory. Exit code 0: equal, 1: not.

    \b
    Examples:
      raystate diff runs/lm 1000 1200                    what 200 steps changed
      raystate diff runs/lm 1000 1200 -f 'params.*'      the parameters alone
      raystate diff runs/a 500 500 --other runs/b        are two runs the same?
      raystate diff runs/lm 1000 --other gs://bucket/lm  and the copy's newest
    """
    wanted = path_filter(glob)
    first = Checkpoints(storage)
    second = Checkpoints(other) if other is not None else first
    step_a, step_b = _step(first, a, "A"), _step(second, b, "B")
    with byte_progress(quiet=as_json) as progress, count_progress(quiet=as_json) as opening:
        task = progress.add_task("comparing", total=None, visible=False)
        found = first.read(
            step_a,
            lambda _, reader_a: second.read(
                step_b,
                lambda _, reader_b: compare(
                    watched(reader_a, opening),
                    watched(reader_b, opening),
                    wanted=lambda one, name: item in (None, one) and (wanted(name) if name else glob is None),
                    on_bytes=lambda done, total: progress.update(task, completed=done, total=total, visible=True),
                ),
                alone=False,
            ),
            alone=False,
        )
    if not found.arrays and not found.values and not found.same_values:
        raise ConfigError("nothing to compare: neither step has anything that --item and --filter let through")
    places = [f"{one.storage.url} step {step}" for one, step in ((first, step_a), (second, step_b))]
    arrays = found.differing
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
        _show(found, most=None if everything else MOST_ROWS)
    if found.differs:
        raise typer.Exit(1)


def _step(checkpoints: Checkpoints, text: str, what: str) -> int:
    return checkpoints.existing(step_or_latest(text, what, "; another storage is --other"))


def _array_json(one: ArrayDifference) -> dict[str, Any]:
    sides = {side: {"shape": array.shape, "dtype": array.dtype} if array else None for side, array in (("a", one.a), ("b", one.b))}
    return {**dataclasses.asdict(one), **sides}


def _show(found: Comparison, *, most: int | None) -> None:
    arrays, values = found.differing[:most], found.values[:most]
    if arrays:
        out.print(f"[bold]{'max rel':>9}  {'max abs':>9}  array[/]")
    for one in arrays:
        out.print(f"{figure(one.max_rel):>9}  {figure(one.max_abs):>9}  {escape(_named(one))}{escape(_remark(one))}")
    if arrays and values:
        out.print()
    for one in values:
        out.print(f"{escape(_named(one))}: {escape(_text(one.a))} became {escape(_text(one.b))}")
    if hidden := len(found.differing) - len(arrays) + len(found.values) - len(values):
        out.print(f"… and {hidden:,} more: --all, or fewer with --filter")
    others = count(len(found.values) + found.same_values, "other value")
    if found.differs:
        out.print(f"\n{len(found.differing):,} of {count(len(found.arrays), 'array')} and {len(found.values):,} of {others} differ")
    else:
        out.print(f"[green]equal[/], bit for bit: {count(len(found.arrays), 'array')} and {others}")


def _named(one: ArrayDifference | ValueDifference) -> str:
    return one.name if one.item == "state" else f"{one.item}:{one.name}" if one.name else one.item


def _remark(one: ArrayDifference) -> str:
    match one.status:
        case "values":
            return "" if one.max_abs else "  (only the bits of zeros or NaN)"
        case "dtype" | "shape":
            return f"  ({_kind(one.a)} became {_kind(one.b)})"
        case "unreadable":
            return f"  (unreadable: {one.problem})"
        case _:
            return f"  ({one.status}: {_kind(one.a or one.b)})"


def _kind(array: ArraySpec | None) -> str:
    return f"{array.dtype}[{','.join(map(str, array.shape))}]" if array is not None else ""


def _text(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 1]}…"
