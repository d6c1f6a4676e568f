"""`make docs` builds the site, with every name, setting, command and page; what leads nowhere fails it."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer.main

import raystate
from raystate import waits
from raystate.cli import app
from tests.docs.running import REPO
from tests.processes import run_python


def build(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """What `make docs` runs, from `source` into `out`."""
    (line,) = re.findall(
        r"^docs:.*\n\t\$\(BIN\)/python (-m sphinx .*) docs build/docs \$\(ARGS\)$", (REPO / "Makefile").read_text(), re.M
    )
    return run_python(*shlex.split(line), source, out, code=None, cwd=REPO)


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the pages, and beside it what has been built of them."""
    copy = tmp_path_factory.mktemp("site") / "docs"
    shutil.copytree(REPO / "docs", copy)
    done = build(copy, copy.with_name("html"))
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return copy


def identifiers(page: Path) -> set[str]:
    return set(re.findall(r'\bid="([^"]+)"', page.read_text()))


def test_every_page_is_built_and_every_name_is_in_the_reference(docs: Path):
    html = docs.with_name("html")
    pages = {path.relative_to(docs).with_suffix("") for path in docs.rglob("*") if path.suffix in (".md", ".rst")}
    assert {path for path in pages if not (html / path).with_suffix(".html").exists()} == set()
    named = identifiers(html / "reference/api.html")
    assert {f"raystate.{name}" for name in raystate.__all__ if not name.startswith("__")} <= named
    assert {"raystate.StateManager.restore_or_init", "raystate.Reader.follow"} <= named
    settings = identifiers(html / "reference/config.html")
    assert {f"config-{name}".replace("_", "-") for name in raystate.StateConfig.model_fields} <= settings
    commands = identifiers(html / "reference/commands.html")
    group = typer.main.get_group(app)
    assert {f"raystate-{name}" for name in group.commands} <= commands
    rows = re.findall(r"<tr.*?</tr>", (html / "reference/waits.html").read_text(), re.DOTALL)
    told = {name for row in rows for name in re.findall(r">(\w+_S)<", row) if re.findall(r"<p>(.+?)</p>", row, re.DOTALL)[3:]}
    assert told == {name for name in vars(waits) if name.endswith("_S")}, "each has seconds, what waits and what happens then"


def test_a_broken_link_and_an_unknown_name_fail(docs: Path):
    page = docs / "assumptions.md"
    page.write_text(page.read_text() + "\n[gone](no-such-page.md), `raystate.Reader.no_such_method` and [here](#no-such-heading)\n")
    done = build(docs, docs.with_name("html"))
    assert done.returncode != 0
    for missing in ("no-such-page.md", "raystate.Reader.no_such_method", "no-such-heading"):
        assert missing in done.stderr, done.stderr
