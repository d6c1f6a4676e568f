"""What holds something else than a run with a state says so: which steps, items and checkpoints there are, and what to pass."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

import raystate
from raystate.core.formats.errors import (
    ConfigError,
    CorruptCheckpointError,
    ReferenceMismatchError,
    StepNotFoundError,
    StorageError,
)
from raystate.core.formats.log import claim_entry
from raystate.storage import RunLog, foreign_checkpoints, open_storage, why_empty
from raystate.storage.names import log_name
from raystate.transfer import import_steps, open_source
from tests.orbax.published import publish
from tests.processes import run_python
from tests.storage.backends import claim, gcs_backend

STOCK = """
import sys
from pathlib import Path
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import v1

root = Path(sys.argv[1])
tree = lambda n: {"w": np.full((5, 3), n, np.float32), "n": np.arange(4)}
standard = ocp.args.StandardSave
with ocp.CheckpointManager(root / "several") as manager:
    manager.save(3, args=ocp.args.Composite(params=standard(tree(1)), opt=standard(tree(2)), notes=ocp.args.JsonSave({"a": 1})))
with ocp.CheckpointManager(root / "one") as manager:
    manager.save(3, args=ocp.args.Composite(model=standard(tree(3))))
with ocp.CheckpointManager(root / "none") as manager:
    manager.save(3, args=ocp.args.Composite(notes=ocp.args.JsonSave({"a": 1})))
with ocp.CheckpointManager(root / "plain") as manager:
    manager.save(3, args=standard(tree(4)))
for name, options in {
    "fixed": ocp.CheckpointManagerOptions(step_format_fixed_length=8, best_fn=lambda metrics: metrics["loss"]),
    "prefixed": ocp.CheckpointManagerOptions(step_prefix="step", best_fn=lambda metrics: metrics["loss"]),
}.items():
    with ocp.CheckpointManager(root / name, options=options) as manager:
        for step in (20, 1200):
            manager.save(step, args=standard(tree(5 if step == 1200 else 0)), metrics={"loss": step})
with ocp.CheckpointManager(root / "both", options=ocp.CheckpointManagerOptions(step_prefix="ckpt", step_format_fixed_length=3)) as manager:
    for step in (7, 20, 1200):
        manager.save(step, args=standard(tree(step)))
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(root / "bare", tree(6))
with ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
    checkpointer.save(root / "async", tree(9), custom_metadata={"commit": "abc"})
with ocp.PyTreeCheckpointer() as checkpointer:
    for step in (4, 5):
        checkpointer.save(root / "loop" / f"step_{step}", tree(step))
        checkpointer.save(root / "numbers" / f"{step}", tree(step))
with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
    checkpointer.save(root / "early", tree(7))
v1.save_pytree(root / "v1", tree(8))
v1.save_checkpointables(root / "named", {"net": tree(10), "settings": {"layers": 2}})
with v1.training.Checkpointer(root / "training") as checkpointer:
    for step in (3, 5):
        checkpointer.save_checkpointables(step, {"model": tree(step)})
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stock")
    run_python("-c", STOCK, root)
    return root


def value(tree: Any) -> float:
    return float(np.asarray(tree["w"]).flat[0])


def test_a_json_item_of_the_datas_position_sets_an_iterator(written: Path):
    data = raystate.Counted(lambda: range(9))
    with pytest.raises(ReferenceMismatchError, match="has no iterator item 'data'"):
        raystate.load(written / "several", step=3, items={"data": data})

    class Position:
        state: Any = None

        def get_state(self) -> Any:
            return {"a": 0}

        def set_state(self, state: Any) -> None:
            self.state = state

    position = Position()
    raystate.load(written / "several", step=3, items={"notes": position})
    assert position.state == {"a": 1}
    with pytest.raises(ReferenceMismatchError, match="has no iterator item 'notes'"):  # another kind of state
        raystate.load(written / "several", step=3, items={"notes": raystate.Counted(lambda: range(9))})


# ---------------------------------------------------------------- a step without a state


@pytest.mark.parametrize(("folder", "names"), [("several", ["opt", "params"]), ("none", ["notes"])])
def test_a_step_without_a_state_is_a_mistake_that_says_what_is_there(written: Path, folder: str, names: list[str]):
    reader = raystate.Reader(written / folder)
    with pytest.raises(ReferenceMismatchError, match="step 3 has no item 'state' or 'default'") as caught:
        reader.restore()
    assert all(repr(name) in caught.value.message for name in names)
    assert caught.value.step == 3
    for read in (
        lambda: reader.restore(step=3),
        lambda: raystate.load(written / folder),
        lambda: raystate.load(written / folder / "3"),
    ):
        with pytest.raises(ReferenceMismatchError):
            read()


