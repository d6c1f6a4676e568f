"""raystate import: what comes into a run, what a manager makes of it, and what is refused."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.flax
import safetensors.numpy
from orbax.checkpoint import v1

import raystate
from raystate.core.formats.errors import (
    ConfigError,
    CorruptCheckpointError,
    ReferenceMismatchError,
    RunInUseError,
    StaleAttemptError,
    StorageError,
)
from raystate.core.formats.log import claim_entry
from raystate.inspection.verification import verify_log, verify_step
from raystate.storage import RunLog, StepFolder, find_garbage, open_storage
from raystate.transfer import IncomingStep, boxes, import_steps, open_source, orbax_tree
from tests.cli.transfers import STEP, a_run, files, in_memory_step, leaves, raystate_command
from tests.model.world import Rank, World
from tests.storage.backends import s3_backend


@pytest.fixture(scope="module")
def one_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_run(tmp_path_factory.mktemp("one") / "run")


def bring(src: Path | str, dst: Path | str, **options: Any) -> Any:
    return import_steps(dst, open_source(str(src), **options))


def tree(scale: int = 1) -> dict[str, Any]:
    return {"params": {"w": np.arange(12, dtype=np.float32).reshape(3, 4) * scale, "b": np.ones(4, np.float16)}, "n": scale}


def steps_in_memory(*numbers: int) -> Iterator[IncomingStep]:
    return (in_memory_step(number, tree(number)) for number in numbers)


# ---------------------------------------------------------------- Orbax


def test_orbax_steps_in_s3(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path / "old") as manager:
        for step in (3, 7):
            manager.save(step, args=ocp.args.StandardSave(tree(step)))
    with s3_backend(tmp_path) as bucket:
        old = open_storage(tmp_path / "old")
        for info in sorted(old.list(), key=lambda info: info.name.endswith("commit_success.txt")):
            bucket.create(info.name, old.read(info.name))
        for step in (3, 7):  # as Orbax ends a step in a bucket
            if not bucket.exists(f"{step}/commit_success.txt"):
                bucket.create(f"{step}/commit_success.txt", b"")
        assert bring(bucket.url, tmp_path / "new").steps == (3, 7)
        assert bring(f"{bucket.url}/7", tmp_path / "one").steps == (7,)
        with pytest.raises(ConfigError, match="there is nothing at"):
            bring(f"{bucket.url}/nowhere", tmp_path / "none")
    assert leaves(tmp_path / "new") == leaves(tmp_path / "old") == leaves(tmp_path / "one")


def test_a_directory_of_stock_steps(tmp_path: Path) -> None:
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(tmp_path / "old", options=options) as manager:
        for step in (3, 7):
            items = ocp.args.Composite(default=ocp.args.StandardSave(tree(step)), words=ocp.args.JsonSave({"a": step}))
            manager.save(step, args=items, metrics={"loss": 1 / step}, custom_metadata={"step": step})
    report = bring(tmp_path / "old", tmp_path / "new")
    assert report.steps == (3, 7) and not report.left_out
    reader = raystate.Reader(tmp_path / "new")
    assert reader.best_step() == 7
    for step in (3, 7):
        restored = reader.restore(step=step)
        assert (
            restored.metrics == {"loss": 1 / step} and restored.custom == {"step": step} and restored.items["words"] == {"a": step}
        )
        assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), restored.state, tree(step)))
    storage = open_storage(tmp_path / "new")
    assert [verify_step(storage, step).kind for step in (3, 7)] == ["raystate", "raystate"]
    assert not verify_log(storage) and not verify_step(storage, 7).bad and not find_garbage(storage)
    live = RunLog(storage).tail()
    assert live is not None and [(one.step, one.metrics) for one in live.live] == [(3, {"loss": 1 / 3}), (7, {"loss": 1 / 7})]
    assert not live.intents, "the next attempt has nothing to finish"


@pytest.mark.parametrize("naming", [{"step_prefix": "train"}, {"step_format_fixed_length": 8}], ids=["prefix", "width"])
def test_a_directory_of_steps_under_other_names(tmp_path: Path, naming: dict[str, Any]) -> None:
    with ocp.CheckpointManager(tmp_path / "old", options=ocp.CheckpointManagerOptions(**naming)) as manager:
        for step in (3, 12):
            manager.save(step, args=ocp.args.StandardSave(tree(step)))
    assert bring(tmp_path / "old", tmp_path / "new").steps == (3, 12)
    assert raystate.Reader(tmp_path / "new").all_steps() == [3, 12]
    for step in (3, 12):
        assert np.array_equal(raystate.load(tmp_path / "new", step=step)["params"]["w"], tree(step)["params"]["w"])


def test_one_checkpoint_and_bare_trees(tmp_path: Path) -> None:
    with ocp.StandardCheckpointer() as checkpointer:  # it saves behind our back
        checkpointer.save(tmp_path / "bare", tree())
        checkpointer.save(tmp_path / "1", tree())
    ocp.PyTreeCheckpointer(use_ocdbt=False).save(tmp_path / "2", tree(2))
    v1.save(str(tmp_path / "3"), tree(3))
    begins = "a run begins with it, at step 0, by restore_or_init"
    with pytest.raises(ConfigError, match=f"bare doesn't say which step it is: {begins}"):
        bring(tmp_path / "bare", tmp_path / "new")
    with pytest.raises(ConfigError, match=f"3 is step 3: {begins}"):
        bring(tmp_path / "3", tmp_path / "new", step=4)
    for number in (1, 2, 3):
        bring(tmp_path / str(number), tmp_path / "new")
        assert np.array_equal(raystate.load(tmp_path / "new", step=number)["params"]["w"], tree(number)["params"]["w"])
    assert raystate.Reader(tmp_path / "new").all_steps() == [1, 2, 3]


def test_items_without_a_state(tmp_path: Path) -> None:
    v1.save_checkpointables(str(tmp_path / "1"), {"params": tree()["params"], "optimizer": {"mu": np.zeros(3)}})
    v1.save_checkpointables(str(tmp_path / "2"), {"params": tree()["params"]})
    with pytest.raises(ReferenceMismatchError, match=r"its arrays are in 'optimizer', 'params'.*source="):
        bring(tmp_path / "1", tmp_path / "new")
    assert not (tmp_path / "new").exists(), "nothing is claimed for a mistake in SRC"
    bring(tmp_path / "2", tmp_path / "new")
    assert set(raystate.load(tmp_path / "new")) == {"w", "b"}


def test_a_whole_step_with_all_items(one_run: Path, tmp_path: Path) -> None:
    bring(one_run, tmp_path / "new")
    assert leaves(tmp_path / "new") == leaves(one_run)
    assert leaves(tmp_path / "new", "notes") == leaves(one_run, "notes")
    old, new = (raystate.metadata(path) for path in (one_run, tmp_path / "new"))
    assert (new.step, new.items, new.metrics, new.custom) == (old.step, old.items, old.metrics, old.custom)


# ---------------------------------------------------------------- safetensors that others wrote


def test_safetensors_of_others(tmp_path: Path) -> None:
    arrays = {
        "model.layers.0.w": jax.numpy.ones((3, 4), "bfloat16"),
        "model.norm": jax.numpy.arange(4.0),
        "head": jax.numpy.zeros(0),
    }
    safetensors.flax.save_file(arrays, tmp_path / "m.safetensors")
    with pytest.raises(ConfigError, match=r"m.safetensors doesn't say which step it is; --step N"):
        bring(tmp_path / "m.safetensors", tmp_path / "new")
    bring(tmp_path / "m.safetensors", tmp_path / "new", step=0)
    got = raystate.load(tmp_path / "new")
    assert set(got) == {"model", "head"} and got["model"]["layers"]["0"]["w"].dtype == jax.numpy.bfloat16
    bring(tmp_path / "m.safetensors", tmp_path / "new", step=1, flat=True)
    got = raystate.load(tmp_path / "new", step=1)
    assert {name: array.dtype.name for name, array in got.items()} == {
        "model.layers.0.w": "bfloat16", "model.norm": "float32", "head": "float32",
    }  # fmt: skip
    safetensors.numpy.save_file({"a": np.ones(2), "a.b": np.ones(2)}, tmp_path / "clash.safetensors")
    with pytest.raises(ConfigError, match="--flat"):
        bring(tmp_path / "clash.safetensors", tmp_path / "new", step=2)


@pytest.mark.parametrize("text", ["junk", "", "{", "[1]", '{"by": "another"}'])
def test_what_others_wrote_under_our_name_is_no_description(tmp_path: Path, text: str) -> None:
    safetensors.numpy.save_file({"a.b": np.ones(2)}, tmp_path / "m.safetensors", metadata={"raystate": text})
    bring(tmp_path / "m.safetensors", tmp_path / "one", step=1)
    shards = tmp_path / "shards"
    shards.mkdir()
    safetensors.numpy.save_file({"a.b": np.ones(2)}, shards / "x.safetensors")
    index = {"metadata": {"raystate": text}, "weight_map": {"a.b": "x.safetensors"}}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    bring(shards, tmp_path / "many", step=1)
    for run in ("one", "many"):
        assert np.array_equal(raystate.load(tmp_path / run)["a"]["b"], np.ones(2))


# ---------------------------------------------------------------- nothing is executed, nothing escapes, memory is bounded


def tensors(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin: int = 0, end: int = 4, shape: Any = (1,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


HOSTILE = {
    "empty": (b"", "would have -1 bytes"),
    "short": (b"\1\2\3", "would have -1 bytes"),
    "long header": (tensors({}, length=2**60), "the file has"),
    "not json": (tensors(b"{nope"), "not JSON"),
    "no object": (tensors(b"[1, 2]"), "no JSON object"),
    "deep": (tensors(b'{"a":' * 100_000), "nested too deeply"),
    "huge number": (tensors(b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}', b"1234"), "is not a"),
    "huge shape": (tensors({"a": entry(shape=[2**62, 2**62])}, b"1234"), "too large"),
    "other bytes": (tensors({"a": entry(shape=[2**50])}, b"1234"), "4 bytes for F32"),
    "many dimensions": (tensors({"a": entry(shape=[1] * 10_000)}, b"1234"), "no shape of 10000 dimensions"),
    "more dimensions than can be kept": (tensors({"a": entry(shape=[1] * 64)}, b"1234"), "no shape of 64 dimensions.*at most 32"),
    "huge and empty": (tensors({"a": entry(end=0, shape=[2**62, 0])}), "too large"),
    "described as huge": (
        tensors(
            {"__metadata__": {"raystate": json.dumps({"version": 1, "step": 1, "item": "state", "nodes": [
                [["a"], "array", {"dtype": "complex128", "shape": [2**57, 0]}]]})},
             "a": entry(end=0, shape=[2**57, 0, 2], dtype="F64")},
        ),
        "too large",
    ),
    "negative": (tensors({"a": entry(begin=-4, end=0)}, b"1234"), "is no size or offset"),
    "bool": (tensors({"a": entry(shape=[True])}, b"1234"), "is no size or offset"),
    "beyond": (tensors({"a": entry(end=2**40, shape=[2**38])}, b"1234"), "end at byte"),
    "overlap": (tensors({"a": entry(), "b": entry()}, b"12345678"), "begins at byte"),
    "hole": (tensors({"a": entry(begin=4, end=8)}, b"12345678"), "begins at byte"),
    "rest": (tensors({"a": entry()}, b"12345678"), "its arrays end at byte"),
    "twice": (tensors(b'{"a":1,"a":2}'), "twice"),
    "dtype": (tensors({"a": entry(dtype="O")}, b"1234"), "can't be read"),
    "metadata": (tensors({"__metadata__": {"a": {}}}), "something else than texts"),
    "description": (
        tensors({"__metadata__": {"raystate": '{"version":1'}, "a": entry()}, b"1234"), "description by raystate can't be read"
    ),
    "another's": (
        tensors(
            {"__metadata__": {"raystate": json.dumps({"version": 1, "step": 1, "item": "state", "nodes": [[["b"], "none", None]]})},
             "a": entry()}, b"1234",
        ),
        "not those that its description names: 'a'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_safetensors_file_ends_in_a_clear_error(tmp_path: Path, case: str) -> None:
    data, sentence = HOSTILE[case]
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=sentence):
        bring(tmp_path / "x.safetensors", tmp_path / "new", step=1)
    assert not (tmp_path / "new").exists()


def test_a_header_is_not_read_beyond_its_bound(tmp_path: Path) -> None:
    with (tmp_path / "x.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 2**33))
        file.truncate(2**34)  # sparse
    with pytest.raises(CorruptCheckpointError, match="at most 33554432 are read"):
        bring(tmp_path / "x.safetensors", tmp_path / "new", step=1)


@pytest.mark.parametrize(
    "name", ["../evil.safetensors", "/etc/x.safetensors", "a\0.safetensors", "x" * 300 + ".safetensors", "a.py"]
)
def test_an_index_names_only_files_beside_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CorruptCheckpointError, match="no file beside it"):
        bring(tmp_path, tmp_path / "new", step=1)


def test_an_index_and_its_files_agree(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"a": np.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(CorruptCheckpointError, match="no index: an unfinished export"):
        bring(tmp_path, tmp_path / "new", step=1)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys("ab", "model-00001-of-00002.safetensors")})
    )
    with pytest.raises(CorruptCheckpointError, match=r"don't agree, such as on \['b'\]"):
        bring(tmp_path, tmp_path / "new", step=1)


@pytest.mark.parametrize("name", ["../../evil", "/abs", "a\0b"])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    before = files(tmp_path)
    (tmp_path / "x.safetensors").write_bytes(tensors({name: entry()}, b"1234"))
    with pytest.raises(ConfigError, match="is no name that a checkpoint can have"):
        bring(tmp_path / "x.safetensors", tmp_path / "new", step=1, flat=True)
    assert files(tmp_path) == sorted([*before, "x.safetensors"])


class Evil:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("it was unpickled",))


@pytest.mark.parametrize("shape", [(2**57, 0), (1,) * 31 + (0,)])
def test_the_largest_shapes_that_can_be_kept(tmp_path: Path, shape: tuple[int, ...]) -> None:
    (tmp_path / "x.safetensors").write_bytes(tensors({"a": entry(end=0, shape=shape)}))
    bring(tmp_path / "x.safetensors", tmp_path / "new", step=1)
    assert raystate.load(tmp_path / "new")["a"].shape == shape


def test_no_more_than_a_batch_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {"w": np.arange(300_000, dtype=np.int32).reshape(3, 10_000, 10), "wide": np.arange(60_000.0).reshape(2, 30_000)}
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors")
    monkeypatch.setattr(boxes, "BATCH_BYTES", 100_000)
    monkeypatch.setattr(orbax_tree, "WRITER_BYTES", 250_000)
    read: list[int] = []

    def counted(steps: Iterator[IncomingStep]) -> Iterator[IncomingStep]:
        for step in steps:
            real: Callable[[str, Sequence[Any]], list[np.ndarray]] = step.read

            def read_counted(item: str, requests: Sequence[Any], real: Any = real) -> list[np.ndarray]:
                parts = real(item, requests)
                read.append(sum(part.nbytes for part in parts))
                return parts

            yield IncomingStep(step=step.step, trees=step.trees, read=read_counted)

    import_steps(tmp_path / "new", counted(open_source(str(tmp_path / "x.safetensors"), step=1)))
    assert max(read) <= 250_000 and sum(read) == 1_200_000 + 480_000
    got = raystate.load(tmp_path / "new")
    assert all(np.array_equal(got[name], array) for name, array in arrays.items())


# ---------------------------------------------------------------- the run


def test_a_manager_goes_on_from_what_was_imported() -> None:
    world = World(1, ranks=1, nodes=1, save_every_steps=1, keep_last=2)
    seen: list[Any] = []

    def trains(rank: Rank) -> None:
        manager = rank.open("first")
        restored = manager.restore(tree(0))
        assert restored is not None
        seen.append((restored.step, restored.tier, restored.state))
        manager.save(restored.step + 1, tree(9))
        manager.wait_until_finished()
        for _ in range(200):  # until retention has been carried out
            rank.rest(0.01)

    try:
        import_steps(world.config.storage, steps_in_memory(5, 7))
        ranks = [Rank(world, 0, trains)]
        world.run(ranks)
        ranks[0].kill()
        reader = raystate.Reader(world.config.storage)
        assert reader.all_steps() == [7, 8], "retention takes an imported step like any other"
        step, tier, state = seen[0]
        assert (step, tier, state["n"]) == (7, "storage", 7) and np.array_equal(state["params"]["w"], tree(7)["params"]["w"])
        storage = open_storage(world.config.storage)
        assert not verify_log(storage) and not verify_step(storage, 7).bad
        with pytest.raises(RunInUseError, match=r"belongs to run 'model' \(attempt 2\).*--takeover"):
            import_steps(world.config.storage, steps_in_memory(20))
        import_steps(world.config.storage, steps_in_memory(20), takeover=True)
        assert reader.all_steps() == [7, 8, 20]
    finally:
        world.close()


def test_numbers_that_exist_are_refused(tmp_path: Path) -> None:
    import_steps(tmp_path, steps_in_memory(5))
    before, another = files(tmp_path), in_memory_step(5, tree(6))
    with pytest.raises(ConfigError, match=r"step 5 exists in .*: delete it first"):
        import_steps(tmp_path, [another])
    assert files(tmp_path) == before
    with pytest.raises(ConfigError, match="step 5 exists in"):
        import_steps(tmp_path, [*steps_in_memory(6), another])
    with pytest.raises(ConfigError, match="step 6 comes twice"):
        import_steps(tmp_path, steps_in_memory(6, 6))
    assert raystate.Reader(tmp_path).all_steps() == [5]
    assert not find_garbage(open_storage(tmp_path))
    import_steps(tmp_path, steps_in_memory(6))
    assert raystate.Reader(tmp_path).all_steps() == [5, 6]


def test_stock_steps_beside_are_kept(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, args=ocp.args.StandardSave(tree()))
    import_steps(tmp_path / "run", steps_in_memory(4))
    assert raystate.Reader(tmp_path / "run").all_steps() == [3, 4]


def test_a_failed_import_leaves_no_data(tmp_path: Path) -> None:
    def fails(step: IncomingStep) -> IncomingStep:
        def read(item: str, requests: Sequence[Any]) -> list[np.ndarray]:
            raise StorageError("the source is gone")

        return IncomingStep(step=step.step, trees=step.trees, read=read)

    def steps() -> Iterator[IncomingStep]:
        first, second = steps_in_memory(5, 6)
        yield first
        yield fails(second)

    with pytest.raises(StorageError, match="the source is gone"):
        import_steps(tmp_path / "new", steps())
    assert raystate.Reader(tmp_path / "new").all_steps() == []
    assert not [name for name in files(tmp_path / "new") if "ocdbt" in name or "steps/" in name]
    import_steps(tmp_path / "new", steps_in_memory(5, 6))
    assert raystate.Reader(tmp_path / "new").all_steps() == [5, 6]


def test_who_is_superseded_commits_nothing_more(tmp_path: Path) -> None:
    def steps() -> Iterator[IncomingStep]:
        yield from steps_in_memory(5)
        RunLog(open_storage(tmp_path)).claim(lambda tail: claim_entry(tail, "another", "lm"))

    with pytest.raises(StaleAttemptError, match="somebody else has claimed the run"):
        import_steps(tmp_path, steps())
    assert raystate.Reader(tmp_path).all_steps() == []
    assert not [name for name in files(tmp_path) if "ocdbt" in name]


def test_a_commit_that_died_is_finished_by_the_next_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead(BaseException):
        pass

    def dies(self: StepFolder, package: Any) -> None:
        raise Dead

    with monkeypatch.context() as patched:
        patched.setattr(StepFolder, "publish", dies)
        with pytest.raises(Dead):
            import_steps(tmp_path, steps_in_memory(5))
    assert raystate.Reader(tmp_path).all_steps() == []
    import_steps(tmp_path, steps_in_memory(6))
    assert raystate.Reader(tmp_path).all_steps() == [5, 6]


def test_what_is_read_back_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = orbax_tree.write_item

    def writes_something_else(base: Any, writer: str, spec: Any, pieces: Any, **more: Any) -> bool:
        return real(base, writer, spec, [(leaf, start, data + np.ones((), data.dtype)) for leaf, start, data in pieces], **more)

    monkeypatch.setattr(orbax_tree, "write_item", writes_something_else)
    with pytest.raises(CorruptCheckpointError, match="was not read back as it was written"):
        import_steps(tmp_path, steps_in_memory(5))
    assert raystate.Reader(tmp_path).all_steps() == []


# ---------------------------------------------------------------- the command


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    safetensors.numpy.save_file({"a.b": np.ones(2)}, tmp_path / "m.safetensors")
    code, out, _ = raystate_command(capsys, "import", tmp_path / "m.safetensors", tmp_path / "new", "--step", 3)
    assert (code, out) == (0, f"step 3 in file://{tmp_path}/new: 1 array, 16 B, verified\n")
    code, out, _ = raystate_command(
        capsys, "import", tmp_path / "m.safetensors", tmp_path / "new", "--step", 4, "--json", "--run", "lm"
    )
    report = json.loads(out)
    assert (code, report["steps"], report["run"], report["arrays"], report["nbytes"]) == (0, [4], "lm", 1, 16)
    code, out, _ = raystate_command(capsys, "import", "--help")
    assert code == 0 and "raystate import gs://bucket/hf runs/tune" in out
    assert max(map(len, out.splitlines())) <= 80


MISTAKES: dict[str, tuple[list[str], str]] = {
    "missing": (["{out}/nowhere", "{out}/new"], "src: there is nothing at"),
    "missing file": (["{out}/nowhere.safetensors", "{out}/new"], "src: there is nothing at"),
    "format": (["{out}/file.pkl", "{out}/new"], "is no file that can be imported; that is a safetensors file"),
    "empty folder": (["{out}", "{out}/new"], "has no step"),
    "step": (["{run}", "{out}/new", "--step", "7"], "has no step 7; it has [1200]"),
    "scheme": (["nope://x", "{out}/new"], "can't be opened"),
    "dst": (["{run}", "s4://bucket/x"], "unsupported scheme s4://"),
    "no step there": (["memory://nothing/here", "{out}/new"], "there is nothing at"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_users_mistake_gets_a_sentence(one_run: Path, tmp_path: Path, mistake: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file.pkl").write_bytes(pickle.dumps(Evil()))
    arguments, sentence = MISTAKES[mistake]
    code, _, err = raystate_command(capsys, "import", *[one.format(run=one_run, out=tmp_path) for one in arguments])
    assert (code, err.splitlines()[0][:10]) == (2, "raystate: "), err
    assert sentence in err
    assert files(tmp_path) == ["file.pkl"]


def test_a_step_of_the_run_is_imported_by_number(one_run: Path, tmp_path: Path) -> None:
    assert bring(one_run, tmp_path / "new", step=STEP).steps == (STEP,)
