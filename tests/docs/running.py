"""Running the examples of a Markdown page: its ```python fences, top to bottom, as one program in a folder of its own.

MyST-NB would execute pages, too, but as notebooks: a Jupyter kernel for each page (seconds of imports), outputs that change from run to
run, and cells that can't be looked at from a test. Here one interpreter runs many pages, and a check of ours sees what a page has computed.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from tests.processes import xla_flags

REPO = Path(__file__).parents[2]
ON_RAY = "<!-- examples: Ray -->"  # in a page whose examples need a Ray cluster
STOOD_IN = "<!-- examples: tests/docs/"  # in a page whose examples need what isn't installed; that test gives them a stand-in
A_PROGRAM = "<!-- a program:"  # in a page whose examples are a script, its changes and its commands: `run_tutorial` runs it

Names = dict[str, Any]


def fences(page: Path, language: str) -> list[tuple[int, str]]:
    """(line of its first line, text) of each fence of a language."""
    tokens = MarkdownIt("commonmark").parse(page.read_text())
    return [(token.map[0] + 1, token.content) for token in tokens if token.type == "fence" and token.info == language and token.map]


def program_of(page: Path) -> str:
    """The page's examples as one program in which every line has the number that it has on the page."""
    program: list[str] = []
    for line, text in fences(page, "python"):
        program += [""] * (line - len(program)) + text.splitlines()
    return "\n".join(program) + "\n"


def pages(*, on_ray: bool) -> list[str]:
    """Pages with examples, as paths in the repository."""
    texts = {page: page.read_text() for page in sorted((REPO / "docs").rglob("*.md")) if fences(page, "python")}
    found = [page for page, text in texts.items() if A_PROGRAM not in text and STOOD_IN not in text and (ON_RAY in text) == on_ray]
    return [str(page.relative_to(REPO)) for page in found]


def run_page(page: str, folder: Path, check: str | None = None) -> None:
    """In the process of `Interpreter`: run a page in `folder`, then `check` (of `tests.docs.checks`) on its names and that folder."""
    with contextlib.chdir(folder):
        names: Names = {"__name__": "__main__", "__file__": str(REPO / page)}
        exec(compile(program_of(REPO / page), str(REPO / page), "exec"), names)
        if check is not None:
            found: Callable[[Names, Path], None] = getattr(importlib.import_module("tests.docs.checks"), check)
            found(names, folder)


def _set_up(environment: dict[str, str]) -> None:
    os.environ.update(environment)


class Interpreter:
    """A Python that runs pages one after the other. One that a page has ended is replaced."""

    def __init__(self, environment: dict[str, str]):
        self._environment = environment
        self._pool = self._start()

    def _start(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_set_up, initargs=(self._environment,))

    def run(self, page: str, folder: Path, check: str | None = None) -> None:
        """Raises what the page or the check raises, with its traceback; `BrokenProcessPool` if the interpreter has died."""
        try:
            self._pool.submit(run_page, page, folder, check).result()
        except Exception:
            self.close()  # nobody knows what a failed page has left
            self._pool = self._start()
            raise

    def close(self) -> None:
        self._pool.shutdown()


@contextlib.contextmanager
def interpreter(**environment: str) -> Iterator[Interpreter]:
    """An `Interpreter` with these environment variables besides those of the tests; as a user has it: with one device."""
    with contextlib.closing(Interpreter({"XLA_FLAGS": xla_flags(1), **environment})) as one:
        yield one
