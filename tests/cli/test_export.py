"""raystate export: what others read of it, and what is left when it fails."""

from __future__ import annotations

import io
import json
import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors
import safetensors.numpy
from flax import serialization
from orbax.checkpoint import v1

import raystate
from raystate.core.formats.errors import ConfigError, CorruptCheckpointError, StorageError
from raystate.core.formats.tree import DataObject, Package, TreeSpec
from raystate.orbax.step_reader import StepReader
from raystate.storage import ObjectExistsError, StepFolder, Storage, StorageWrapper, open_storage
from raystate.storage.names import MARKER, log_name
from raystate.transfer import boxes, export_step, import_steps, open_source, orbax_export, orbax_tree, places
from raystate.transfer.places import open_place
from raystate.transfer.progress import Tally
from tests.cli.transfers import STEP, a_run, files, incoming_leaves, leaves, notes, of_dtype, raystate_command, run, state  # noqa: F401 - fixtures
from tests.storage.backends import gcs_server

FORMATS = {"safetensors": "x.safetensors", "orbax": "x", "copy": "x"}


def export(run: Path, dst: object, **options: Any) -> Any:  # noqa: F811
    return export_step(str(run), STEP, str(dst), **options)


@pytest.fixture(scope="module")
def one_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_run(tmp_path_factory.mktemp("one") / "run")


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_comes_back_bit_equal(one_run: Path, tmp_path: Path, form: Any) -> None:
    report = export(one_run, tmp_path / FORMATS[form], format=form)
    assert report.verified and {file.name for file in report.files} == {
        name for name in files(Path(report.url)) if (Path(report.url) / name).is_file()
    }
    import_steps(tmp_path / "back", open_source(str(tmp_path / FORMATS[form])))
    assert leaves(tmp_path / "back") == leaves(one_run)
    if form == "copy":
        assert leaves(tmp_path / "back", "notes") == leaves(one_run, "notes")


def test_the_safetensors_package_reads_it(one_run: Path, tmp_path: Path) -> None:
    export(one_run, tmp_path / "x.safetensors")
    data = (tmp_path / "x.safetensors").read_bytes()
    found = dict(safetensors.deserialize(data))
    expected = state()
    assert found["params.dense.kernel"]["dtype"] == "BF16" and found["params.dense.kernel"]["shape"] == [12, 8]
    assert bytes(found["params.dense.kernel"]["data"]) == np.asarray(expected["params"]["dense"]["kernel"]).tobytes()
    assert found["dtypes.float8_e4m3fn"]["dtype"] == "F8_E4M3" and found["dtypes.int4"]["dtype"] == "U8"
    assert bytes(found["dtypes.int4"]["data"]) == of_dtype("int4").tobytes()
    with safetensors.safe_open(tmp_path / "x.safetensors", framework="numpy") as opened:
        assert opened.metadata()["format"] == "pt"
        assert np.array_equal(opened.get_tensor("opt.0.mu"), expected["opt"][0]["mu"])
        assert opened.get_tensor("rate") == 0.25 and opened.get_tensor("empty").shape == (0, 4)
        for name in ("float32", "float64", "complex64", "uint16", "bool", "int64"):
            assert opened.get_tensor(f"dtypes.{name}").tobytes() == of_dtype(name).tobytes()
    assert int.from_bytes(data[:8], "little") % 8 == 0, "arrays are aligned"


def test_shards_have_an_index_as_hugging_face_expects(one_run: Path, tmp_path: Path) -> None:
    report = export(one_run, tmp_path / "hf", format="safetensors", shard_bytes=3000)
    names = [file.name for file in report.files]
    assert names[-1] == "model.safetensors.index.json"
    assert names[0] == f"model-00001-of-{len(names) - 1:05d}.safetensors" and len(names) >= 3
    index = json.loads((tmp_path / "hf" / names[-1]).read_text())
    sizes = 0
    for name in names[:-1]:
        tensors = safetensors.deserialize((tmp_path / "hf" / name).read_bytes())
        assert {tensor for tensor, file in index["weight_map"].items() if file == name} == {tensor for tensor, _ in tensors}
        nbytes = sum(len(tensor["data"]) for _, tensor in tensors)
        assert nbytes <= 3000 or len(tensors) == 1
        sizes += nbytes
    assert index["metadata"]["total_size"] == sizes
    assert incoming_leaves(str(tmp_path / "hf")) == leaves(one_run)


