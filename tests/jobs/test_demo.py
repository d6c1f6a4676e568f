"""The demo's tables fit 80 columns, and docs/start.md shows them as they look. Its short form is run by `.ci/run`."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from jobs.demo.__main__ import REPORT
from jobs.demo.view import ends_table, kills_table
from tests.browser import WHERE, browser
from tests.patience import PATIENCE_S
from tests.processes import run_python

PAGE = Path(__file__).parents[2] / "docs" / "start.md"


def shown() -> str:
    """The tables with the values that the page has."""
    text = PAGE.read_text()
    out = io.StringIO()
    console = Console(file=out, width=80)
    console.print(
        kills_table(
            [
                ("trainer, rank 1", 35, "memory", 34, 8.0, 1),
                ("HostActor", 70, "not needed", 70, 0.1, 0),
            ]
        )
    )
    rank_0, rank_1, newest = re.findall(r"\b[0-9a-f]{16}\b(?=\s+yes)", text)
    loss, steps = "0x1.66a4fe0000000p+0", "[60, 80, 100]"
    rows = [
        ("final loss", loss, loss),
        ("state and iterator, rank 0", rank_0, rank_0),
        ("state and iterator, rank 1", rank_1, rank_1),
        ("steps on disk (stock Orbax)", steps, steps),
        ("newest step (stock Orbax)", newest, newest),
    ]
    console.print(ends_table(rows, full=True))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")


def test_the_tables_fit_80_columns_and_are_those_of_the_page():
    tables = shown()
    assert "…" not in tables, "cut off"
    assert max(map(len, tables.splitlines())) <= 80
    assert tables in PAGE.read_text()


@pytest.mark.long
def test_the_long_form_kills_twice_and_ends_equal(tmp_path: Path) -> None:
    """As `make demo ARGS=--full`, with fewer steps: two jobs are submitted, each of two workers."""
    done = run_python("-m", "jobs.demo", "--full", "--steps", 30, cwd=PAGE.parents[1], timeout_s=2 * PATIENCE_S)
    assert "everything held" in done.stdout
    check_report(tmp_path)


def check_report(folder: Path) -> None:
    """The page that the demo leaves has the numbers of its accounting, and asks for nothing."""
    page = PAGE.parents[1] / REPORT
    facts = json.loads(page.with_suffix(".json").read_text())
    assert sum(facts["seconds_by_cause"].values()) == pytest.approx(facts["wall_s"])
    assert facts["seconds_by_cause"]["unknown"] < facts["wall_s"] / 100
    if WHERE is None:
        return
    with browser(folder / "profile") as seen:
        seen.open(page, width=1100)
        rows = seen.value(
            "[...document.querySelectorAll('#causes tr[data-cause]')].map(row => [row.dataset.cause, +row.dataset.seconds])"
        )
        assert dict(rows) == pytest.approx({cause: one for cause, one in facts["seconds_by_cause"].items() if one > 0}, abs=1e-5)
        assert (seen.requests, seen.complaints) == ([page.as_uri()], [])
