"""The contract of `raystate.testing.storage` against each backend of raystate."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from raystate.storage import Storage
from raystate.testing.storage import StorageContract, StorageModel
from tests.storage.backends import BACKENDS


class TestContract(StorageContract):
    """Each backend in turn."""

    @pytest.fixture(params=sorted(BACKENDS))
    def storage(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
        with BACKENDS[request.param](tmp_path) as storage:
            yield storage


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_a_script_s_own_random_numbers_stay_its_own(backend: str, tmp_path: Path):
    """google-cloud-storage draws one for each upload, in whichever thread that is done."""
    with BACKENDS[backend](tmp_path) as storage:
        before = random.getstate()
        storage.create("a/b", b"1")
        assert storage.read("a/b") == b"1"
        storage.list("a")
        assert storage.delete("a/b")
        assert random.getstate() == before


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_storage_behaves_like_a_dict(backend: str):
    class Model(StorageModel):
        def empty_storage(self, folder: Path) -> contextlib.AbstractContextManager[Storage]:
            return BACKENDS[backend](folder)

    run_state_machine_as_test(Model, settings=settings(max_examples=8 if backend in ("gcs", "s3") else 30, stateful_step_count=25))