def test_stock_orbax_reads_orbax_and_the_copy(one_run: Path, tmp_path: Path) -> None:
    export(one_run, tmp_path / "orbax", format="orbax", match="^(params|opt.0|rate)")
    export(one_run, tmp_path / "copy")
    expected = state()
    with ocp.CheckpointManager(tmp_path / "orbax") as manager:
        assert manager.all_steps() == [STEP]
        got = manager.restore(STEP)
    assert np.asarray(got["params"]["dense"]["kernel"]).tobytes() == np.asarray(expected["params"]["dense"]["kernel"]).tobytes()
    assert got["rate"] == 0.25 and set(got) == {"params", "opt", "rate"}
    got = ocp.StandardCheckpointer().restore(tmp_path / "orbax" / str(STEP) / "default")
    assert np.array_equal(got["opt"][0]["mu"], expected["opt"][0]["mu"])
    got = v1.load(str(tmp_path / "copy" / str(STEP)))
    for name, value in expected["dtypes"].items():
        assert np.asarray(got["dtypes"][name]).tobytes() == value.tobytes(), name


def test_a_copy_is_the_same_files(one_run: Path, tmp_path: Path) -> None:
    export(one_run, tmp_path / "there")
    for path in (one_run / str(STEP)).rglob("*"):
        if path.is_file():
            assert (tmp_path / "there" / path.relative_to(one_run)).read_bytes() == path.read_bytes()


# ---------------------------------------------------------------- a part of it


def test_item_match_and_dtype(one_run: Path, tmp_path: Path) -> None:
    export(one_run, tmp_path / "a.safetensors", item="notes")
    assert set(safetensors.numpy.load_file(tmp_path / "a.safetensors")) == {"seen"}
    report = export(one_run, tmp_path / "b.safetensors", match=r"^params|opt\.3", dtype="float32")
    assert report.arrays == 2
    found = safetensors.numpy.load_file(tmp_path / "b.safetensors")
    assert {name: array.dtype.name for name, array in found.items()} == {
        "params.dense.kernel": "float32", "params.dense.bias": "float32", "opt.3.1": "int64",
    }  # fmt: skip
    assert np.array_equal(found["params.dense.kernel"], np.arange(96, dtype=np.float32).reshape(12, 8))
    import_steps(tmp_path / "back", open_source(tmp_path / "b.safetensors"))
    assert raystate.load(tmp_path / "back")["opt"] == {"3": ["größer", 7]}, "what is left of a list keeps its numbers"


def test_a_checkpoint_that_is_no_run(one_run: Path, tmp_path: Path) -> None:
    with ocp.StandardCheckpointer() as checkpointer:  # it saves behind our back
        checkpointer.save(tmp_path / "bare", {"w": np.arange(4)})
    v1.save(str(tmp_path / "v1"), {"w": np.arange(5)})
    for name, size in (("bare", 4), ("v1", 5)):
        export_step(str(tmp_path / name), None, str(tmp_path / f"{name}.safetensors"))
        assert safetensors.numpy.load_file(tmp_path / f"{name}.safetensors")["w"].shape == (size,)


# ---------------------------------------------------------------- any place


