"""The jobs that save and restore, started once for all tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.reshard.held import Group, Here

ALL = bool(os.environ.get("RAYSTATE_ALL"))
TOPOLOGIES = [(1, 8), (2, 4), (3, 2), *([(4, 2), (6, 1), (1, 1)] if ALL else [])]  # processes x devices each


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[int, int], Any]]:
    """(processes, devices each) -> the job."""
    folder = tmp_path_factory.mktemp("groups")
    made: dict[tuple[int, int], Any] = {}
    try:
        for topology in TOPOLOGIES:
            made[topology] = Here() if topology == (1, 8) else Group(*topology, folder / f"{topology}.log")
        yield made
    finally:
        for job in made.values():
            job.close()
