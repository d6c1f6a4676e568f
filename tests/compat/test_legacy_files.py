"""Checkpoints in flax's older forms, read by `raystate.load`: written by stock flax, made up by somebody who means harm, or unfinished."""

from __future__ import annotations

import os
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from flax import serialization
from flax.training import checkpoints as stock
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint.aggregate_handlers import MsgpackHandler

import raystate
from raystate.compat import flax_checkpoints as ours
from raystate.core.formats.errors import ConfigError, CorruptCheckpointError, RaystateError
from raystate.legacy import reader as legacy_reader
from raystate.storage import open_storage

TREE = {
    "params": {"kernel": np.arange(60.0, dtype=np.float32).reshape(3, 20), "half": np.arange(4).astype(jnp.bfloat16)},
    "opt": (np.int32(3), [np.arange(5, dtype=np.uint8), 7], None, {}),
    "scalar": np.float64(2.5),
    "none": np.zeros((0, 3)),
    "complex": np.array([1 + 2j]),
    "flags": np.array([True, False]),
    "z": 1 - 2j,
    "text": "größer",
    "bytes": b"\x00abc",
    "numbers": [0, 127, 128, 2**40, 2**63, -1, -33, -(2**40), 0.5, True],
}


@pytest.fixture
def as_files() -> Iterator[None]:
    """flax writes msgpack files."""
    before = flax.config.flax_use_orbax_checkpointing
    flax.config.update("flax_use_orbax_checkpointing", False)
    yield
    flax.config.update("flax_use_orbax_checkpointing", before)


def same(got: Any, wanted: Any) -> None:
    assert jax.tree_util.tree_structure(got) == jax.tree_util.tree_structure(wanted)
    for one, other in zip(jax.tree_util.tree_leaves(got), jax.tree_util.tree_leaves(wanted), strict=True):
        assert type(one) is type(other) and np.asarray(one).dtype == np.asarray(other).dtype and np.array_equal(one, other)


# ---------------------------------------------------------------- what flax wrote


def test_a_file_is_read_as_flax_reads_it(tmp_path: Path, as_files: None):
    path = stock.save_checkpoint(tmp_path, TREE, 12)
    same(ours.restore_checkpoint(path, None), stock.restore_checkpoint(path, None))
    same(ours.restore_checkpoint(tmp_path, TREE), stock.restore_checkpoint(tmp_path, TREE))
    raw = raystate.load(path)
    wanted = serialization.to_state_dict(TREE)
    same(raw.pop("z"), np.asarray(1 - 2j))
    same(raw.pop("bytes"), np.frombuffer(b"\x00abc", np.uint8))
    raw["scalar"], raw["opt"]["0"] = raw["scalar"][()], raw["opt"]["0"][()]
    same(raw, {key: value for key, value in wanted.items() if key not in ("z", "bytes")})
    assert raystate.metadata(path).step == 12 and raystate.Reader(path).all_steps() == [12]


def test_large_arrays_come_in_chunks(tmp_path: Path, as_files: None, monkeypatch: pytest.MonkeyPatch):
    tree = {
        "big": np.arange(1000, dtype=np.int32).reshape(10, 100),
        "small": np.arange(3),
        "column": np.arange(64.0).reshape(64, 1),
    }
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 300)  # 2**30 in use; an array of that size would take minutes here
    path = stock.save_checkpoint(tmp_path, tree, 0)
    assert "__msgpack_chunked_array__" in msgpack.unpackb(Path(path).read_bytes(), strict_map_key=False)["big"]
    for at_once in (64 << 20, 400, 4):  # all, a row, an element
        monkeypatch.setattr(legacy_reader, "READ_BYTES", at_once)
        same(raystate.load(path), tree)
        same(ours.restore_checkpoint(path, None), tree)
    whole = np.arange(1000, dtype=np.int32).tobytes()
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", len(whole) - 4)
    single = stock.save_checkpoint(tmp_path, np.arange(1000, dtype=np.int32), 1, keep=2)
    same(raystate.load(single), np.arange(1000, dtype=np.int32))


def test_only_what_a_reference_asks_for_is_read(tmp_path: Path):
    tree = {"left_out": np.zeros(1 << 20, np.uint8), "wanted": np.arange(1 << 18, dtype=np.uint8).reshape(512, 512)}
    (tmp_path / "ckpt").write_bytes(serialization.to_bytes(tree))
    reader = raystate.Reader(tmp_path / "ckpt")
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    restored = reader.restore({"wanted": jax.ShapeDtypeStruct((512, 512), jnp.uint8, sharding=sharding)}).state["wanted"]
    assert restored.sharding == sharding and np.array_equal(restored, tree["wanted"])
    assert reader.bytes_read < (1 << 20)