def test_what_the_message_says_works(written: Path):
    with pytest.raises(ReferenceMismatchError, match=r"raystate.load\(…, item='opt'\) reads one item"):
        raystate.load(written / "several")
    assert value(raystate.load(written / "several", item="opt")) == 2
    assert value(raystate.load(written / "several", step=3, item="params")) == 1
    assert value(raystate.load(written / "several" / "3", item="params")) == 1
    assert value(raystate.load(written / "several" / "3" / "params")) == 1
    with pytest.raises(ReferenceMismatchError, match=r"no item 'model' of arrays; it has \['opt', 'params'\]"):
        raystate.load(written / "several", item="model")


@pytest.mark.parametrize(
    ("path", "expected"), [("plain", 4), ("plain/3", 4), ("plain/3/default", 4), ("bare", 6), ("early", 7), ("v1", 8), ("async", 9)]
)
def test_whatever_orbax_writes_is_read_by_its_path(written: Path, path: str, expected: float):
    assert value(raystate.load(written / path)) == expected
    assert raystate.metadata(written / path).trees
    assert len(raystate.Reader(written / path).all_steps()) == 1


def test_a_step_without_a_state_can_be_looked_at(written: Path):
    found = raystate.metadata(written / "several")
    assert (found.step, found.items) == (3, ("notes", "opt", "params"))


def test_stock_names_of_the_state_are_both_known(written: Path):
    assert value(raystate.load(written / "plain", item="default")) == value(raystate.load(written / "plain", item="state")) == 4


@pytest.mark.parametrize(
    ("path", "item", "expected"), [("one", "model", 3), ("one/3", "model", 3), ("named", "net", 10), ("training", "model", 5)]
)
def test_the_only_item_with_arrays_is_the_state(written: Path, path: str, item: str, expected: float):
    assert value(raystate.load(written / path)) == value(raystate.load(written / path, item=item)) == expected
    assert value(raystate.Reader(written / path).restore().state) == expected
    found = raystate.metadata(written / path)
    assert found.trees[item]["w"].shape == (5, 3) and found.trees[item]["w"].read()[0, 0] == expected


def test_a_bare_tree_keeps_its_custom_metadata(written: Path):
    assert raystate.metadata(written / "async").custom == {"commit": "abc"}


def test_another_item_that_has_lost_its_tree_may_have_been_the_state(written: Path, tmp_path: Path):
    shutil.copytree(written / "several", tmp_path / "run")
    (tmp_path / "run/3/opt/_METADATA").unlink()
    with pytest.raises(CorruptCheckpointError, match="lost the metadata of its item 'opt'"):
        raystate.load(tmp_path / "run")


def test_plain_files_tell_their_sizes(written: Path):
    """Of a tree without OCDBT, where each chunk is a file."""
    array = raystate.metadata(written / "early").trees["state"]["w"]
    sizes = {str(path.relative_to(written / "early")): path.stat().st_size for path in (written / "early/w").rglob("*")}
    stored = array.stored()
    assert {key: one.nbytes for key, one in stored.keys.items()} == sizes and stored.nbytes == sum(sizes.values())
    assert array.spec()["kvstore"] == {"driver": "file", "path": f"{written}/early/w/"}
    assert ts.open(array.spec()).result()[0, 0].read().result() == 7


def test_a_lost_chunk_of_a_tree_in_plain_files_is_damage(written: Path, tmp_path: Path):
    """Zarr gives its fill value for it."""
    shutil.copytree(written / "early", tmp_path / "run")
    next((tmp_path / "run/w").glob("[0-9]*")).unlink()
    with pytest.raises(CorruptCheckpointError, match="'w'"):
        raystate.load(tmp_path / "run")


@pytest.mark.parametrize("lost", ["3/default/_METADATA", "3/default/_METADATA and package"])
def test_a_state_that_has_lost_its_metadata_is_damage(written: Path, tmp_path: Path, lost: str):
    shutil.copytree(written / "plain", tmp_path / "run")
    (tmp_path / "run" / lost.split()[0]).unlink()
    with pytest.raises(CorruptCheckpointError, match="default"):
        raystate.Reader(tmp_path / "run").restore()


