"""The documents name tests and settings that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

import raystate

REPO = Path(__file__).parents[2]


def test_every_test_that_is_named_exists():
    files = [*(REPO / "tests").rglob("test_*.py"), REPO / "raystate" / "testing" / "storage" / "contract.py"]
    tests = "\n".join(path.read_text() for path in files)
    named = set(re.findall(r"`(test_\w+)`", (REPO / "docs" / "invariants.md").read_text()))
    assert len(named) > 20
    assert not [name for name in sorted(named) if f"def {name}(" not in tests]


PAGES = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    *(str(one.relative_to(REPO)) for one in sorted((REPO / "docs").rglob("*.md"))),
]


@pytest.mark.parametrize("name", PAGES)
def test_code_has_a_fence_that_names_its_language(name: str):
    for token in MarkdownIt("commonmark").parse((REPO / name).read_text()):
        assert token.type != "code_block", f"an indented block is wrapped like prose: {token.content}"
        if token.type == "fence" and token.info in ("python", "py"):
            ast.parse(token.content)


@pytest.mark.parametrize("name", PAGES)
def test_links_and_files_exist(name: str):
    text = (REPO / name).read_text()
    for target in re.findall(r"\]\((?!https:)([^)#]+)\)", text):
        assert ((REPO / name).parent / target).exists(), target
    for path in re.findall(r"`((?:tests|raystate|benchmarks|configs|jobs)/[\w./]+)`", text):
        assert (REPO / path).exists(), path


def test_settings_in_the_runbook_exist():
    fields = set(raystate.StateConfig.model_fields)
    named = set(re.findall(r"`(\w+_(?:s|steps|slots|memory))`", (REPO / "docs" / "runbook.md").read_text()))
    assert named
    assert named <= fields, named - fields


def test_what_a_person_sees_is_short_in_the_runbook():
    rows = [line for line in (REPO / "docs" / "runbook.md").read_text().splitlines() if line.startswith("| ")]
    seen = [line[2:].partition(" | ")[0] for line in rows]
    assert len(seen) > 60
    assert [text for text in seen if len(text) > 60] == []


def test_the_words_are_few_and_each_has_one_meaning():
    rows = re.findall(r"^\| ([a-z ]+) \| ", (REPO / "docs" / "concepts.md").read_text(), re.MULTILINE)
    words = [row for row in rows if row != "word"]
    assert "durable" in words
    assert len(set(words)) == len(words) <= 25


def test_the_front_page_says_first_what_raystate_is():
    before_the_picture = (REPO / "docs/index.md").read_text().partition("![")[0]
    assert "raystate is a Python library" in before_the_picture
