"""What readers ask a bucket for: each request is billed, and a reader may ask once a second for days."""

from __future__ import annotations

import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import raystate
from raystate.storage import Storage
from raystate.transfer import import_steps
from tests.cli.transfers import in_memory_step
from tests.storage.backends import gcs_backend, gcs_server

STEPS = (1, 2, 3)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Storage]:
    with gcs_backend(tmp_path) as storage:
        import_steps(storage.url, [in_memory_step(step, {"w": np.arange(6.0)}) for step in STEPS])
        yield storage


def asked(run: Storage, call: Callable[[], object]) -> Counter[str]:
    """The requests that concern the run, by kind."""

    def so_far() -> Counter[str]:
        place = run.url.removeprefix("gs://contract/")
        return Counter(request.kind for request in gcs_server().log() if place in urllib.parse.unquote(request.target))

    before = so_far()
    call()
    return so_far() - before


def test_a_look_for_the_newest_step_lists_once(run: Storage):
    reader = raystate.Reader(run.url)
    markers = {"get_meta": len(STEPS)}
    assert asked(run, reader.latest_step) == {"list": 2, **markers}  # the first one also asks what lies at the URL
    assert asked(run, reader.latest_step) == {"list": 1, **markers}


def test_what_a_path_is_is_asked_once(run: Storage):
    one = raystate.Reader(f"{run.url}/{STEPS[0]}")
    assert asked(run, one.latest_step) == {"list": 1, "get_meta": 2}  # is its marker there, and its metadata
    assert asked(run, one.latest_step) == {"get_meta": 2}