@pytest.fixture(params=["memory", "zip", "file", "gs"])
def elsewhere(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """A function that gives the URL of a name in some place."""
    if request.param == "gs":
        server = gcs_server()
        with mock.patch.dict(os.environ, server.environment()):
            fsspec.filesystem("gs").clear_instance_cache()
            yield lambda name: f"gs://contract/away/{name}"
            fsspec.filesystem("gs").clear_instance_cache()
        server.clear()
    elif request.param == "zip":
        yield lambda name: f"zip://{name}::{tmp_path}/archive{len(name)}.zip"
    elif request.param == "memory":
        yield lambda name: f"memory://away/{name}"
        fsspec.filesystem("memory").store.clear()
    else:
        yield lambda name: f"file://{tmp_path}/away/{name}"


def test_any_url_there_and_back(one_run: Path, tmp_path: Path, elsewhere: Any) -> None:
    for name, options in (("folder", {"format": "safetensors", "shard_bytes": 20_000}), ("a.safetensors", {})):
        url = elsewhere(name)
        if url.startswith("gs://") and name != "folder":
            continue  # the way is the same, and the server slow
        export(one_run, url, **options)
        with pytest.raises(ConfigError, match="exists already"):
            export(one_run, url, **options)
        assert incoming_leaves(url) == leaves(one_run)


@pytest.mark.parametrize("form", ["orbax", "copy"])
def test_steps_at_any_url(one_run: Path, tmp_path: Path, elsewhere: Any, form: Any) -> None:
    url = elsewhere(form)
    export(one_run, url, format=form)
    with pytest.raises(ConfigError, match="exists already"):
        export(one_run, url, format=form)
    if url.startswith("gs://"):
        assert leaves(url) == leaves(one_run)
        return
    fs, folder = fsspec.core.url_to_fs(url)
    fs.get(f"{folder}/{STEP}", str(tmp_path / "fetched" / str(STEP)), recursive=True)
    assert leaves(tmp_path / "fetched") == leaves(one_run)


# ---------------------------------------------------------------- bounded memory


@pytest.mark.parametrize("form", ["safetensors", "orbax"])
def test_no_more_than_a_batch_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Any) -> None:
    raystate.save(tmp_path / "big", {"w": np.arange(300_000, dtype=np.int32).reshape(3, 10_000, 10), "b": np.ones(7)})
    monkeypatch.setattr(boxes, "BATCH_BYTES", 100_000)
    monkeypatch.setattr(boxes, "_MOST_BYTES", 100_000)
    monkeypatch.setattr(orbax_tree, "WRITER_BYTES", 250_000)
    read: list[int] = []
    real = StepReader.read

    def counted(self: StepReader, item: str, requests: Sequence[Any]) -> list[np.ndarray]:
        parts = real(self, item, requests)
        read.append(sum(part.nbytes for part in parts))
        return parts

    monkeypatch.setattr(StepReader, "read", counted)
    written: list[int] = []
    real_write = places.ExportPlace.write

    def counted_write(self: Any, name: str, chunks: Any) -> None:
        real_write(self, name, (written.append(len(chunk)) or chunk for chunk in chunks))

    monkeypatch.setattr(places.ExportPlace, "write", counted_write)
    export_step(str(tmp_path / "big"), None, str(tmp_path / FORMATS[form]), format=form)
    most = 250_000 if form == "orbax" else 100_000
    assert max(read) <= most and max(written, default=0) <= most
    assert sum(read) >= 1_200_000 and len(read) > 4
    monkeypatch.undo()
    if form != "orbax":
        array = safetensors.numpy.load_file if form == "safetensors" else np.load
        assert np.array_equal(array(tmp_path / FORMATS[form])["w"].reshape(-1), np.arange(300_000))


# ---------------------------------------------------------------- all or nothing


@pytest.fixture
def damaged(run: Path) -> Path:  # noqa: F811
    """A run whose state has a flipped bit in an array."""
    for data in (run / str(STEP) / "state").rglob("ocdbt.process_*/d/*"):
        whole = bytearray(data.read_bytes())
        at = whole.find(np.arange(3000, dtype=np.float64).tobytes())
        if at >= 0:
            whole[at + 500] ^= 1
            data.write_bytes(whole)
            return run
    raise AssertionError("the array is somewhere")


@pytest.mark.parametrize("form", ["safetensors", "orbax"])
def test_damage_leaves_nothing_anywhere(damaged: Path, tmp_path: Path, form: Any) -> None:
    before = files(tmp_path)
    fsspec.filesystem("memory").store.clear()  # of what other tests of this process have left
    with pytest.raises(CorruptCheckpointError, match="large"):
        export(damaged, tmp_path / "new" / "folder" / FORMATS[form], format=form)
    assert files(tmp_path) == before
    for url in (f"zip://{FORMATS[form]}::{tmp_path}/y.zip", f"memory://away/{FORMATS[form]}"):
        with pytest.raises(CorruptCheckpointError, match="large"):
            export(damaged, url, format=form)
    assert files(tmp_path) == before
    assert not fsspec.filesystem("memory").find("/")


