"""How arrays are laid out in storage: chunk_bytes, zstd_level and file_bytes of a run's config."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

import raystate
from raystate.inspection.verification import verify_step
from tests.model.world import Rank, World

MIB = 1 << 20
STATE: dict[str, Any] = {
    "zeros": np.zeros((256, 1024), np.float32),
    "noise": np.random.default_rng(3).standard_normal((512, 1024), np.float32),
    "half": np.ones(70_001, ml_dtypes.bfloat16),
    "one": np.float32(7),
    "none": np.zeros((0, 3)),
}


@contextlib.contextmanager
def saved(**settings: Any) -> Iterator[World]:
    """A run with one durable step, from two ranks that share it."""

    def script(rank: Rank) -> None:
        manager = rank.begin(STATE)
        manager.save(1, STATE, items={"average": {"w": STATE["zeros"]}}, force=True)
        manager.wait_until_finished()
        manager.close()

    with World(ranks=2, nodes=2, save_every_steps=100, **settings) as world:
        world.play(script)
        yield world


def stores(run: str) -> dict[str, ts.TensorStore]:
    """The arrays of step 1's state, opened with what `raystate.metadata` says of them."""
    arrays = raystate.metadata(run, step=1).arrays("state")
    return {name: ts.open(array.spec()).result() for name, array in arrays.items()}


def codecs(store: ts.TensorStore) -> list[str]:
    return [codec["name"] for codec in store.spec().to_json()["metadata"]["codecs"]]


def chunk_bytes(store: ts.TensorStore) -> int:
    return math.prod(size or 1 for size in store.chunk_layout.read_chunk.shape or ()) * store.dtype.numpy_dtype.itemsize


def data_files(run: str) -> list[Path]:
    """Largest first."""
    found = (Path(run.removeprefix("file://")) / "1" / "state").rglob("d/*")
    return sorted(found, key=lambda path: -path.stat().st_size)


def sizes(run: str) -> list[int]:
    return [path.stat().st_size for path in data_files(run)]


def same(found: Any) -> None:
    for name, value in STATE.items():
        assert np.asarray(found[name]).dtype == value.dtype
        assert np.asarray(found[name]).tobytes() == value.tobytes(), name


@pytest.mark.parametrize("level", [1, 19])
def test_small_compressed_chunks_in_small_files(level: int):
    with saved(zstd_level=level, chunk_bytes=8192, file_bytes=MIB) as world:
        run = world.config.storage
        found = stores(run)
        assert {tuple(codecs(store)) for store in found.values()} == {("bytes", "zstd", "crc32c")}
        assert max(map(chunk_bytes, found.values())) <= 8192
        noise = STATE["noise"].nbytes
        assert 0.8 * noise < sum(sizes(run)) < 1.1 * noise, "zeros take next to nothing"
        assert sizes(run)[0] <= MIB + 2 * 8192 + 4096, "a file is closed when it has grown to file_bytes"
        same(raystate.load(run, STATE))
        same(raystate.Reader(run).restore().state)
        with ocp.CheckpointManager(run.removeprefix("file://"), item_names=("state",)) as stock:
            same(stock.restore(1, args=ocp.args.Composite(state=ocp.args.PyTreeRestore()))["state"])
        assert verify_step(world.storage, 1).bad == ()
        _flip(data_files(run)[0])
        with pytest.raises(raystate.CorruptCheckpointError):
            raystate.load(run, STATE)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_by_default_nothing_is_compressed():
    with saved() as world:
        found = stores(world.config.storage)
        assert {tuple(codecs(store)) for store in found.values()} == {("bytes", "crc32c")}
        assert {name: chunk_bytes(found[name]) for name in ("zeros", "noise")} == {"zeros": MIB, "noise": 2 * MIB}
        assert sum(sizes(world.config.storage)) > STATE["noise"].nbytes + STATE["zeros"].nbytes
        same(raystate.load(world.config.storage, STATE))


def test_compressed_chunks_count_as_memory_for_writing():
    from raystate.arrays.tree import describe
    from raystate.core.formats.tree import WriteOptions

    plain = describe({"state": STATE}, process_index=0, process_count=1)
    compressed = describe({"state": STATE}, process_index=0, process_count=1, options=WriteOptions(zstd_level=1))
    assert plain.layout.write_buffer_bytes == 0
    assert compressed.layout.write_buffer_bytes == sum(piece.nbytes for piece in compressed.layout.pieces)
    assert plain.layout_hash != compressed.layout_hash, "ranks that differ in it are told so"
    assert type(compressed.layout).from_bytes(compressed.layout_bytes) == compressed.layout


def test_a_dtype_is_a_cast_of_what_is_saved(tmp_path: Path):
    state = {"w": jnp.arange(3.0) / 3}
    raystate.save(tmp_path / "half", jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state))
    back = raystate.load(tmp_path / "half", state, cast=True)
    assert back["w"].dtype == jnp.float32
    assert np.array_equal(back["w"], state["w"].astype(jnp.bfloat16).astype(jnp.float32))
