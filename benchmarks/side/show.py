"""The table on the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.side.machine import said
from benchmarks.side.rows import Row

WIDTH = 200


def show(rows: list[Row], machine: dict[str, Any]) -> None:
    """Print it."""
    names = list(dict.fromkeys(name for row in rows for name in row.peers))
    printed = Table(caption="\n".join([*limits_text(rows), said(machine)]), caption_justify="left", pad_edge=False)
    printed.add_column("figure", overflow="fold")
    for column in ("raystate", *names, "limit", "ratio", "goal"):
        printed.add_column(column, justify="right", overflow="fold")
    printed.add_column("met")
    case = None
    for row in rows:
        if row.case != case:
            printed.add_section()
            printed.add_row(f"[bold]{row.case}[/bold]" if row.case else "")
            case = row.case
        limit = f"{value_text(row.limit, row.unit)}\n{row.limit['name']}" if row.limit else ""
        printed.add_row(
            row.figure + (f"\n  {row.note}" if row.note else ""),
            value_text(row.ours, row.unit),
            *(value_text(row.peers.get(name), row.unit) for name in names),
            limit,
            "\n".join("" if (ratio := row.ratio(goal)) is None else f"{ratio:.2f}" for goal in row.goals),
            "\n".join(goal.text for goal in row.goals),
            "" if row.met is None else "[green]yes[/green]" if row.met else "[red]no[/red]",
        )
    Console(width=WIDTH).print(printed)


def limits_text(rows: list[Row]) -> list[str]:
    """What the machine itself takes, a line for each case."""
    found: list[str] = []
    for row in rows:
        if row.limits:
            each = ", ".join(f"{name} {number(value['median'])}" for name, value in row.limits.items())
            found.append(f"the machine itself, ms, {row.case}: {each}")
    return found


def value_text(value: dict[str, Any] | None, unit: str) -> str:
    """The median, and below it the lowest and the highest."""
    if value is None:
        return ""
    text = f"{number(value['median'])} {unit}"
    return text if value["n"] == 1 else f"{text}\n{number(value['low'])} to {number(value['high'])}"


def number(value: float) -> str:
    """With about three digits."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"
