"""One run for all tests of a file; each test damages a copy of its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from raystate.inspection import verification
from tests.damage.a_run import make_run
from tests.damage.damages import Copy
from tests.damage.judging import Flat, expected_of


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Flat]]:
    root = tmp_path_factory.mktemp("damage") / "run"
    return root, expected_of(make_run(root))


@pytest.fixture
def copy(original: tuple[Path, dict[int, Flat]], tmp_path: Path) -> Copy:
    return Copy(original[0], tmp_path / "copy")


@pytest.fixture
def expected(original: tuple[Path, dict[int, Flat]]) -> dict[int, Flat]:
    return original[1]


@pytest.fixture(autouse=True)
def _quick_and_quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(verification, "READERS", 1)  # thirty small objects are not worth eight threads, a thousand times
    logger = logging.getLogger("raystate")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)