def test_optax_and_old_named_tuples_fit_a_reference(tmp_path: Path):
    import optax

    params = {"w": jnp.arange(6.0).reshape(2, 3)}
    state = optax.adam(0.1).init(params)
    (tmp_path / "ckpt_5").write_bytes(serialization.to_bytes(state))
    same(raystate.load(tmp_path / "ckpt_5", state), state)
    named = {"name": "ScaleByAdamState", "fields": {"0": "count", "1": "mu"}, "values": {"0": np.int32(4), "1": {"w": np.ones(2)}}}
    (tmp_path / "old").write_bytes(serialization.msgpack_serialize({"0": named}))
    same(
        raystate.load(tmp_path / "old", {"0": {"count": 0, "mu": {"w": np.zeros(2)}}}), {"0": {"count": 4, "mu": {"w": np.ones(2)}}}
    )


# ---------------------------------------------------------------- arrays beside the file


@pytest.fixture
def with_arrays_beside(tmp_path: Path, as_files: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As flax writes arrays that several processes hold: here all jax arrays are taken for such."""
    monkeypatch.setattr(stock, "_is_multiprocess_array", lambda value: isinstance(value, jax.Array))
    manager = GlobalAsyncCheckpointManager()
    tree = {"a": {"b": jnp.arange(12.0).reshape(3, 4), "zeros": jnp.zeros(5)}, "step": 3, "host": np.arange(3)}
    stock.save_checkpoint_multiprocess(tmp_path, tree, 0, gda_manager=manager)
    manager.wait_until_finished()
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_0", "checkpoint_0_gda"]
    return tmp_path


def test_arrays_of_several_processes_are_found_beside_the_file(with_arrays_beside: Path):
    raw = raystate.load(with_arrays_beside / "checkpoint_0")
    same(
        raw,
        {
            "a": {"b": np.arange(12, dtype=np.float32).reshape(3, 4), "zeros": np.zeros(5, np.float32)},
            "step": 3,
            "host": np.arange(3),
        },
    )
    same(ours.restore_checkpoint(with_arrays_beside, None), raw)
    mesh = jax.make_mesh((3,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:3])
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    target = {"a": {"b": jax.device_put(jnp.zeros((3, 4)), sharding), "zeros": np.ones(5)}, "step": 0, "host": np.zeros(3)}
    restored = ours.restore_checkpoint(with_arrays_beside, target)
    assert restored["a"]["b"].sharding == sharding and np.array_equal(restored["a"]["b"], raw["a"]["b"])
    same(restored["host"], np.arange(3))


def test_lost_and_unfinished_arrays_beside_the_file_are_named(with_arrays_beside: Path):
    path, beside = with_arrays_beside / "checkpoint_0", with_arrays_beside / "checkpoint_0_gda"
    with pytest.raises(CorruptCheckpointError, match=r"has only the arrays of a checkpoint: load .*checkpoint_0$"):
        raystate.load(beside)
    (beside / "a/b/.zarray").unlink()
    with pytest.raises(CorruptCheckpointError, match="'a/b'"):
        raystate.load(path)
    beside.rename(with_arrays_beside / "elsewhere")
    with pytest.raises(CorruptCheckpointError, match="lacks the folder checkpoint_0_gda/"):
        raystate.load(path)


# ---------------------------------------------------------------- folders of Orbax's older versions


@pytest.mark.parametrize("ocdbt", [True, False])
def test_a_folder_with_a_checkpoint_file(tmp_path: Path, ocdbt: bool):
    """As Orbax wrote before it had `_METADATA`: the structure is a msgpack file, with values in it and the names of arrays."""
    tree = {"params": {"w": jnp.arange(6.0).reshape(2, 3)}, "opt": [np.arange(4), 5]}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt)) as checkpointer:
        checkpointer.save(tmp_path / "checkpoint_8", tree)
    folder = tmp_path / "checkpoint_8"
    (folder / "_METADATA").unlink()
    structure = {
        "params": {"w": "PLACEHOLDER://params.w"},
        "opt": {"0": "PLACEHOLDER://opt.0", "1": 5},
        "inside": np.ones(2),
        "name": "a text",
    }
    (folder / "checkpoint").write_bytes(serialization.msgpack_serialize(structure))
    assert MsgpackHandler().deserialize(epath.Path(folder / "checkpoint"))["opt"]["1"] == 5
    wanted = {
        "params": {"w": np.arange(6, dtype=np.float32).reshape(2, 3)},
        "opt": {"0": np.arange(4), "1": 5},
        "inside": np.ones(2),
    }
    same(raystate.load(folder), {**wanted, "name": "a text"})
    assert raystate.metadata(folder).step == 8
    target = {"params": {"w": jnp.zeros((2, 3))}, "opt": [np.zeros(4), 0]}
    same(ours.restore_checkpoint(tmp_path, target)["params"], stock.restore_checkpoint(tmp_path, target)["params"])
    same(ours.restore_checkpoint(folder, target)["params"], tree["params"])
    (folder / "checkpoint").unlink()
    if ocdbt:
        with pytest.raises(CorruptCheckpointError, match="neither _METADATA nor 'checkpoint'"):
            raystate.load(folder)


@pytest.mark.parametrize("name", ["../outside", "/etc", "a//b", "a/./b", "a\0b", "."])
def test_a_placeholder_leads_nowhere_else(tmp_path: Path, name: str):
    for prefix, path in [("//GDAPlaceholder:", tmp_path / "checkpoint_0"), ("PLACEHOLDER://", tmp_path / "folder/checkpoint")]:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(serialization.msgpack_serialize({"a": prefix + name}))
    (tmp_path / "checkpoint_0_gda/a").mkdir(parents=True)
    for path in (tmp_path / "checkpoint_0", tmp_path / "folder"):
        with pytest.raises(CorruptCheckpointError, match="no name inside the checkpoint"):
            raystate.load(path)


# ---------------------------------------------------------------- directories


def test_checkpoints_of_a_directory_are_read_by_their_paths(tmp_path: Path, as_files: None):
    for step in (0, 10, 1e5, -2.0):
        stock.save_checkpoint(tmp_path, {"a": np.full(2, step)}, step, keep=9, overwrite=True)
        same(raystate.load(tmp_path / f"checkpoint_{step}"), {"a": np.full(2, step)})
    for name in ("checkpoint_tmp", "checkpoint_11.orbax-checkpoint-tmp-3"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "commit_success.txt").touch()
    with pytest.raises(CorruptCheckpointError, match=r"checkpoint_11\.orbax.*was never finished"):
        raystate.load(tmp_path / "checkpoint_11.orbax-checkpoint-tmp-3")


def test_an_unfinished_file_is_refused(tmp_path: Path):
    data = serialization.to_bytes({"a": np.arange(100)})
    (tmp_path / "checkpoint_tmp").write_bytes(data)
    (tmp_path / "checkpoint_5").write_bytes(data[: len(data) // 2])
    with pytest.raises(CorruptCheckpointError, match="checkpoint_tmp was never finished"):
        raystate.load(tmp_path / "checkpoint_tmp")
    with pytest.raises(CorruptCheckpointError, match="checkpoint_5 is cut short"):
        raystate.load(tmp_path / "checkpoint_5")


def test_a_run_refuses_such_a_storage_and_says_what_to_do(tmp_path: Path):
    from raystate.storage import refuse_foreign

    (tmp_path / "checkpoint_5").write_bytes(serialization.to_bytes({"a": np.arange(100)}))
    with pytest.raises(ConfigError, match=r"'checkpoint_5'.*source="):
        refuse_foreign(open_storage(tmp_path))
    with pytest.raises(RaystateError, match=r"raystate\.load.* reads one by its own path"):
        raystate.load(tmp_path)


def test_the_storage_of_a_run_is_nothing_else_whatever_its_name(tmp_path: Path):
    for name in ("tmp", "my_tmp", "run_gda", "checkpoint_3"):
        (tmp_path / name / "x").mkdir(parents=True)
        assert raystate.Reader(tmp_path / name).all_steps() == []


# ---------------------------------------------------------------- files that somebody made up


def nested(levels: int, before: bytes = b"\x91", last: bytes = b"\xc0") -> bytes:
    return before * levels + last


def array(shape: Any, dtype: str, data: bytes, code: int = 1) -> bytes:
    return extension(code, pack((shape, dtype, data)))


def extension(code: int, data: bytes) -> bytes:
    return pack(msgpack.ExtType(code, data))


def pack(value: Any) -> bytes:
    packed = msgpack.packb(value, use_bin_type=True)
    assert packed is not None
    return packed


HOSTILE = {
    "nothing": b"",
    "text": b"hello, I am no checkpoint",
    "pickle": b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x02id\x94\x85\x94R\x94.",
    "huge list": b"\xdd\xff\xff\xff\xff" + b"\xc0" * 100,
    "huge map": b"\xdf\xff\xff\xff\xff" + b"\xa1a\xc0" * 100,
    "huge text": b"\xdb\xff\xff\xff\xff" + b"a" * 100,
    "huge bytes": b"\xc6\xff\xff\xff\xff",
    "huge extension": b"\xc9\xff\xff\xff\xff\x01",
    "deep": nested(100_000),
    "deep and wide": b"\xdc\xff\xff" * 21_000 + b"\xc0" * 65_535,
    "deep maps": nested(5_000, b"\x81\xa1a"),
    "many": b"\xdd\x00\x10\x00\x00" + b"\x90" * (1 << 20),
    "after the end": b"\xc0\xc0",
    "unknown": b"\xc1",
    "a key that is a list": b"\x81\x90\xc0",
    "a key twice": b"\x82\xa1a\x01\xa1a\x02",
    "no UTF-8": b"\x81\xa1a\xa2\xff\xfe",
    "no known extension": b"\xd4\x05a",
    "a time": b"\xd6\xff\x00\x00\x00\x00",
    "too large a shape": array([1 << 62, 1 << 62], "float32", b"1234"),
    "too large a shape of nothing": array([1 << 62, 0], "float64", b""),
    "a negative shape": array([-1, -4], "float32", b"1234"),
    "a shape of texts": array(["4"], "uint8", b"1234"),
    "too many dimensions": array([1] * 65, "uint8", b"1"),
    "an object": array([1], "object", b"12345678"),
    "a structure": array([1], "i4,i4", b"12345678"),
    "a text dtype": array([1], "str32", b"1234"),
    "no dtype": array([1], "nonsense", b"1"),
    "a short array": array([5], "uint8", b"1234"),
    "an array in pieces": extension(1, b"\x91\x01"),
    "an array that ends early": extension(1, pack(((1,), "uint8", b"1")) + b"x"),
    "an array longer than its extension": b"\xc7\x08\x01\x93\x91\x01\xa5uint8\xc4\x7f",
    "a complex of texts": extension(2, pack(("a", "b"))),
    "chunks without a shape": pack({"__msgpack_chunked_array__": True}),
    "chunks of nothing": pack({"__msgpack_chunked_array__": True, "shape": {}, "chunks": {}}),
    "chunks of numbers": pack({"__msgpack_chunked_array__": True, "shape": {"0": 1}, "chunks": {"0": 1}}),
    "chunks without numbers": pack({"__msgpack_chunked_array__": True, "shape": {"0": 1}, "chunks": {"7": 1}}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_made_up_file_ends_in_an_error_within_bounded_memory(tmp_path: Path, name: str):
    path = tmp_path / "checkpoint_0"
    path.write_bytes(HOSTILE[name])
    raystate.Reader(tmp_path)  # what it imports is not counted
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpointError, match="checkpoint_0"):
            raystate.load(path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_any_damage_to_a_file_is_an_error_or_reads_as_values(tmp_path: Path):
    draw = random.Random(int(os.environ["RAYSTATE_SEED"]))
    whole = serialization.to_bytes({"a": {"b": np.arange(20)}, "l": [1.5, "text", None, True], "c": 1j, "n": np.float32(3)})
    path = tmp_path / "checkpoint_0"
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        path.write_bytes(data[: draw.choice([len(data), len(data), draw.randrange(len(data))])])
        try:
            raystate.load(path)
        except RaystateError:
            continue  # anything else fails the test


def test_limits_let_real_trees_through(tmp_path: Path):
    tree = {f"layer_{number}": {"w": np.zeros(1), "b": 0} for number in range(1000)}
    (tmp_path / "wide").write_bytes(serialization.to_bytes(tree))
    assert len(raystate.load(tmp_path / "wide")) == 1000
    deep: Any = np.ones(1)
    for _ in range(90):
        deep = {"d": deep}
    (tmp_path / "deep").write_bytes(serialization.to_bytes(deep))
    same(raystate.load(tmp_path / "deep"), deep)
