"""raystate diff: what changed from one step to another, and by how much."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer
from rich.markup import escape

from raystate.cli.bars import byte_progress, count_progress, watched
from raystate.cli.choosing import AllOption, DepthOption, FilterOption, ItemOption, RegexOption, path_filter
from raystate.cli.console import (
    JsonOption,
    StorageArgument,
    out,
    print_json,
    step_or_latest,
)
from raystate.cli.diff_tables import DiffSort, show_comparison, sorted_differences
from raystate.core.formats.errors import ConfigError
from raystate.inspection.differences import ArrayDifference, compare
from raystate.inspection.places import Checkpoints


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
    depth: DepthOption = None,
    sort: Annotated[DiffSort, typer.Option("--sort", "-s", help="largest first; or by name")] = DiffSort.by_relative,
    everything: AllOption = False,
    as_json: JsonOption = False,
) -> None:
    """Say which arrays and values differ between two steps, and by how much.

    It compares arrays bit for bit. Of each that differs it shows the number of such elements, the largest absolute difference, and
    the largest relative one. It reads arrays in boxes, so they may be larger than memory. Exit code 0: equal, 1: not.

    \b
    Examples:
      raystate diff runs/lm 1000 1200                    what 200 steps changed
      raystate diff runs/lm 1000 1200 -f 'params.*'      the parameters alone
      raystate diff runs/lm 1000 1200 --depth 2          sums below two keys
      raystate diff runs/a 500 500 --other runs/b        are two runs the same?
      raystate diff runs/lm 1000 --other gs://bucket/lm  and the copy's newest
    """
    wanted = path_filter(glob, regex)
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
                    wanted=lambda one, name: item in (None, one) and (wanted(name) if name else glob is None and regex is None),
                    on_bytes=lambda done, total: progress.update(task, completed=done, total=total, visible=True),
                ),
                alone=False,
            ),
            alone=False,
        )
    if not found.arrays and not found.values and not found.same_values:
        raise ConfigError("nothing to compare: neither step has anything that --item, --filter and --regex let through")
    places = [f"{one.storage.url} step {step}" for one, step in ((first, step_a), (second, step_b))]
    if as_json:
        arrays = sorted_differences(found.differing, sort)
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
        show_comparison(found, sort=sort, depth=depth, everything=everything)
    if found.differs:
        raise typer.Exit(1)


def _step(checkpoints: Checkpoints, text: str, what: str) -> int:
    return checkpoints.existing(step_or_latest(text, what, "; another storage is --other"))


def _array_json(one: ArrayDifference) -> dict[str, Any]:
    sides = {side: {"shape": array.shape, "dtype": array.dtype} if array else None for side, array in (("a", one.a), ("b", one.b))}
    return {**dataclasses.asdict(one), **sides}
