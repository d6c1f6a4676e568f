"""`storage`: an empty storage of each backend in turn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from raystate.storage import Storage
from tests.storage.backends import BACKENDS


@pytest.fixture(params=sorted(BACKENDS))
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    with BACKENDS[request.param](tmp_path) as storage:
        yield storage
