"""The portable way, with CPU devices that count as others: JAX's pinned memory is made before the first save."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from raystate.arrays import pinned
from raystate.arrays.spare import Spare
from raystate.arrays.stage import copy
from raystate.arrays.tree import describe
from raystate.arrays.ways import Ways

PIECE_BYTES = 1 << 16


class Pool:
    """As JAX's: memory of arrays that are gone is used again; what lacks is made."""

    def __init__(self) -> None:
        self.in_use = self.size = 0
        self.put: list[int] = []
        self.threads: set[str] = set()
        self._lock = threading.Lock()

    def take(self, values: Sequence[Any], targets: Sequence[Any]) -> list[jax.Array]:
        made = _put(values, targets)
        for array, target in zip(made, targets, strict=True):
            if target.memory_kind != "pinned_host":
                continue
            with self._lock:
                nbytes = sum(shard.data.nbytes for shard in array.addressable_shards)
                self.put.append(nbytes)
                self.threads.add(threading.current_thread().name)
                self.in_use += nbytes
                self.size = max(self.size, self.in_use)
            weakref.finalize(array, self._give, nbytes)
        return made

    def _give(self, nbytes: int) -> None:
        with self._lock:
            self.in_use -= nbytes


_put = pinned._put


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    made = Pool()
    monkeypatch.setattr(pinned, "_put", made.take)
    monkeypatch.setattr(pinned, "_is_pinned", lambda device: True)
    monkeypatch.setattr(pinned, "PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(Spare, "takes", lambda *_: False)
    return made


def state() -> dict[str, jax.Array]:
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4])
    rows = np.arange(100_000, dtype=np.float32).reshape(200, 500)
    specs = {"cut": P("x", "y"), "copied": P("x"), "alike": P(), "small": P(("x", "y"))}
    values = {"cut": rows, "copied": rows, "alike": rows, "small": np.ones(8, np.int8)}
    return {name: jax.device_put(values[name], NamedSharding(mesh, spec)) for name, spec in specs.items()}


def prepare(ways: Ways) -> None:
    thread = threading.Thread(target=ways.prepare, args=[False], name="behind")
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_the_first_save_finds_its_pinned_memory_made(pool: Pool):
    ways, tree = Ways(), state()
    described = describe({"state": tree})
    ways.foresee(described)
    assert not pool.put, "not on the training thread"
    prepare(ways)
    assert pool.threads == {"behind"} and max(pool.put) <= PIECE_BYTES and not pool.in_use
    before = pool.size
    held = ways.hold(described)
    assert pool.in_use == before == pool.size, "the save takes all of it, and no more"
    copy(held, np.zeros(described.layout.data_bytes, np.uint8))


def test_memory_is_made_once_and_not_beside_a_save(pool: Pool):
    ways, tree = Ways(), state()
    described = describe({"state": tree})
    ways.foresee(described)
    prepare(ways)
    made = len(pool.put)
    prepare(ways)
    assert len(pool.put) == made
    late = Ways()
    late.foresee(described)
    late.hold(described).release()
    made = len(pool.put)
    prepare(late)
    assert len(pool.put) == made


def test_what_can_not_be_made_is_left_to_the_save(pool: Pool, monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    ways, described = Ways(), describe({"state": state()})
    ways.foresee(described)
    monkeypatch.setattr(pinned, "_put", full)
    prepare(ways)
    monkeypatch.setattr(pinned, "_put", pool.take)
    copy(ways.hold(described), np.zeros(described.layout.data_bytes, np.uint8))