def test_an_item_of_which_nothing_is_there_is_damage(tmp_path: Path):
    """As when a bit of its name has flipped."""
    publish(tmp_path, 7)
    path = tmp_path / "7" / "_CHECKPOINT_METADATA"
    path.write_bytes(path.read_bytes().replace(b'"state"', b'"stare"'))
    with pytest.raises(CorruptCheckpointError, match="stare"):
        raystate.Reader(tmp_path).restore()


# ---------------------------------------------------------------- checkpoints under other names


@pytest.mark.parametrize(("folder", "name"), [("fixed", "00001200/"), ("prefixed", "step_1200/")])
def test_a_run_does_not_begin_beside_steps_under_other_names(written: Path, folder: str, name: str):
    storage = open_storage(written / folder)
    assert name in foreign_checkpoints(storage)
    with pytest.raises(ConfigError, match=name) as caught:
        claim(storage)
    assert caught.value.field == "storage"
    assert not storage.exists(log_name(1))
    assert value(raystate.load(written / folder / name)) == 5, "and what the message says works"


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("fixed", {20: 0, 1200: 5}),
        ("prefixed", {20: 0, 1200: 5}),
        ("both", {7: 7, 20: 20, 1200: 1200}),
        ("loop", {4: 4, 5: 5}),
        ("numbers", {4: 4, 5: 5}),
    ],
)
def test_steps_under_orbaxs_other_names_are_read(written: Path, folder: str, expected: dict[int, float]):
    reader = raystate.Reader(written / folder)
    steps = sorted(expected)
    assert reader.all_steps() == steps and reader.latest_step() == steps[-1]
    for step in steps:
        assert value(raystate.load(written / folder, step=step)) == expected[step]
        assert reader.metadata(step).step == step
    assert value(reader.restore().state) == expected[steps[-1]]
    assert [restored.step for restored in reader.follow(timeout_s=0.0)] == steps[-1:]
    with pytest.raises(StepNotFoundError, match="has no step 6"):
        reader.metadata(6)
    if folder in ("fixed", "prefixed"):
        assert reader.best_step("loss") == 20
        assert raystate.Reader(written / folder / ("00000020" if folder == "fixed" else "step_20")).all_steps() == [20]


def test_which_names_are_meant_must_be_plain(written: Path, tmp_path: Path):
    shutil.copytree(written / "prefixed/step_20", tmp_path / "step_20")
    shutil.copytree(written / "prefixed/step_20", tmp_path / "best_20")
    with pytest.raises(ConfigError, match=r"several names, such as '(best|step)_20' \(1 step\) and"):
        raystate.Reader(tmp_path).all_steps()
    shutil.copytree(written / "prefixed/step_1200", tmp_path / "1200")
    assert raystate.Reader(tmp_path).all_steps() == [1200], "plain numbers come first: the others are copies"
    shutil.copytree(written / "prefixed/step_1200", tmp_path / "00000020")
    assert raystate.Reader(tmp_path).all_steps() == [1200], "4 digits are no number of a manager that writes 8"
    (tmp_path / "00000020").rename(tmp_path / "0020")
    assert raystate.Reader(tmp_path).all_steps() == [20, 1200], "and are one of a manager that writes 4"
    (tmp_path / ".raystate").mkdir()
    assert raystate.Reader(tmp_path).all_steps() == [1200], "a run has its steps under plain numbers"


def test_unfinished_steps_under_other_names_are_not_read(written: Path, tmp_path: Path):
    shutil.copytree(written / "prefixed", tmp_path / "run")
    for marker in ("_CHECKPOINT_METADATA", "commit_success.txt"):
        (tmp_path / "run/step_1200" / marker).unlink(missing_ok=True)
    shutil.copytree(written / "prefixed/step_20", tmp_path / "run/step_30.orbax-checkpoint-tmp")
    assert raystate.Reader(tmp_path / "run").all_steps() == [20]


def test_arrays_of_the_name_metrics_are_an_item(tmp_path: Path):
    """They were passed over without a word, also by an import."""
    numbers = {"loss": np.arange(3.0)}
    both = ocp.args.Composite(state=ocp.args.StandardSave({"w": np.ones(2)}), metrics=ocp.args.StandardSave(numbers))
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "old" / "1", args=both)
    assert raystate.load(tmp_path / "old", item="metrics")["loss"].tolist() == [0.0, 1.0, 2.0]
    assert raystate.metadata(tmp_path / "old").kinds == {"metrics": "arrays", "state": "arrays"}
    report = import_steps(tmp_path / "new", open_source(str(tmp_path / "old")))
    assert "item 'metrics'" in report.left_out[1][0]
    assert raystate.Reader(tmp_path / "new").restore().state["w"].tolist() == [1.0, 1.0]
    both = ocp.args.Composite(params=ocp.args.StandardSave({"w": np.ones(2)}), metrics=ocp.args.StandardSave(numbers))
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "other", args=both)
    assert raystate.load(tmp_path / "other")["w"].tolist() == [1.0, 1.0], "beside arrays of another name they are not the state"


