"""Any program, any sequence of calls: nothing that was promised is lost, and nothing comes back that was given up."""

from __future__ import annotations

import math
import os
import re

import pytest

from raystate.arrays import shards, spare, tree
from tests.model.planted import PLANTED
from tests.model.script import Sequence, play
from tests.searching import search

SEEDS = int(os.environ.get("RAYSTATE_MODEL_SEEDS", "30000" if os.environ.get("RAYSTATE_ALL") else "1000"))
CHUNK = 20
SHOWN = 80  # seeds that `make test` plays
FOUND_WITHIN = 1000
LONG_SEARCH = 20  # sequences


# Where each planted bug is found first; the search goes on from seed 0 if it is not found there any more.
KNOWN = {
    "a repeat is captured anew": 94,
    "a restored step counts as durable": 2,
    "abandoned copies go on": 169,
    "long words are not sent": 6,
    "old slots are a dead trainer's": 1,
    "steps of another past are taken": 10,
    "tables do not grow": 30,
    "the last step is not kept": 11,
    "a failed save leaves traces": 3,
    "checked after the decision": 0,
    "text is a metric": 0,
    "retention by number": 528,
    "due saves wait": 92,
    "released under a new group": 198,
    "slots replaced while one is to be filled": 28,
    "earlier commits are forgotten": 96,
    "another dtype is the same state": 5,
    "another thread saves while one leaves": 36,
    "a closed generator has failed": 47,
}


@pytest.fixture
def _columns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every other chunk of seeds these small arrays are cut as those of many megabytes are: into columns of small chunks."""

    def chunk_shape(shard: shards.Index, shape: shards.Index, itemsize: int, _: int) -> shards.Index:
        whole = math.prod(shard) * itemsize
        return shards.chunk_shape(shard, shape, itemsize, max(64, whole // 64))  # the writing of 40,000 chunks takes seconds

    if request.node.callspec.params["first"] // CHUNK % 2:
        monkeypatch.setattr(tree, "chunk_shape", chunk_shape)
        monkeypatch.setattr(shards, "LEAST_PART_BYTES", 1)
        monkeypatch.setattr(shards, "SMALL_BYTES", 0)
        monkeypatch.setattr(spare, "SMALL_BYTES", 0)  # none is held as bytes


@pytest.mark.usefixtures("_columns")
@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=pytest.mark.more if first >= SHOWN else ()) for first in range(0, SEEDS, CHUNK)]
)
def test_any_sequence_of_calls(first: int) -> None:
    broken = [text for seed in range(first, min(first + CHUNK, SEEDS)) if (text := play(seed))]
    assert not broken, "\n\n".join(broken)


@pytest.mark.more
@pytest.mark.parametrize("name", PLANTED)
def test_planted_bug_is_found(name: str) -> None:
    with PLANTED[name]():
        search(name, KNOWN.get(name, 0), FOUND_WITHIN, lambda seed: bool(play(seed)), long_search=LONG_SEARCH)


def test_a_seed_says_everything() -> None:
    """The same calls, the same order, the same outcome."""

    def told(seed: int) -> list[str]:
        sequence = Sequence(seed)
        sequence.play()
        return [re.sub("[0-9a-f]{8,}", "#", line) for line in sequence.told]

    assert all(told(seed) == told(seed) for seed in (3, 81, 116))
