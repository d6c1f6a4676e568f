"""raystate report: a run's story as one page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from raystate.cli.bars import count_progress
from raystate.cli.console import StorageArgument, count, out
from raystate.cli.report_facts import gather
from raystate.cli.report_page import render
from raystate.core.formats.errors import ConfigError
from raystate.storage import owner_of

_PAGE = b"<!doctype html>"  # begins what `render` gives


def report(
    storage: StorageArgument,
    page: Annotated[Path, typer.Option("--out", "-o", metavar="FILE.html", help="the page; a page that is there is replaced")],
) -> None:
    """Write a run's story as one HTML page: no network, no scripts, fit to be printed.

    It shows the durable steps over time, the seconds and bytes of saves, and the recoveries with their causes. It shows goodput, the
    steps that retention removed or that were set aside, and the curves of the metrics. Of an Orbax directory it shows the steps. It
    reads the run's log, its ledger and its steps' small files, and writes nothing to the storage. Exit code 1 if something is damaged;
    the page names it.

    \b
    Examples:
      raystate report gs://bucket/lm --out lm.html
      raystate report runs/lm -o /tmp/lm.html && xdg-open /tmp/lm.html
    """
    _check_free(page)
    with count_progress(quiet=False) as progress:
        found = gather(storage, progress)
    _write(page, render(found))
    out.print(f"{escape(str(page))}: {count(len(found.saves), 'durable step')}, of {escape(found.url)}")
    if found.problems:
        out.print(f"[yellow]{count(len(found.problems), 'problem')}[/], the first: {escape(found.problems[0])}")
        raise typer.Exit(1)


def _check_free(page: Path) -> None:
    """A user who mistypes FILE loses nothing by it: neither a checkpoint nor any other file."""
    folder = page.absolute().parent
    why = ""
    if page.is_dir() or not folder.is_dir():
        why = (
            f"{page} {'is a folder' if page.is_dir() else 'lies in a folder that does not exist'}: name a file, such as report.html"
        )
    elif owner := owner_of(f"file://{os.path.realpath(folder)}"):
        why = f"{owner}: write {page.name} to another folder"
    elif not _may_go(page):
        why = f"{page} is there, and no HTML page: name another file, or remove it first"
    if why:
        raise ConfigError(f"--out: {why}", field="out", got=str(page))


def _may_go(page: Path) -> bool:
    """Whether nothing is lost with what lies there: nothing, an empty file, or a page."""
    if not page.is_file():
        return not page.exists()  # a device is no file
    try:
        with page.open("rb") as file:
            return file.read(len(_PAGE)) in (b"", _PAGE)
    except OSError:
        return False


def _write(page: Path, text: str) -> None:
    """Whole or not at all."""
    half = page.with_name(f".{page.name}.{os.getpid()}")
    try:
        try:
            half.write_bytes(text.encode("utf-8", errors="backslashreplace"))
            half.replace(page)
        finally:
            half.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: {page} can't be written: {error}", field="out", got=str(page)) from error
