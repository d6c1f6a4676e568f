"""All runs below a prefix on one page of `raystate report`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.progress import Progress

from raystate.cli.report_facts import ReportContent, gather
from raystate.cli.report_page import environment
from raystate.cli.report_time import parts_of
from raystate.core.formats.errors import RaystateError
from raystate.inspection.places import Checkpoints
from raystate.observe.goodput import CAUSES
from raystate.storage import runs_in
from raystate.storage.names import LOG


def runs_of(url: str) -> list[str]:
    """URLs of the runs in a folder of runs; none: it is something else."""
    checkpoints = Checkpoints(url)
    if checkpoints.single is not None or checkpoints.steps() or any(True for _ in checkpoints.storage.list(LOG)):
        return []
    return [f"{checkpoints.storage.url}/{name}" for name in runs_in(checkpoints.storage)]


def gather_runs(urls: Sequence[str], progress: Progress) -> list[ReportContent]:
    """Of each; of one that can't be read, its problem."""
    return [_gather(url, progress) for url in progress.track(urls, description="reading runs")]


def _gather(url: str, progress: Progress) -> ReportContent:
    try:
        return gather(url, progress)
    except RaystateError as error:
        return ReportContent(url=url, history=None, saves=(), problems=(error.message,))


def render_runs(prefix: str, reports: Sequence[ReportContent]) -> str:
    """The page."""
    rows = [_row(prefix, one) for one in reports]
    wall_s = sum(row["goodput"].wall_s for row in rows if row["goodput"] is not None)
    productive_s = sum(row["goodput"].seconds_by_cause["steps"] for row in rows if row["goodput"] is not None)
    used = [cause for cause in CAUSES if any(part.cause == cause for row in rows for part in row["bar"])]
    return environment().get_template("report_runs.html.j2").render(
        prefix=prefix,
        rows=sorted(rows, key=lambda row: -(row["last_s"] or 0.0)),
        wall_s=wall_s,
        ratio=productive_s / wall_s if wall_s > 0 else None,
        used=used,
        made_at=max((one.made_at for one in reports), default=None),
    )  # fmt: skip


def _row(prefix: str, report: ReportContent) -> dict[str, Any]:
    live = [one.past for one in report.saves if one.past.fate == "live"]
    return {
        "name": report.url.removeprefix(prefix).strip("/") or report.url,
        "goodput": report.goodput,
        "bar": parts_of(report.goodput) if report.goodput is not None else [],
        "newest": max((one.step for one in live), default=None),
        "last_s": max((one.time_s for one in live if one.time_s is not None), default=None),
        "restarts": len(report.restarts),
        "repeated": sum(one.repeated or 0 for one in report.restarts),
        "nbytes": sum(one.nbytes or 0 for one in report.saves),
        "problems": report.problems,
    }
