"""The documents name tests and settings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import raystate

REPO = Path(__file__).parents[2]


def test_every_test_that_is_named_exists():
    files = [*(REPO / "tests").rglob("test_*.py"), REPO / "raystate" / "testing" / "storage" / "contract.py"]
    tests = "\n".join(path.read_text() for path in files)
    named = set(re.findall(r"`(test_\w+)`", (REPO / "docs" / "invariants.md").read_text()))
    assert len(named) > 20
    assert not [name for name in sorted(named) if f"def {name}(" not in tests]


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        *(str(path.relative_to(REPO)) for path in sorted((REPO / "docs").rglob("*.md"))),
    ],
)
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
