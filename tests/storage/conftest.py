"""`storage`: an empty storage of each backend in turn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from raystate.storage import Storage
from tests.storage.backends import BACKENDS

# The crash points of an object store are played on gs:// (and in test-all on s3:// too); the contract on all of them, always.
OFTEN = [pytest.param(name, marks=pytest.mark.long) if name == "s3" else name for name in sorted(BACKENDS)]


@pytest.fixture(params=OFTEN)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    with BACKENDS[request.param](tmp_path) as storage:
        yield storage
