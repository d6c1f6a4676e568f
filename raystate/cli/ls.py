"""raystate ls: which steps there are."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape

from raystate.cli.bars import count_progress
from raystate.cli.choosing import AllOption
from raystate.cli.console import JsonOption, StorageArgument, count, figure, out, print_json, size, when
from raystate.core.formats.errors import ConfigError
from raystate.inspection.listing import RunSummary, StepSummary, beside, given_up, runs_below, summaries
from raystate.inspection.places import Checkpoints
from raystate.orbax.json_checks import is_comparable

_SHOWN = 20


def ls(
    storage: StorageArgument,
    last: Annotated[int, typer.Option("--last", "-n", metavar="N", min=1, help="only the newest N steps")] = _SHOWN,
    everything: AllOption = False,
    sort: Annotated[str, typer.Option("--sort", "-s", metavar="KEY", help="step, time, size, or the name of a metric")] = "step",
    as_json: JsonOption = False,
) -> None:
    """List the steps of a run or an Orbax directory, or the runs in a folder.

    It shows when each was saved, its size in storage, its items and its metrics. The newest come last. Exit code 1 if it can't look
    at a step.

    \b
    Examples:
      raystate ls gs://bucket/lm                 the newest 20 steps
      raystate ls runs/lm --all --sort loss      all of them, the best last
      raystate ls runs                           the runs in a folder
      raystate ls runs/lm --json | jq '.steps[-1].nbytes'
    """
    checkpoints = Checkpoints(storage)
    steps = checkpoints.steps()
    if not steps and (runs := [*runs_below(checkpoints.storage)]):
        _show_runs(checkpoints.storage.url, runs, as_json=as_json)
        return
    checkpoints.existing(None)
    chosen = steps if everything or sort not in ("step", "time") else steps[-last:]
    with count_progress(quiet=as_json) as progress:
        looks = summaries(checkpoints, chosen)
        found = [one for one in progress.track(looks, total=len(chosen), description="looking at steps") if one is not None]
    total = len(steps) - (len(chosen) - len(found))  # some may have been retired meanwhile
    found = _sorted(found, sort)
    hidden = 0 if everything else max(0, len(found) - last)
    found, strange, lost = found[hidden:], beside(checkpoints), [*(given_up(checkpoints.storage) or {}).values()]
    if as_json:
        print_json(
            {
                "storage": checkpoints.storage.url,
                "steps": [{**dataclasses.asdict(one), "items": dict(one.items)} for one in found],
                "count": total,
                "incomplete": strange,
                "given_up": lost,
            }
        )
    else:
        _show(checkpoints, found, total, strange, lost)
    if any(one.problem for one in found):
        raise typer.Exit(1)


def _show_runs(url: str, runs: Sequence[RunSummary], *, as_json: bool) -> None:
    if as_json:
        print_json({"storage": url, "runs": [dataclasses.asdict(one) for one in runs]})
        return
    width = max(len(one.name) for one in runs)
    out.print(f"[bold]{'run':<{width}}  {'steps':>5}  {'newest':>6}  {'saved':<19}  holds[/]")
    for one in runs:
        newest = one.newest
        step, saved, holds = (f"{newest.step}", when(newest.committed_at), _holds(newest)) if newest else ("-", "-", "")
        out.print(f"{escape(one.name):<{width}}  {one.steps:>5}  {step:>6}  {saved:<19}  {escape(holds)}".rstrip())
    out.print(f"{count(len(runs), 'run')} in {escape(url)}")


def _sorted(found: list[StepSummary], sort: str) -> list[StepSummary]:
    match sort:
        case "step":
            return sorted(found, key=lambda one: one.step)
        case "time":
            return sorted(found, key=lambda one: (one.committed_at.timestamp() if one.committed_at else 0.0, one.step))
        case "size":
            return sorted(found, key=lambda one: (one.nbytes, one.step))
    names = sorted({name for one in found for name in one.metrics})
    if sort not in names:
        raise ConfigError(f"--sort: expected step, time, size or one of the metrics {names}, not {sort!r}", field="sort", got=sort)
    # The best comes last. No metric says which way is better; most are losses: the smallest comes last.
    return sorted(found, key=lambda one: _goodness(one.metrics.get(sort)))


def _goodness(value: Any) -> float:
    """Of a metric's value; one that is missing, no number or NaN is the worst."""
    return -value if is_comparable(value) else -math.inf


def _show(checkpoints: Checkpoints, found: list[StepSummary], total: int, strange: list[str], lost: Sequence[str]) -> None:
    rows = [(str(one.step), when(one.committed_at), size(one.nbytes), _holds(one)) for one in found]
    widths = [max(len(row[column]) for row in [("step", "saved", "size", ""), *rows]) for column in range(3)]
    out.print(f"[bold]{'step':>{widths[0]}}  {'saved':<{widths[1]}}  {'size':>{widths[2]}}  holds[/]")
    for (step, saved, nbytes, holds), one in zip(rows, found, strict=True):
        style = "red" if one.problem else ""
        out.print(f"{step:>{widths[0]}}  {saved:<{widths[1]}}  {nbytes:>{widths[2]}}  {escape(holds)}", style=style)
    shown = f"the last {len(found)} of " if len(found) < total else ""
    out.print(f"{shown}{count(total, 'step')} of {escape(checkpoints.storage.url)}" + (", all of them: --all" if shown else ""))
    if strange:
        named = ", ".join(strange[:3]) + (f" and {len(strange) - 3} more" if len(strange) > 3 else "")
        out.print(f"[yellow]not complete[/] {escape(named)}: unfinished saves, or copies that have lost their markers")
    for one in lost[-3:]:
        out.print(f"[yellow]given up[/] {escape(one)}")
    if len(lost) > 3:
        out.print(f"and {count(len(lost) - 3, 'earlier step')} given up: --json lists them")


def _holds(one: StepSummary) -> str:
    if one.problem:
        return f"DAMAGED: {one.problem}"
    parts = [", ".join(one.items)]
    if one.metrics:
        parts.append(", ".join(f"{name} {figure(value)}" for name, value in one.metrics.items()))
    if one.save is None:
        parts.append("(no run)")
    return "  ".join(parts)