def test_a_package_tells_what_a_copy_must_hold(run: Path, tmp_path: Path) -> None:  # noqa: F811
    folder = run / str(STEP)
    objects = [path for path in folder.rglob("*") if path.is_file() and ("ocdbt.process" in str(path) or "/d/" in str(path))]
    names = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file() and path not in objects}
    real = [
        DataObject(name=str(path.relative_to(folder)), size=path.stat().st_size, crc32c=boxes_crc(path), writer="a1k1h0")
        for path in objects
    ]

    def with_package(more: list[DataObject]) -> None:
        for old in (run / ".raystate/steps").glob("*"):
            old.unlink()
        package = Package(
            step=STEP, save="a1k1", run="lm", files={n: p.read_bytes() for n, p in names.items()}, objects=(*real, *more)
        )
        StepFolder(open_storage(run), STEP, "a1k1").put_package(package)

    with_package([])
    export(run, tmp_path / "good")
    assert leaves(tmp_path / "good") == leaves(run)
    (tmp_path / "secret").write_text("x")
    for name in ("../../secret", "/etc/passwd", "a\0b"):
        with_package([DataObject(name=name, size=1, crc32c=0, writer="a1k1h0")])
        with pytest.raises(CorruptCheckpointError, match="no name inside the checkpoint"):
            export(run, tmp_path / "bad")
    with_package([DataObject(name="x" * 300, size=1, crc32c=0, writer="a1k1h0")])
    with pytest.raises(StorageError, match="File name too long"):
        export(run, tmp_path / "bad")
    with_package([])
    whole = bytearray(objects[0].read_bytes())
    whole[len(whole) // 2] ^= 1
    objects[0].write_bytes(whole)
    with pytest.raises(CorruptCheckpointError, match="nothing was copied"):
        export(run, tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


def boxes_crc(path: Path) -> int:
    return open_storage(path.parent).checksum(path.name)


def test_what_is_read_back_is_compared(one_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = places.LocalPlace._open

    def flipped(self: Any, name: str) -> Any:
        data = bytearray(real(self, name).read())
        data[-1] ^= 1
        return io.BytesIO(data)

    monkeypatch.setattr(places.LocalPlace, "_open", flipped)
    with pytest.raises(StorageError, match="was read back as"):
        export(one_run, tmp_path / "x.safetensors")
    assert not files(tmp_path)
    export(one_run, tmp_path / "x.safetensors", verify=False)


def test_a_full_disk_is_said_and_leaves_nothing(one_run: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for form, name in FORMATS.items():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            with pytest.raises(StorageError, match=r"[Tt]oo large"):
                export(one_run, tmp_path / "out" / name, format=form)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not files(tmp_path)


def test_somebody_else_is_not_overwritten(one_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = places.LocalPlace._commit

    def late(self: Any) -> None:
        (tmp_path / "x.safetensors").write_text("theirs")
        real(self)

    monkeypatch.setattr(places.LocalPlace, "_commit", late)
    with pytest.raises(ConfigError, match="exists already"):
        export(one_run, tmp_path / "x.safetensors")
    assert files(tmp_path) == ["x.safetensors"] and (tmp_path / "x.safetensors").read_text() == "theirs"


# ---------------------------------------------------------------- the command


def test_the_command_tells_what_it_did(one_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = raystate_command(capsys, "export", one_run, "latest", tmp_path / "x.safetensors")
    assert code == 0
    assert out.splitlines()[-1].startswith(f"step {STEP} as safetensors: ") and out.splitlines()[-1].endswith("verified")
    code, out, _ = raystate_command(capsys, "export", one_run, STEP, tmp_path / "copy", "--json", "--no-verify")
    report = json.loads(out)
    assert (code, report["format"], report["step"], report["verified"]) == (0, "copy", STEP, False)
    assert len(report["files"]) == len([path for path in (tmp_path / "copy").rglob("*") if path.is_file()])
    code, out, _ = raystate_command(capsys, "export", "--help")
    assert code == 0 and "raystate export runs/lm 1200 model.safetensors" in out
    assert max(map(len, out.splitlines())) <= 80


MISTAKES = {
    "step": (["{run}", "7", "{out}/x.safetensors"], "has no step 7; it has [1200]"),
    "step word": (["{run}", "newst", "{out}/x.safetensors"], "STEP: expected a step's number or 'latest', not 'newst'"),
    "storage": (["{out}/nowhere", "7", "{out}/x.safetensors"], "nowhere has no step"),
    "format": (["{run}", "latest", "{out}/x", "--format", "hdf5"], "'hdf5' is none of safetensors, orbax, copy"),
    "ending": (["{run}", "latest", "{out}/x.safetensors", "--format", "orbax"], "ends like a safetensors file"),
    "scheme": (["{run}", "latest", "nope://x/y.safetensors"], "can't be opened"),
    "item": (
        ["{run}", "latest", "{out}/x.safetensors", "--item", "weights"],
        "has no item 'weights' of arrays; it has 'notes', 'state'",
    ),
    "match": (["{run}", "latest", "{out}/x.safetensors", "--match", "nothing_like_it"], "is in the name of no array"),
    "regex": (["{run}", "latest", "{out}/x.safetensors", "--match", "("], "is no regular expression"),
    "overflow": (
        ["{run}", "latest", "{out}/x.safetensors", "--match", "large", "--dtype", "float8_e4m3fn"],
        "dtype: large: 465.0 at [4, 65], and",
    ),
    "dtype": (["{run}", "latest", "{out}/x.safetensors", "--dtype", "int8"], "'int8' is no dtype of numbers with a point"),
    "copy": (["{run}", "latest", "{out}/x", "--dtype", "float32"], "a copy is the whole step as it is"),
    "size": (["{run}", "latest", "{out}/x.safetensors", "--shard-size", "big"], "--shard-size: expected a size such as 5GB"),
    "exists": (["{run}", "latest", "{run}"], f"{STEP} exists already"),
    "itself": (["{run}", "latest", "{run}/1200"], "run/1200 is a checkpoint: export to another place"),
    "inside": (["{run}", "latest", "{run}/1200/state/new", "--format", "orbax"], "run/1200 is a checkpoint"),
    "file inside": (["{run}", "latest", "{run}/1200/x.safetensors"], "run/1200 is a checkpoint"),
    "archive inside": (["{run}", "latest", "zip://x.safetensors::{run}/1200/x.zip"], "run/1200 is a checkpoint"),
    "backslash": (["{run}", "latest", "{out}/a\\b"], "backslash"),
    "archive": (["{run}", "latest", "tar://x::{out}/x.tar"], "nothing can be written into a tar:// archive"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_users_mistake_gets_a_sentence(one_run: Path, tmp_path: Path, mistake: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, sentence = MISTAKES[mistake]
    filled = [argument.format(run=one_run, out=tmp_path) for argument in arguments]
    before = files(tmp_path), files(one_run)
    code, _, err = raystate_command(capsys, "export", *filled)
    assert (code, err.splitlines()[0][:10]) == (2, "raystate: ")
    assert sentence in err
    assert (files(tmp_path), files(one_run)) == before


@pytest.mark.parametrize("scheme", ["", "memory://"])
@pytest.mark.parametrize("where", ["", "/exports", "/.raystate/work"])
def test_nothing_goes_into_a_run(one_run: Path, tmp_path: Path, scheme: str, where: str) -> None:
    place = f"{scheme}{tmp_path}/live" if not scheme else f"{scheme}{tmp_path.name}/live"
    storage = open_storage(place)
    storage.create(log_name(1), b"{}")
    for dst, options in ((place + where, {}), (f"{place}{where}/x.safetensors", {}), (place + where, {"format": "orbax"})):
        with pytest.raises(ConfigError, match="storage of a run"):
            export(one_run, dst, **options)
    assert [info.name for info in storage.list()] == [log_name(1)]


@pytest.mark.parametrize("place", ["file", "file/x.safetensors"])
def test_a_file_where_a_folder_is_needed(place: str, one_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = raystate_command(capsys, "export", one_run, "latest", tmp_path / place)
    assert code == 2 and f"{tmp_path}/file exists already: remove it first" in err


def test_a_place_that_cannot_be_written(one_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = raystate_command(capsys, "export", one_run, "latest", "/proc/nobody/x.safetensors")
    assert code == 1 and "create /proc/nobody" in err


def test_one_array_alone(tmp_path: Path) -> None:
    v1.save(str(tmp_path / "one"), {"x": jax.numpy.arange(3)})
    export_step(str(tmp_path / "one"), None, str(tmp_path / "one.safetensors"))
    assert notes()["seen"].shape == (4,)
    assert safetensors.numpy.load_file(tmp_path / "one.safetensors")["x"].tolist() == [0, 1, 2]


def test_two_exports_are_not_mixed(one_run: Path, tmp_path: Path) -> None:
    """Whoever reads the folder takes an index, if there is one: the import brought the older export."""
    export(one_run, tmp_path / "shards", format="safetensors", shard_bytes=1000)
    export(one_run, tmp_path / "file", format="safetensors")
    for taken, shard_bytes in (("shards", 5_000_000_000), ("file", 1000)):
        before = files(tmp_path / taken)
        with pytest.raises(ConfigError, match="exists already: remove it first"):
            export(one_run, tmp_path / taken, format="safetensors", shard_bytes=shard_bytes)
        assert files(tmp_path / taken) == before
    export(one_run, tmp_path / "file/other.safetensors")


def test_a_file_of_flax_is_no_step_to_copy(tmp_path: Path) -> None:
    """A copy of no file was called verified."""
    (tmp_path / "checkpoint_3").write_bytes(serialization.to_bytes({"w": np.ones(3)}))
    with pytest.raises(ConfigError, match="older form of flax's, which is no step to copy"):
        export_step(str(tmp_path / "checkpoint_3"), None, str(tmp_path / "out"))
    export_step(str(tmp_path / "checkpoint_3"), None, str(tmp_path / "out"), format="orbax")


class Faster(StorageWrapper):
    """Another export to the same place is done when this one begins to create what has fixed names."""

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self.others: list[str] = []

    def before(self, operation: str, name: str) -> None:
        if operation == "create" and not self.others:
            self.others += ["3/d/a0kffffffff", "3/_CHECKPOINT_METADATA", "3/commit_success.txt"]
            for other in self.others:
                self.inner.create(other, other.encode())


def to_bucket(storage: Storage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The part of an export to gs:// that creates files, on the memory back end."""
    monkeypatch.setattr(orbax_export, "write_tree", lambda *_args, **_options: iter(()))
    monkeypatch.setattr(
        orbax_export, "build_files", lambda *_: {"_CHECKPOINT_METADATA": b"{}", "default/_METADATA": b"", MARKER: b""}
    )
    tree = TreeSpec(item="default", leaves=())
    orbax_export.write_step(storage, 3, tree, lambda _: [], verify=False, tally=Tally(lambda *_: None, 0))


def test_an_export_that_was_faster_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slower one removed it."""
    storage = Faster(open_storage(f"memory://{tmp_path.name}/a"))
    with pytest.raises(StorageError, match="somebody else saves there"):
        to_bucket(storage, monkeypatch, tmp_path)
    assert [info.name for info in storage.list()] == sorted(storage.others)


def test_a_lost_answer_is_no_other_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(StorageWrapper):
        def after(self, operation: str, name: str) -> None:
            if operation == "create":
                raise ObjectExistsError("exists", operation=operation, path=name)

    storage = Lost(open_storage(f"memory://{tmp_path.name}/b"))
    to_bucket(storage, monkeypatch, tmp_path)
    assert [info.name for info in storage.list()] == ["3/_CHECKPOINT_METADATA", "3/commit_success.txt", "3/default/_METADATA"]


def test_a_copy_in_a_bucket_has_its_markers(tmp_path: Path) -> None:
    """Early Orbax wrote none in a directory; nobody listed the copy."""
    with ocp.CheckpointManager(tmp_path / "old") as manager:
        manager.save(3, args=ocp.args.StandardSave({"w": np.ones(2)}))
    for marker in (tmp_path / "old").rglob("commit_success.txt"):
        marker.unlink()
    report = export_step(str(tmp_path / "old"), 3, f"memory://{tmp_path.name}/c", format="copy")
    assert raystate.Reader(f"memory://{tmp_path.name}/c").all_steps() == [3]
    assert [file.name for file in report.files][-1] == "3/commit_success.txt"


@pytest.mark.parametrize("scheme", ["local", "file"])
def test_other_names_of_a_scheme(one_run: Path, tmp_path: Path, scheme: str) -> None:
    """Into a run, as a step that its log doesn't know."""
    open_storage(tmp_path / "other").create(log_name(1), b"{}")
    with pytest.raises(ConfigError, match="export to another place"):
        export(one_run, f"{scheme}://{tmp_path}/other/exports")


def test_a_failed_export_takes_nothing_of_others(one_run: Path, tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")
    place = open_place(f"memory://{tmp_path.name}/d", ["3"])
    place.write("3/mine", iter([b"mine"]))
    fs.pipe(f"/{tmp_path.name}/d/3/theirs", b"theirs")
    place.__exit__(ValueError, ValueError(), None)
    left = [name.rpartition("/")[2] for name in fs.find(f"/{tmp_path.name}/d")]
    assert left == ["mine", "theirs"], "an export of the same step has files of the same names: whose 'mine' is now nobody can tell"


@pytest.mark.parametrize("name", ["gcs", "s3a", "local"])
def test_a_folder_that_is_called_like_a_scheme(one_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """It was taken for the scheme, and the export went to another folder."""
    monkeypatch.chdir(tmp_path)
    export(one_run, name)
    assert os.listdir(tmp_path) == [name]
