"""raystate report: a run's story as one page."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from raystate.cli.bars import count_progress
from raystate.cli.console import JsonOption, StorageArgument, count, out, print_json
from raystate.cli.report_facts import facts_of, gather
from raystate.cli.report_page import render, render_slide
from raystate.cli.report_runs import gather_runs, render_runs, runs_of
from raystate.cli.report_slide import png_of
from raystate.core.formats.errors import ConfigError
from raystate.storage import canonical_url, owner_of

_PAGE = b"<!doctype html>"  # begins what `render` gives
_PNG = b"\x89PNG\r\n\x1a\n"


def report(
    storage: StorageArgument,
    page: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE.html", help="the page; a page that is there is replaced")
    ] = None,
    slide: Annotated[
        Path | None, typer.Option("--png", metavar="FILE.png", help="a picture of the most important, for a slide")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a run's story as one HTML page: no network, no scripts, fit for a phone and to be printed.

    It shows where the run's time went by cause, a timeline of its groups, deaths, notices and saves, what each restart took, slow
    ranks, the durable steps and the curves of the metrics. Of a folder of runs it shows all of them; of an Orbax directory its steps. It
    reads the run's log, its ledger and its steps' small files, and writes nothing to the storage. Exit code 1 if something is damaged;
    the page names it.

    \b
    Examples:
      raystate report gs://bucket/lm --out lm.html
      raystate report runs/lm -o /tmp/lm.html && xdg-open /tmp/lm.html
      raystate report runs --out all.html           all runs in a folder
      raystate report runs/lm --png lm.png          for a slide
      raystate report runs/lm --json | jq .seconds_by_cause
    """
    if page is None and slide is None and not as_json:
        raise ConfigError("--out: name the page to be written, such as report.html; or ask for --png or --json", field="out")
    if page is not None:
        _check_free(page, "out", _PAGE)
    if slide is not None:
        _check_free(slide, "png", _PNG)
    if page is not None and slide is not None and os.path.realpath(page) == os.path.realpath(slide):
        raise ConfigError(f"--png: {slide} is where the page goes: name another file", field="png", got=str(slide))
    with _uncollected():
        _report(storage, page, slide, as_json=as_json)


def _report(storage: str, page: Path | None, slide: Path | None, *, as_json: bool) -> None:
    with count_progress(quiet=as_json) as progress:
        urls = runs_of(storage)
        every = gather_runs(urls, progress) if urls else [gather(storage, progress)]
    if slide is not None:
        if urls:
            raise ConfigError(f"--png shows one run, and {storage} is a folder of {count(len(urls), 'run')}", field="png")
        _write(slide, "png", png_of(render_slide(every[0])))
    if page is not None:
        text = render_runs(canonical_url(storage), every) if urls else render(every[0])
        _write(page, "out", text.encode("utf-8", errors="backslashreplace"))
    problems = [problem for one in every for problem in one.problems]
    if as_json:
        print_json({"storage": canonical_url(storage), "runs": [facts_of(one) for one in every]} if urls else facts_of(every[0]))
        raise typer.Exit(1 if problems else 0)
    told = count(len(urls), "run") if urls else count(len(every[0].saves), "durable step")
    for one in filter(None, (page, slide)):
        out.print(f"{escape(str(one))}: {told}, of {escape(canonical_url(storage))}")
    if problems:
        out.print(f"[yellow]{count(len(problems), 'problem')}[/], the first: {escape(problems[0])}")
        raise typer.Exit(1)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """All that is read is shown: looking through it, again and again, for what can go took a quarter of the time of a long run."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _check_free(page: Path, option: str, begins: bytes) -> None:
    """A user who mistypes FILE loses nothing by it: neither a checkpoint nor any other file."""
    folder = page.absolute().parent
    why = ""
    if page.is_dir() or not folder.is_dir():
        why = (
            f"{page} {'is a folder' if page.is_dir() else 'lies in a folder that does not exist'}: name a file, such as report.html"
        )
    elif owner := owner_of(f"file://{os.path.realpath(folder)}"):
        why = f"{owner}: write {page.name} to another folder"
    elif not _may_go(page, begins):
        why = f"{page} is there, and no {'HTML page' if begins == _PAGE else 'PNG'}: name another file, or remove it first"
    if why:
        raise ConfigError(f"--{option}: {why}", field=option, got=str(page))


def _may_go(page: Path, begins: bytes) -> bool:
    """Whether nothing is lost with what lies there: nothing, an empty file, or one of its kind."""
    if not page.is_file():
        return not page.exists()  # a device is no file
    try:
        with page.open("rb") as file:
            return file.read(len(begins)) in (b"", begins)
    except OSError:
        return False


def _write(page: Path, option: str, data: bytes) -> None:
    """Whole or not at all."""
    half = page.with_name(f".{page.name}.{os.getpid()}")
    try:
        try:
            half.write_bytes(data)
            half.replace(page)
        finally:
            half.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"--{option}: {page} can't be written: {error}", field=option, got=str(page)) from error
