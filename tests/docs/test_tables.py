"""What the documents say of others' names, and what README shows, is what there is."""

from __future__ import annotations

import ast
import dataclasses
import re
import runpy

import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1

from tests.diffs import apply_hunk, hunks_of
from tests.docs.running import ON_RAY, REPO, fences, pages

ORBAX = REPO / "docs" / "migrate-from-orbax.md"


def public(owner: type) -> set[str]:
    return {name for name in vars(owner) if not name.startswith("_")}


def left_column(heading: str) -> set[str]:
    """The words in the first column of the tables below a heading, up to the next heading of that level."""
    below = ORBAX.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in below.splitlines() if line.startswith("|")]
    return {word for row in rows for quoted in re.findall(r"`([^`]+)`", row) for word in re.findall(r"\w+", quoted)}


DEPRECATED = {name for name in public(v1.training.Checkpointer) if "pytree" in name}


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("`CheckpointManager`", public(ocp.CheckpointManager)),
        ("`CheckpointManager`", {field.name for field in dataclasses.fields(ocp.CheckpointManagerOptions)}),
        ("`v1.training.Checkpointer` and the free functions", public(v1.training.Checkpointer) - DEPRECATED),
    ],
    ids=["calls-v0", "options-v0", "calls-v1"],
)
def test_the_table_has_each_name_of_orbax(heading: str, names: set[str]):
    assert len(names) > 10
    assert names - left_column(heading) == set()


def test_readme_shows_raystates_half_of_the_first_script_as_it_stands_and_is_short():
    text = (REPO / "README.md").read_text()
    ((line, shown),) = fences(REPO / "README.md", "python")
    model, _, saving = (REPO / "jobs" / "quickstart" / "train.py").read_text().partition("\n\n\nconfig = ")
    assert shown == f"config = {saving}"
    assert "raystate." not in model
    assert line <= 25
    assert len(text.splitlines()) <= 90
    assert len(text.split()) <= 700
    assert text.count("<picture>") + text.count("![") == 1


def test_pages_that_need_ray_say_so():
    """Else they would start one of their own."""
    starts = re.compile(r"\bStateManager\(|\braystate\.fit\(|\bray\.(init|get|remote)\b")
    for page in pages(on_ray=False):
        for _, text in fences(REPO / page, "python"):
            run = [one for one in ast.parse(text).body if not isinstance(one, ast.FunctionDef)]  # a function may only be shown
            assert not any(starts.search(ast.unparse(one)) for one in run), f"{page} lacks {ON_RAY}"


def test_the_pictures_are_what_their_maker_makes_with_the_figures_of_the_tables():
    folder = REPO / "docs" / "pictures"
    make = runpy.run_path(str(folder / "make.py"))
    made = make["pictures"]()
    assert {name: (folder / name).read_text() for name in made} == made
    rows = [line for line in (REPO / "docs" / "performance.md").read_text().splitlines() if "benchmarks/recovery.py" in line]
    for ours, theirs in make["RECOVERIES"].values():
        shown = [f"{seconds:g} s" for seconds, _ in (ours, theirs)]
        assert any(all(f" {seconds} (" in row for seconds in shown) for row in rows), shown


def test_the_diff_of_readme_fits_a_script_that_knows_nothing_of_raystate():
    """tests/cluster/test_outside.py runs what comes of it."""
    source = (REPO / "tests" / "cluster" / "outside_script.py").read_text()
    for hunk in hunks_of(REPO / "README.md"):
        source = apply_hunk(source, hunk, indents=("", "    "))
    compile(source, "README.md", "exec")
    assert "JaxTrainer(" not in source
