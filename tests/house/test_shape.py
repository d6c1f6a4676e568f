"""How raystate's source is cut: small files, one name for one class, and decisions that say what they are."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.figures import MOST_ATTRIBUTES, attributes

REPO = Path(__file__).parents[2]
FILES = sorted((REPO / "raystate").rglob("*.py"))
MOST_LINES = 400

TEST = re.compile(r"\btest_\w+\.test_\w+")

OF_ALL_MESSAGES = ("words", "about")  # `declared.Event` and `orders.HostOrder` say what they give

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def test_no_file_is_long():
    assert len(FILES) > 100
    lines = {str(path.relative_to(REPO)): len(path.read_text().splitlines()) for path in FILES}
    assert not {name: count for name, count in lines.items() if count > MOST_LINES}, "a file that passes 400 lines wants to be two"


def test_no_class_has_many_attributes():
    excepted = {"HostLoop", "CoordinatorLoop"}
    many = {name: count for name, count in attributes().items() if count > MOST_ATTRIBUTES}
    assert set(many) <= excepted, f"{many}: a group of them that live and end together wants to be a class"


def test_no_two_classes_have_one_name():
    homes: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(f"{path.relative_to(REPO)}:{node.lineno}")
    assert not {name: found for name, found in homes.items() if len(found) > 1}


def test_no_line_of_a_log_names_raystate_once_more():
    said = [
        f"{path.relative_to(REPO)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "logger"
        and any(isinstance(part, ast.Constant) and str(part.value).startswith("raystate:") for part in ast.walk(node))
    ]
    assert not said


def test_a_comment_names_a_test_that_exists():
    known = {
        f"{path.stem}.{name}"
        for path in (REPO / "tests").rglob("test_*.py")
        for name in re.findall(r"^\s*(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    named = {name for path in FILES for name in TEST.findall(path.read_text())}
    assert len(named) > 10
    assert not named - known


def public(body: list[ast.stmt], owner: str = "") -> Iterator[tuple[str, Definition]]:
    """Classes, functions and methods without a leading underscore, also those of public classes."""
    for node in body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield f"{owner}{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body, f"{owner}{node.name}.")


@pytest.mark.parametrize("path", sorted((REPO / "raystate" / "core").rglob("*.py")), ids=lambda path: path.stem)
def test_all_of_core_says_what_it_does(path: Path):
    tree = ast.parse(path.read_text())
    assert not tree.body or ast.get_docstring(tree), "the module itself"
    silent = [
        f"{path.name}:{node.lineno} {name}"
        for name, node in public(tree.body)
        if not ast.get_docstring(node) and node.name not in OF_ALL_MESSAGES
    ]
    assert not silent
    empty = [name for name, node in public(tree.body) if (ast.get_docstring(node) or "").startswith("See ")]
    assert not empty, "they send the reader elsewhere"