def early(path: Path, tree: Any) -> None:
    """As Orbax wrote it before it had markers in directories."""
    ocp.PyTreeCheckpointer().save(path, tree)
    for marker in ("_CHECKPOINT_METADATA", "commit_success.txt"):
        (path / marker).unlink(missing_ok=True)


def test_early_steps_under_plain_numbers(tmp_path: Path):
    """A run began at step 0 beside them."""
    early(tmp_path / "4", {"w": np.ones(2)})
    assert raystate.Reader(tmp_path).all_steps() == [4]
    assert raystate.Reader(tmp_path).restore().state["w"].tolist() == [1.0, 1.0]
    early(tmp_path / "items" / "4" / "default", {"w": np.ones(2)})
    with pytest.raises(ConfigError, match=r"lack the files which make a step whole: '4/' .* like 4/state\)"):
        claim(open_storage(tmp_path / "items"))


def test_steps_that_orbax_wrote_until_2024_are_read_where_stock_reads_them(tmp_path: Path):
    """They have neither a marker nor `_CHECKPOINT_METADATA`."""
    for step in (4, 5):
        early(tmp_path / f"steps/{step}/default", {"w": np.full(2, step)})
    early(tmp_path / "steps/6.orbax-checkpoint-tmp-17/default", {"w": np.zeros(2)})
    (tmp_path / "steps/7/default").mkdir(parents=True)
    early(tmp_path / "named/step_3/default", {"w": np.ones(2)})
    assert raystate.Reader(tmp_path / "named").all_steps() == [3]
    stock = ocp.CheckpointManager(tmp_path / "steps", item_names=("default",))
    reader = raystate.Reader(tmp_path / "steps")
    assert stock.restore(5, args=ocp.args.Composite(default=ocp.args.PyTreeRestore()))["default"]["w"].tolist() == [5, 5]
    assert reader.all_steps() == [4, 5] and reader.restore().state["w"].tolist() == [5, 5]
    assert raystate.load(tmp_path / "steps/4")["w"].tolist() == [4, 4], "by its own path, too"
    import_steps(tmp_path / "run", open_source(str(tmp_path / "steps")))
    assert raystate.Reader(tmp_path / "run").all_steps() == [4, 5]
    (tmp_path / "steps/.raystate").mkdir()
    assert reader.all_steps() == [], "in a run's folder the marker decides"


