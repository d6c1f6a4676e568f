"""The drill's tables, for people: at most 80 characters wide."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jobs.drill.outcomes import Report, Row, rows
from jobs.drill.plan import KINDS, PHASES

WIDTH = 80
KIND_NAMES = tuple(kind.name for kind in KINDS)
MOST_SHOWN = 20


def table(title: str, found: list[Row]) -> Table:
    """A line for each row."""
    made = Table(
        title=f"\n{title}",
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 1),
        pad_edge=False,
        collapse_padding=True,
    )
    made.add_column("", no_wrap=True)
    for name in (
        "\nfaults",
        "\nback",
        "steps lost\nmedian  max",
        "seconds to a new step\nmedian    p95    max",
        "to be safe again\nmedian    max",
    ):
        made.add_column(name, justify="right", no_wrap=True)
    for row in found:
        lost = f"{_count(row.steps_lost.median)} {_count(row.steps_lost.max):>5}"
        back = " ".join(f"{_seconds(value):>6}" for value in (row.seconds.median, row.seconds.p95, row.seconds.max))
        safe = " ".join(f"{_seconds(value):>6}" for value in (row.safe_s.median, row.safe_s.max))
        made.add_row(row.name, str(row.faults), str(row.recovered), lost, back, safe)
    return made


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def show(console: Console, report: Report) -> None:
    """Print the tables and the verdict."""
    if report.outcomes:
        console.print(table("by kind of fault", rows(report.outcomes, lambda one: one.kind, KIND_NAMES)))
        console.print(table("by what the Coordinator was doing", rows(report.outcomes, lambda one: one.before.phase, PHASES)))
    console.print()
    for kind, why in report.left_out.items():
        console.print(f"left out: {kind}: {why}", highlight=False)
    if report.not_counted:
        console.print(f"{len(report.not_counted)} faults did not count, and others came in their place", highlight=False)
    if report.unasked:
        console.print(f"{report.unasked} restarts that no fault explains", highlight=False)
    if report.not_durable:
        console.print(
            f"{len(report.not_durable)} due steps did not get to storage, and the run's end has named them", highlight=False
        )
    console.print(
        f"{report.recovered} of {report.wanted} faults recovered, {report.steps} steps, {report.took_s:.0f} s", highlight=False
    )
    words = {True: "yes", False: "NO", None: "not compared"}
    if report.same_order is None:
        console.print(f"bit-equal to the undisturbed run: {words[report.bit_equal]}", highlight=False)
    else:
        console.print(f"the undisturbed run's examples in its order, and its losses: {words[report.same_order]}", highlight=False)
    problems = report.all_violations
    for text in problems[:MOST_SHOWN]:
        console.print(f"[red]violated:[/] {escape(text)}", highlight=False)
    if len(problems) > MOST_SHOWN:
        console.print(f"… and {len(problems) - MOST_SHOWN} more, in the JSON", highlight=False)
    console.print("Everything held." if report.held else "[bold red]It did not hold.[/]", highlight=False)
