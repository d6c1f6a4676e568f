"""`raystate ls`, `inspect` and `diff` as a user types them, in this process: on directories, a bucket, large trees and damage."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import typer.main

from raystate.cli import app
from raystate.cli.console import size
from raystate.core.formats.errors import CorruptCheckpointError
from raystate.core.formats.log import claim_entry
from raystate.core.formats.messages import Intent, LiveStep
from raystate.inspection import Checkpoints, differences
from raystate.inspection.differences import compare
from raystate.orbax.step_reader import StepReader
from raystate.reader import load, save
from raystate.storage import LogReader, RunLog, open_storage
from tests.cli.conftest import Command
from tests.orbax import from_state
from tests.patience import PATIENCE_S
from tests.storage.backends import gcs_backend


def state(step: int) -> dict[str, Any]:
    kernel = np.arange(12, dtype=np.float32).reshape(3, 4)
    moved = kernel.copy()
    if step == 20:
        moved[1, 2] += 0.5  # 6 -> 6.5
        moved[2, 3] = 0.0  # 11 -> 0
    return {
        "params": {"dense": {"kernel": moved, "bias": np.zeros(4, ml_dtypes.bfloat16)}, "same": np.ones(5)},
        "table": np.random.default_rng(0).standard_normal((16, 32)),  # too large for the nodes of the database
        "layers": [{"w": np.full((2, 2), index)} for index in range(2)],
        "step": step,
        "name": "größer",
    }


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 10 and 20 of a run."""
    root = tmp_path_factory.mktemp("looking") / "run"
    for step in (10, 20):
        items = {"json_items": {"vocabulary": {"size": step}}, "iterators": {"data": {0: b'{"next": %d}' % step}}}
        trees = {"state": state(step), "ema": {"w": np.full(3, 7, np.int64)}}
        from_state.publish(root, trees, step=step, metrics={"loss": 1 / step}, custom={"commit": "abc"}, **items)
    return root