def test_what_is_no_checkpoint_is_none(tmp_path: Path):
    """Logs, an earlier crash, Orbax's unfinished saves, other runs."""
    for name in (
        "notes.txt", "events.out.tfevents.17", "plots_3/loss.png", "lm_1/.raystate/log/000000000001.json", "lm_1/7/_CHECKPOINT_METADATA",
        "12.orbax-checkpoint-tmp-1700000000/_METADATA", ".raystate/work/7.a1k1/_CHECKPOINT_METADATA", "12/state/x",
        "wandb/run-3/config.yaml", "checkpoints/README",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    storage = open_storage(tmp_path)
    assert foreign_checkpoints(storage) == ()
    assert claim(storage).live == ()


def test_a_run_that_has_begun_is_not_refused_because_of_an_export(written: Path, tmp_path: Path):
    storage = open_storage(tmp_path)
    claim(storage)
    shutil.copytree(written / "bare", tmp_path / "best_7")
    assert claim(storage).attempt == 2
    shutil.copytree(written / "plain", tmp_path / "other" / "run")
    shutil.copytree(written / "bare", tmp_path / "other" / "run" / "best_7")
    assert [one.step for one in claim(open_storage(tmp_path / "other" / "run")).live] == [3], "and plain steps are adopted"


def test_an_unfinished_checkpoint_in_a_bucket_is_not_read(tmp_path: Path, written: Path):
    with gcs_backend(tmp_path) as bucket:
        bucket.create("9/_CHECKPOINT_METADATA", b"{}")
        with pytest.raises(StepNotFoundError, match=r"no commit_success\.txt"):
            raystate.load(f"{bucket.url}/9")


# ---------------------------------------------------------------- nothing outside is read


@pytest.mark.parametrize("name", ["../secret", "/etc", "..", "a/../../secret", "a\0b", ""])
def test_an_item_that_points_outside_is_damage(written: Path, tmp_path: Path, name: str):
    shutil.copytree(written / "plain", tmp_path / "run")
    shutil.copytree(written / "bare", tmp_path / "run" / "secret")
    path = tmp_path / "run" / "3" / "_CHECKPOINT_METADATA"
    document = json.loads(path.read_bytes())
    document["item_handlers"] = {name: "x", "default": "y"}
    path.write_text(json.dumps(document))
    with pytest.raises(CorruptCheckpointError, match="no name inside the checkpoint"):
        raystate.load(tmp_path / "run")


@pytest.mark.parametrize("key", ["../../secret/w", "/etc/passwd", ".."])
def test_an_array_that_points_outside_is_damage(written: Path, tmp_path: Path, key: str):
    """Of a tree without OCDBT, where a name is a path."""
    shutil.copytree(written / "early", tmp_path / "a" / "run")
    shutil.copytree(written / "early", tmp_path / "secret")
    path = tmp_path / "a" / "run" / "_METADATA"
    document = json.loads(path.read_bytes())
    next(iter(document["tree_metadata"].values()))["key_metadata"][0]["key"] = key
    path.write_text(json.dumps(document))
    with pytest.raises(CorruptCheckpointError, match="no name inside the checkpoint"):
        raystate.load(tmp_path / "a" / "run")


def test_a_path_with_a_zero_byte_is_a_mistake():
    with pytest.raises(ConfigError, match="control characters"):
        raystate.load("/tmp/a\0b")


# ---------------------------------------------------------------- paths with nothing at them


def test_only_what_can_be_read_is_said_to_be_meant(tmp_path: Path):
    for folder in ("runs-old/logs", "runs-new/7", "rums/code"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "rums/notes.txt").write_text("x")
    with pytest.raises(StepNotFoundError, match=r"there is nothing at that path$"):
        raystate.load(tmp_path / "runs")
    RunLog(open_storage(tmp_path / "runs-new")).claim(lambda _: claim_entry(None, "w", "r", []))
    with pytest.raises(StepNotFoundError, match=r"did you mean .*/runs-new\?$"):  # not the closest name
        raystate.load(tmp_path / "runs")
    raystate.save(tmp_path / "runs-old" / "logs", {"w": np.ones(2)}, overwrite=True)
    with pytest.raises(StepNotFoundError, match=r"did you mean .*/runs-old/logs\?$"):
        raystate.load(tmp_path / "runs-odd" / "logs")


def test_a_path_that_was_mistyped_does_not_look_like_an_empty_run(tmp_path: Path):
    raystate.save(tmp_path / "runs" / "lm-large" / "7", {"w": np.ones(2)})
    empty, file = tmp_path / "empty", tmp_path / "notes.txt"
    empty.mkdir()
    file.write_text("x")
    for path, said in {
        tmp_path / "nowhere": "has no step: there is nothing at that path$",
        tmp_path / "runs" / "lm-lage": f"there is nothing at that path; did you mean file://{tmp_path}/runs/lm-large\\?",
        tmp_path / "rums" / "lm-large": f"there is nothing at that path; did you mean file://{tmp_path}/runs/lm-large\\?",
        empty: "has no step: it is an empty directory",
    }.items():
        for call in (
            raystate.load,
            raystate.metadata,
            lambda url: raystate.Reader(url).restore(),
            lambda url: raystate.load(url, step=3),
        ):
            with pytest.raises(StepNotFoundError, match=said):
                call(path)
    with pytest.raises(ConfigError, match=r"notes.txt is a file, and none that flax wrote; expected the directory of a run"):
        raystate.Reader(file)
    for below in (file / "lm", file / "runs" / "lm"):
        for call in (raystate.Reader, raystate.load, raystate.metadata):
            with pytest.raises(
                ConfigError, match=f"^storage: file://{below} can be no folder: {file} is a file, and nothing lies below it$"
            ):
                call(below)
        assert why_empty(open_storage(below)) == f"there is nothing at that path: {file} is a file, and nothing lies below it"
        with pytest.raises(StorageError, match=f"ENOTDIR: {file} is a file, and nothing lies below it"):
            raystate.save(below, {"w": np.ones(2)})
    os.mkfifo(tmp_path / "pipe_6")
    for path in (tmp_path / "pipe_6", "/dev/null"):
        with pytest.raises(ConfigError, match=r"is neither a directory nor the file of a checkpoint; expected the directory"):
            raystate.Reader(path)
        assert why_empty(open_storage(path)) == "it is no directory"
