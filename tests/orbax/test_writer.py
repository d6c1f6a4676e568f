from pathlib import Path

import google_crc32c
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts

from raystate.arrays.tree import STORABLE
from raystate.core.formats.errors import ConfigError, StorageError
from raystate.core.formats.tree import ArraySpec, LeafSpec, TreeSpec
from raystate.orbax import writer as writer_module
from raystate.orbax.writer import write_item
from raystate.runtime.host.share import write_share
from raystate.storage import open_storage, posix
from tests.orbax.published import kv_base, pieces, state_tree
from tests.orbax.state_example import ARRAYS, bits
from tests.processes import run_python


def one(dtype: str = "float32", shape: tuple[int, ...] = (4, 2), chunk: tuple[int, ...] = (2, 2)) -> TreeSpec:
    array = ArraySpec(shape=shape, dtype=dtype, chunk=chunk)
    return TreeSpec(item="state", leaves=(LeafSpec(path=("w",), kind="array", array=array), LeafSpec(path=("n",), kind="scalar")))


def test_importing_loads_neither_jax_nor_orbax():
    code = (
        "import sys, raystate.orbax.writer, raystate.orbax.coverage, raystate.orbax.step_reader, raystate.orbax.merge;"
        "sys.exit(any(name.split('.')[0] in ('jax', 'jaxlib') or name.startswith('orbax') for name in sys.modules))"
    )
    run_python("-c", code)


def test_what_save_accepts_is_what_zarr3_can_hold():
    numpys = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
    numpys += ["bool", "float16", "float32", "float64", "complex64", "complex128"]
    narrow = [name for name in dir(ml_dtypes) if name.startswith(("int", "uint", "float", "bfloat"))]
    assert {name for name in [*numpys, *narrow] if writer_module.storable(name)} == STORABLE


def test_objects_are_listed_as_storage_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(posix, "_BUFFER_BYTES", 100)  # so that reading back takes many reads
    tree = state_tree()
    objects = write_share(open_storage(tmp_path), "7", "a1k2h0", tree, pieces(tree, 0, 1))
    files = {path.relative_to(tmp_path / "7").as_posix(): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {found.name: (found.size, found.crc32c) for found in objects} == {
        name: (len(data), google_crc32c.value(data)) for name, data in files.items()
    }
    assert len(objects) > 1
    assert all(found.writer == "a1k2h0" and found.name.startswith("state/ocdbt.process_a1k2h0/") for found in objects)


def test_every_dtype_reads_back_equal(tmp_path: Path):
    tree = state_tree()
    share = pieces(tree, 0, 1)
    write_item(kv_base(tmp_path), "w", tree, share)
    base = kv_base(tmp_path / "ocdbt.process_w")
    for leaf, start, data in share:
        spec = {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{tree.leaves[leaf].name}/"}}
        store = ts.open(spec, open=True).result()
        box = tuple(slice(s, s + n) for s, n in zip(start, data.shape, strict=True))
        assert bits(store[box].read().result()) == bits(data), tree.leaves[leaf].name
        assert [codec["name"] for codec in store.spec().to_json()["metadata"]["codecs"]] == ["bytes", "crc32c"]
    assert {tree.leaves[leaf].name for leaf, _, _ in share} == set(ARRAYS)


def test_no_piece_writes_nothing(tmp_path: Path):
    assert write_item(kv_base(tmp_path), "w", one(), []) is False
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize(
    ("tree", "piece", "words"),
    [
        (one(), (0, (0, 0), np.zeros((2, 2), np.float16)), "piece of float16, array of float32"),
        (one(), (0, (1, 0), np.zeros((2, 2), np.float32)), "not made of whole chunks"),
        (one(), (0, (4, 0), np.zeros((2, 2), np.float32)), "outside the array's shape"),
        (one(), (1, (), np.zeros((), np.float32)), "not an array but scalar"),
        (one("uint4"), (0, (0, 0), np.zeros((2, 2), ml_dtypes.uint4)), "dtype uint4 cannot be stored"),
        (one("object"), (0, (0, 0), np.zeros((2, 2), object)), "dtype object cannot be stored"),
    ],
)
def test_what_cannot_be_written_names_the_leaf(tmp_path: Path, tree: TreeSpec, piece: tuple, words: str):
    with pytest.raises(ConfigError, match=words) as caught:
        write_item(kv_base(tmp_path), "w", tree, [piece])
    assert caught.value.item == "state" and caught.value.path in ("w", "n")
    assert not list(tmp_path.rglob("*"))


def test_a_writer_name_that_is_no_plain_word_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError):
        write_item(kv_base(tmp_path), "../x", one(), [])


def test_storage_that_cannot_be_written_is_a_storage_error(tmp_path: Path):
    (tmp_path / "ocdbt.process_w").write_text("a file where the folder should be")
    with pytest.raises(StorageError, match="item 'state', writer w"):
        write_item(kv_base(tmp_path), "w", one(), [(0, (0, 0), np.zeros((4, 2), np.float32))])


MEASURE = """
import sys, threading, numpy as np, psutil
from pathlib import Path
from raystate.core.formats.tree import ArraySpec, LeafSpec, Layout, Piece, TreeSpec
from raystate.orbax.writer import write_item

folder, chunk = sys.argv[1], tuple(map(int, sys.argv[2].split("x")))
shape, count = (1024, 4096), 8
array = ArraySpec(shape=shape, dtype="float32", chunk=chunk)
tree = TreeSpec(item="state", leaves=tuple(LeafSpec(path=(f"a{i}",), kind="array", array=array) for i in range(count)))
nbytes = 4 * shape[0] * shape[1]
pieces = tuple(Piece(tree=0, leaf=i, start=(0, 0), shape=shape, offset=i * nbytes, nbytes=nbytes, owned=True) for i in range(count))
data = [np.random.default_rng(i).random(shape, np.float32) for i in range(count)]
process, peak, done = psutil.Process(), 0, threading.Event()
small = np.ones((4, 4), np.float32)  # the first write starts TensorStore's threads
one = TreeSpec(item="state", leaves=(LeafSpec(path=("x",), kind="array", array=ArraySpec(shape=(4, 4), dtype="float32", chunk=(4, 4))),))
write_item({"driver": "file", "path": folder + "/first/"}, "w", one, [(0, (0, 0), small)])
before = process.memory_info().rss

def watch():
    global peak
    while not done.wait(0.001):
        peak = max(peak, process.memory_info().rss)

thread = threading.Thread(target=watch)
thread.start()
write_item({"driver": "file", "path": folder + "/x/"}, "w", tree, [(i, (0, 0), data[i]) for i in range(count)])
done.set()
thread.join()
print(Layout(trees=(tree,), pieces=pieces).write_buffer_bytes, max(peak - before, 0), count * nbytes)
"""


@pytest.mark.parametrize("chunk", ["256x4096", "1024x1024"])
def test_writing_takes_the_memory_that_is_counted_for_it(tmp_path: Path, chunk: str):
    counted, taken, written = map(int, run_python("-c", MEASURE, tmp_path, chunk).stdout.split())
    assert counted == (0 if chunk == "256x4096" else written)
    assert taken < counted + written // 4, f"{taken} bytes, {counted} were counted"
    assert taken > counted - written // 4, "less than is counted: count less"