@pytest.fixture
def damaged(written: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    shutil.copytree(written, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("large") / "run"
    layers = {f"layer_{i:03d}": {part: {"kernel": np.full(i % 7 + 1, i)} for part in ("attention", "mlp")} for i in range(60)}
    from_state.publish(root, {"state": {"params": {"decoder": layers}, "count": np.int64(3)}}, step=1)
    return root


def fits(out: str) -> bool:
    return all(len(line) <= 80 for line in out.splitlines())


# ---------------------------------------------------------------- ls


def test_ls_shows_each_step(raystate: Command, written: Path):
    code, out, _ = raystate("ls", written)
    assert code == 0
    header, *rows, last = out.splitlines()
    assert header.split() == ["step", "saved", "size", "holds"]
    assert [row.split()[0] for row in rows] == ["10", "20"]
    assert all("data, ema, state, vocabulary  loss 0." in row and "KiB" in row and fits(row) for row in rows)
    assert last == f"2 steps of file://{written}"
    code, out, _ = raystate("ls", written, "--json", "--sort", "loss")
    found = json.loads(out)
    assert [one["step"] for one in found["steps"]] == [10, 20], "the smallest loss last"
    on_disk = sum(path.stat().st_size for path in (written / "20").rglob("*") if path.is_file())
    assert (found["count"], found["steps"][1]["nbytes"], found["steps"][1]["save"]) == (2, on_disk, "a1k1")
    assert found["steps"][0]["items"] == {"data": "iterator", "ema": "arrays", "state": "arrays", "vocabulary": "json"}


def test_ls_shows_the_newest_of_many(raystate: Command, written: Path):
    code, out, _ = raystate("ls", written, "--last", 1)
    assert code == 0
    assert out.splitlines()[1].startswith("  20  ") and "the last 1 of 2 steps" in out and "--all" in out
    assert len(raystate("ls", written, "-n", 1, "--all")[1].splitlines()) == 4


def test_ls_beside_retention(raystate: Command, damaged: Path, monkeypatch: pytest.MonkeyPatch):
    """A step that goes while it is looked at is left out; the command failed."""
    real = StepReader.metrics

    def metrics(self: StepReader) -> Any:
        with contextlib.suppress(FileNotFoundError):  # at once, as raystate does it
            (damaged / "10").rename(damaged.parent / "gone")
        return real(self)

    monkeypatch.setattr(StepReader, "metrics", metrics)
    code, out, _ = raystate("ls", damaged)
    assert code == 0 and out.splitlines()[-1].startswith("1 step of")


def test_ls_sorts_nan_with_the_worst(raystate: Command, tmp_path: Path):
    for step, loss in enumerate([3.0, math.nan, 1.0, 2.0]):
        from_state.publish(tmp_path, {"state": {"w": np.ones(1)}}, step=step, metrics={"loss": loss})
    _, out, _ = raystate("ls", tmp_path, "--sort", "loss", "--json")
    assert [one["step"] for one in json.loads(out)["steps"]] == [1, 0, 3, 2]


def test_ls_of_damaged_and_unfinished_steps(raystate: Command, damaged: Path):
    (damaged / "10/_CHECKPOINT_METADATA").write_bytes(b"{")
    (damaged / "30").mkdir()
    code, out, _ = raystate("ls", damaged)
    assert code == 1
    assert "DAMAGED: _CHECKPOINT_METADATA of step 10 is not JSON" in out.splitlines()[1]
    assert out.splitlines()[2].split()[0] == "20"
    assert "not complete 30/: unfinished saves, or copies that have lost their markers" in out


def test_ls_of_a_folder_of_runs_lists_them(raystate: Command, written: Path, tmp_path: Path):
    """It said that there was no step, and named the folders."""
    assert raystate("ls", tmp_path)[0] == 2
    for name, step in (("lr-0.003", 10), ("lr-0.01", None)):
        RunLog(open_storage(tmp_path / name)).claim(lambda tail, name=name: claim_entry(tail, "writer", name))
        if step is not None:
            shutil.copytree(written / str(step), tmp_path / name / str(step))
    (tmp_path / "notes").mkdir()
    code, out, _ = raystate("ls", tmp_path)
    header, first, second, last = out.splitlines()
    assert (code, header.split()) == (0, ["run", "steps", "newest", "saved", "holds"])
    assert first.split()[:3] == ["lr-0.003", "1", "10"] and first.endswith("data, ema, state, vocabulary  loss 0.1")
    assert second.split() == ["lr-0.01", "0", "-", "-"] and last == f"2 runs in file://{tmp_path}"
    found = json.loads(raystate("ls", tmp_path, "--json")[1])
    assert [(one["name"], one["steps"], one["newest"] and one["newest"]["step"]) for one in found["runs"]] == [
        ("lr-0.003", 1, 10), ("lr-0.01", 0, None),
    ]  # fmt: skip
    for command in ("inspect", "verify"):
        code, _, complaint = raystate(command, tmp_path)
        assert code == 2 and f"it holds 2 runs, which raystate ls lists; the first is file://{tmp_path}/lr-0.003" in complaint


# ---------------------------------------------------------------- inspect


def test_inspect_shows_a_step(raystate: Command, written: Path):
    code, out, _ = raystate("inspect", written)
    assert code == 0 and fits(out)
    lines = out.splitlines()
    assert lines[0] == f"step 20  file://{written}/20"
    assert lines[1].startswith("saved   20") and "no run: saved alone, by Orbax or a copy" in lines[1]
    assert {"writers a1k1h0", "metrics loss 0.05", 'custom  {"commit": "abc"}', "item    vocabulary: JSON"} <= set(lines)
    assert lines[1].count(" in ") == 0, "how long it took is not known"
    nbytes = sum(path.stat().st_size for path in (written / "20/state").rglob("*") if path.is_file())
    assert f"item    state: 6 arrays, 4.2 KiB, {size(nbytes)} in storage, 2 other values" in lines
    rows = [line.split() for line in lines[lines.index("state") + 1 :]]
    assert ["48", "B", "float32[3,4]", "params.dense.kernel"] in rows
    assert ["8", "B", "bfloat16[4]", "params.dense.bias"] in rows
    assert ["32", "B", "int64[2,2]", "layers.0.w"] in rows
    assert ["20", "step"] in rows and ['"größer"', "name"] in rows


def test_inspect_chooses(raystate: Command, written: Path):
    def names(*arguments: object) -> list[str]:
        code, out, _ = raystate("inspect", written, 10, *arguments, "--json")
        assert code == 0
        return [f"{one['item']}:{one['name']}" for one in json.loads(out)["arrays"]]

    dense = ["state:params.dense.bias", "state:params.dense.kernel"]
    assert names("--filter", "params.dense") == names("-f", "params/dense") == names("-f", "*.dense.*") == dense
    assert names("--filter", "params.den") == [], "a prefix ends with a key"
    assert names("-f", "layers.*") == ["state:layers.0.w", "state:layers.1.w"]
    assert names("--item", "ema") == ["ema:w"]
    _, out, _ = raystate("inspect", written, 10, "-f", "params", "--sort", "size")
    assert [line.split()[-1] for line in out.splitlines() if "[" in line] == [
        "params.dense.kernel",
        "params.same",
        "params.dense.bias",
    ]
    assert raystate("inspect", written, 10, "-f", "kernel")[0] == 2
    (table,) = json.loads(raystate("inspect", written, 10, "-f", "table", "--json")[1])["arrays"]
    assert (table["chunk"], table["writers"]) == ([16, 32], ["a1k1h0"]) and table["stored_nbytes"]


def test_a_large_tree_does_not_scroll_by(raystate: Command, large: Path):
    code, out, _ = raystate("inspect", large)
    assert code == 0 and len(out.splitlines()) < 30 and fits(out)
    assert "… and 101 more: --all" in out
    _, out, _ = raystate("inspect", large, "--sort", "size", "-f", "*.kernel")
    assert len(out.splitlines()) < 30 and "… and 100 more: --all" in out and fits(out)
    assert len(raystate("inspect", large, "--all")[1].splitlines()) > 120


def test_inspect_of_damaged_steps(raystate: Command, damaged: Path):
    (damaged / "20/ema/_METADATA").write_bytes(b"[]")
    code, _, complaint = raystate("inspect", damaged)
    assert code == 1 and "ema/_METADATA of step 20 is not a JSON object" in complaint
    manifest = damaged / "10/state/manifest.ocdbt"
    manifest.write_bytes(manifest.read_bytes()[:-3])
    code, _, complaint = raystate("inspect", damaged, 10)
    assert code == 1 and "step 10" in complaint and "state" in complaint


@pytest.mark.parametrize("command", [("ls",), ("inspect",), ("inspect", "--json"), ("verify",), ("diff",)])
def test_a_path_that_is_no_checkpoint(raystate: Command, written: Path, tmp_path: Path, command: tuple[str, ...]):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/list.txt").write_text("x")
    more = (1, 2) if command == ("diff",) else ()
    for path, said in {
        tmp_path / "nots": f"file://{tmp_path}/nots has no step: there is nothing at that path",
        tmp_path / "notes/list.txt/lm": f"can be no folder: {tmp_path}/notes/list.txt is a file, and nothing lies below it",
        tmp_path / "notes": f"file://{tmp_path}/notes has no step",
        tmp_path / "notes/list.txt": "is a file",
    }.items():
        code, out, complaint = raystate(command[0], path, *more, *command[1:])
        assert (code, out) == (2, "") and said in (complaint := " ".join(complaint.split())), path
        assert "did you mean" not in complaint, "nobody means a folder that is no run"
    shutil.copytree(written, tmp_path / "runs")
    _, _, complaint = raystate(command[0], tmp_path / "run", *more, *command[1:])
    assert f"there is nothing at that path; did you mean file://{tmp_path}/runs?" in " ".join(complaint.split())


def test_verify_of_steps_under_other_names_and_of_one_folder(raystate: Command, written: Path, tmp_path: Path):
    for step in (10, 20):
        shutil.copytree(written / str(step), tmp_path / f"runs/step_{step}")
    code, out, _ = raystate("verify", tmp_path / "runs")
    assert code == 0 and "ok   step 10: 7 arrays" in out and out.splitlines()[-1].startswith("2 steps of ")
    assert raystate("verify", tmp_path / "runs", 20)[0] == raystate("verify", tmp_path / "runs/step_20")[0] == 0
    shutil.rmtree(tmp_path / "runs/step_20/state/ocdbt.process_a1k1h0")
    for where in (tmp_path / "runs/step_20", tmp_path / "runs"):
        code, out, _ = raystate("verify", where)
        assert code == 1 and "BAD  step 20" in out and "state: table" in out


def test_gc_of_a_path_with_nothing_at_it(raystate: Command, written: Path, tmp_path: Path):
    shutil.copytree(written, tmp_path / "lm")
    code, _, complaint = raystate("gc", tmp_path / "ln")
    assert code == 2 and f"there is nothing at that path; did you mean file://{tmp_path}/lm?" in complaint
    assert not (tmp_path / "ln").exists()


# ---------------------------------------------------------------- diff


def test_diff_says_what_changed_and_by_how_much(raystate: Command, written: Path):
    code, out, _ = raystate("diff", written, 10, 20)
    assert code == 1 and fits(out.replace(str(written), ""))
    lines = out.splitlines()
    assert "        1         11  params.dense.kernel" in lines
    assert {"step: 10 became 20", 'vocabulary: {"size": 10} became {"size": 20}', "metrics:loss: 0.1 became 0.05"} <= set(lines)
    assert lines[-1] == "1 of 7 arrays and 4 of 6 other values differ"
    assert not any(before == after == "" for before, after in itertools.pairwise(lines))
    code, out, _ = raystate("diff", written, 10, "--json", "-f", "params")
    found = json.loads(out)
    assert (code, found["b"]["step"], found["equal_arrays"]) == (1, 20, 2), "B is the newest"
    (one,) = found["arrays"]
    assert (one["name"], one["status"], one["max_abs"], one["max_rel"]) == ("params.dense.kernel", "values", 11, 1)


def test_diff_of_what_is_equal(raystate: Command, written: Path, damaged: Path):
    code, out, _ = raystate("diff", written, 20, 20, "--other", damaged)
    assert (code, out.splitlines()[-1]) == (0, "equal, bit for bit: 7 arrays and 6 other values")
    assert raystate("diff", written, 10, 20, "-f", "layers")[0] == 0
    code, _, complaint = raystate("diff", written, 10, 20, "-f", "nothing")
    assert code == 2 and "nothing to compare" in complaint
    for arguments, said in {
        (10, "newest"): "expected a step's number or 'latest'",
        (10, 30): "has no step 30; it has [10, 20]",
    }.items():
        code, _, complaint = raystate("diff", written, *arguments)
        assert code == 2 and said in complaint


def test_diff_goes_on_where_an_array_is_damaged(raystate: Command, damaged: Path):
    for data in (damaged / "10/state").rglob("d/*"):
        whole = data.read_bytes()
        data.write_bytes(bytes(255 - byte for byte in whole))
    code, out, complaint = raystate("diff", damaged, 10, 20)
    assert code == 1 and ("unreadable" in out or "step 10" in complaint)
    assert "tensorstore_spec" not in out + complaint


def test_damage_names_the_other_steps(raystate: Command, damaged: Path):
    (damaged / "20/ema/_METADATA").write_bytes(b"[]")
    assert raystate("inspect", damaged)[2].endswith(f"; file://{damaged} also has step 10; raystate verify tells what is whole\n")
    with pytest.raises(CorruptCheckpointError, match="also has step 10") as caught:
        load(damaged)
    assert caught.value.other_steps == (10,)
    for steps in ((10, 20), (20, 10)):
        complaint = raystate("diff", damaged, *steps)[2]
        assert "of step 20" in complaint and "also has" not in complaint, "whose others would it be?"


def test_ls_of_a_run_whose_steps_are_lost(raystate: Command, tmp_path: Path):
    RunLog(open_storage(tmp_path)).claim(lambda tail: claim_entry(tail, "writer", "lm", (10, 20)))
    told = "has no step, but the log of run 'lm' has [10, 20]: their folders or markers are lost"
    assert raystate("ls", tmp_path) == (2, "", f"raystate: file://{tmp_path} {told}\n")
    for entry in (tmp_path / ".raystate/log").iterdir():
        entry.write_text("{")
    code, _, complaint = raystate("inspect", tmp_path)
    assert code == 2 and "has no step: " in complaint


def test_ls_as_the_first_step_comes(raystate: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It is committed and not yet published; and published just after the steps were listed."""
    log = RunLog(open_storage(tmp_path))
    claimed = log.claim(lambda tail: claim_entry(tail, "writer", "lm"))
    intent = Intent(kind="commit", step=10, save="a1k1", attempt=1, seq=2)
    live = (LiveStep(step=10, save="a1k1"),)
    assert log.append(dataclasses.replace(claimed, seq=2, kind="commit", live=live, intents=(intent,))).outcome == "ok"
    assert raystate("ls", tmp_path) == (2, "", f"raystate: file://{tmp_path} has no step: none of run 'lm' is durable yet\n")

    assert log.append(dataclasses.replace(claimed, seq=3, kind="close", live=live)).outcome == "ok"
    real = LogReader.tail

    def tail(self: LogReader) -> Any:
        from_state.publish(tmp_path, {"state": {"w": np.ones(1)}}, step=10)
        return real(self)

    monkeypatch.setattr(LogReader, "tail", tail)
    told = "had no step a moment ago: the first one of run 'lm' has come since, look again"
    assert raystate("ls", tmp_path) == (2, "", f"raystate: file://{tmp_path} {told}\n")


def test_a_filter_that_nothing_matches(raystate: Command, written: Path):
    all_of_them = "their paths begin with layers, params, table, w"
    for options, said in {
        ("-f", "parms.*"): "did you mean 'params'?",
        ("-f", "optimizer"): all_of_them,
        ("-f", "params.dense.kernl"): "did you mean 'params.dense.kernel'?",
        ("--item", "ema", "-f", "params.*"): "their paths begin with w",
    }.items():
        code, out, complaint = raystate("inspect", written, *options)
        assert (code, out) == (2, "") and complaint.rstrip().endswith(said), complaint


def test_diff_of_values_that_only_one_step_has(raystate: Command, damaged: Path):
    (damaged / "10/vocabulary/metadata").write_text(json.dumps("\x1b[2J\n"))
    (damaged / "20/vocabulary/metadata").write_text("null")
    out = raystate("diff", damaged, 10, "--item", "vocabulary")[1]
    assert out.splitlines()[-3:] == [r'vocabulary: "\u001b[2J\n" became null', "", "0 of 0 arrays and 1 of 1 other value differ"]


def test_diff_measures_every_kind_of_array(tmp_path: Path):
    nan, inf = math.nan, math.inf
    a: dict[str, Any] = {
        "nan": np.array([1, nan, nan, inf], np.float32),
        "zero": np.array([0.0, 1.0]),
        "huge": np.array([2**63 - 1, -(2**63)], np.int64),
        "unsigned": np.array([0, 2**64 - 1], np.uint64),
        "mask": np.array([True, False]),
        "wave": np.array([3 + 4j, 0], np.complex64),
        "tiny": np.array([1, -2, 3], ml_dtypes.int4),
        "half": np.array([1, 2], ml_dtypes.bfloat16),
        "cast": np.array([1, 2, nan], np.float32),
        "shape": np.zeros(3),
        "gone": np.zeros(3),
        "empty": np.zeros((0, 3)),
        "scalar": np.float32(2),
        "order": np.arange(6.0).reshape(2, 3),
    }
    b = {
        **a,
        "nan": np.array([1, nan, 2, inf], np.float32),
        "zero": np.array([-0.0, 1.0]),
        "huge": np.array([2**63 - 2, 2**63 - 1], np.int64),
        "unsigned": np.array([2**64 - 1, 2**64 - 1], np.uint64),
        "mask": np.array([True, True]),
        "wave": np.array([0, 0], np.complex64),
        "tiny": np.array([1, -2, -3], ml_dtypes.int4),
        "half": np.array([1, 2.5], ml_dtypes.bfloat16),
        "cast": np.array([1, 2.5, nan], np.float64),
        "shape": np.zeros(4),
        "new": np.zeros(1),
        "scalar": np.float32(4),
        "order": np.arange(6.0).reshape(2, 3) * 2,
    }
    del b["gone"]
    for step, tree in ((1, a), (2, b)):
        from_state.publish(tmp_path, {"state": tree}, step=step)
    steps = Checkpoints(tmp_path)
    found = {one.name: one for one in compare(steps.open(1), steps.open(2)).arrays}
    seen = {name: (one.status, one.max_abs, one.max_rel) for name, one in found.items()}
    assert seen == {
        "nan": ("values", inf, inf),
        "zero": ("values", 0.0, 0.0),
        "huge": ("values", float(2**64 - 1), 2.0),
        "unsigned": ("values", float(2**64 - 1), 1.0),
        "mask": ("values", 1.0, 1.0),
        "wave": ("values", 5.0, 1.0),
        "tiny": ("values", 6.0, 2.0),
        "half": ("values", 0.5, 0.2),
        "cast": ("dtype", 0.5, 0.2),
        "shape": ("shape", 0.0, 0.0),
        "gone": ("only in A", 0.0, 0.0),
        "empty": ("equal", 0.0, 0.0),
        "scalar": ("values", 2.0, 0.5),
        "order": ("values", 5.0, 0.5),
        "new": ("only in B", 0.0, 0.0),
    }


def test_diff_reads_in_boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """At most so many bytes of an array are asked for at a time."""
    monkeypatch.setattr(differences, "_BOX_BYTES", most := 1 << 13)
    trees = [{"small": [np.full(1000, index) for index in range(20)], "zeros": np.zeros((9, 3))} for _ in range(2)]
    for step, tree in enumerate(trees):
        from_state.publish(tmp_path, {"state": tree}, step=step)
    asked: list[int] = []
    read = StepReader.read

    def counted(reader: StepReader, item: str, requests: Any) -> list[np.ndarray]:
        asked.append(sum(math.prod(shape) * 8 for _, _, shape in requests))
        return read(reader, item, requests)

    monkeypatch.setattr(StepReader, "read", counted)
    steps = Checkpoints(tmp_path)
    assert not compare(steps.open(0), steps.open(1)).differs
    assert sum(asked) == 2 * (20 * 1000 + 27) * 8 and max(asked) <= most and len(asked) >= 6


# ---------------------------------------------------------------- a bucket, completion, examples


def test_a_run_in_a_bucket_is_looked_after(raystate: Command, written: Path, tmp_path: Path):
    """By each command: `import`, `ls`, `inspect`, `verify`, `diff`, `export` and `gc`."""
    with gcs_backend(tmp_path) as bucket:
        code, out, _ = raystate("import", written, bucket.url)
        assert code == 0 and out.startswith(f"steps 10, 20 in {bucket.url}: 14 arrays") and out.endswith("verified\n")
        code, out, _ = raystate("ls", bucket.url)
        assert code == 0 and out.splitlines()[1].split()[0] == "10" and f"2 steps of {bucket.url}" in out
        code, out, _ = raystate("inspect", bucket.url, "-f", "layers.1.w")
        assert code == 0 and "int64[2,2]" in out
        code, out, _ = raystate("verify", bucket.url)
        assert code == 0 and out.splitlines()[-1] == f"2 steps of {bucket.url}: nothing bad"
        assert raystate("diff", bucket.url, 20, 20, "--other", written)[0] == 0
        code, out, _ = raystate("export", bucket.url, "latest", tmp_path / "one.safetensors", "--match", "kernel")
        assert code == 0 and "step 20 as safetensors: 1 array" in out
        arrays = safetensors.numpy.load_file(tmp_path / "one.safetensors")
        np.testing.assert_array_equal(arrays["params.dense.kernel"], state(20)["params"]["dense"]["kernel"])
        name = next(info.name for info in bucket.list("10/state") if "/d/" in info.name)
        whole = bucket.read(name)
        assert bucket.delete(name)
        bucket.create(name, whole[:-1] + bytes([whole[-1] ^ 1]))
        code, out, _ = raystate("verify", bucket.url, "--json")
        found = json.loads(out)
        assert code == 1 and [one["step"] for one in found["steps"] if one["bad"]] == [10]
        left = "30/state/ocdbt.process_a1k9h0/d/0"
        bucket.create(left, b"of an unfinished save")
        RunLog(bucket).claim(lambda tail: claim_entry(tail, "another", "lm"))  # attempt 1 is over
        code, out, _ = raystate("gc", bucket.url, "--dry-run")
        assert code == 0 and "1 thing, 21 B" in out and bucket.exists(left), out
        assert raystate("gc", bucket.url)[0] == 0 and not bucket.exists(left)
        code, _, complaint = raystate("gc", f"{bucket.url[:-1]}m")
        assert code == 2 and f"did you mean {bucket.url}?" in complaint


def test_names_command_no_terminal(raystate: Command, tmp_path: Path):
    """Whoever wrote a checkpoint chose the names in it."""
    red = "\x1b[31mred\x9b0m\u202e\a"
    for step, value in ((1, 1.0), (2, 2.0)):
        save(tmp_path / "run" / f"step_{step}", {red: {red: np.full(2, value)}, "text": red}, custom=red, metrics={red: value})
    run = tmp_path / "run"
    for arguments in (
        ("ls", run),
        ("inspect", run),
        ("inspect", run, "-f", red),
        ("diff", run, 1, 2),
        ("verify", run),
        ("inspect", tmp_path / "\x9b31m"),
        ("inspect", run, "--json"),
    ):
        _, said, complained = raystate(*arguments)
        assert not set("\x1b\x9b\u202e\a") & set(said + complained), arguments
    shown = r"\x1b[31mred\x9b0m\u202e"
    assert f"{shown}.{shown}" in raystate("inspect", run)[1]


def test_shells_complete_the_commands(raystate: Command, monkeypatch: pytest.MonkeyPatch):
    for name, value in {"_RAYSTATE_COMPLETE": "complete_bash", "COMP_WORDS": "raystate in", "COMP_CWORD": "1"}.items():
        monkeypatch.setenv(name, value)
    assert raystate()[1].split() == ["inspect"]


def test_bash_completes_after_what_the_documents_say(tmp_path: Path):
    """`raystate --install-completion` in a real bash, a new one of which then completes options and choices."""
    environment = {**os.environ, "HOME": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def bash(script: str) -> list[str]:
        done = subprocess.run(
            ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=True
        )
        return done.stdout.splitlines()

    bash("raystate --install-completion; true")  # with a second command bash is the parent whose name tells the shell
    ask = "COMP_WORDS=({}); COMP_CWORD={}; _raystate_completion raystate; echo ${{COMPREPLY[*]}}"
    asked = [("raystate inspect --fi", 2), ("raystate inspect x --sort si", 4)]
    said = bash("\n".join(["source ~/.bashrc", *(ask.format(*one) for one in asked)]))
    assert said == ["--filter", "size"]


@pytest.mark.parametrize("command", sorted(typer.main.get_group(app).commands))
def test_help_teaches_by_examples(raystate: Command, command: str):
    code, out, _ = raystate(command, "--help")
    assert code == 0 and fits(out)
    assert out.count(f"raystate {command} ") >= 3, "the usage, and two examples"
