"""The `raystate` commands as a user types them."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raystate import __version__
from raystate.cli import gc
from raystate.cli import verify as verifying
from raystate.core.formats.errors import StorageError
from raystate.core.formats.log import claim_entry
from raystate.core.formats.messages import LiveStep
from raystate.inspection import verification
from raystate.inspection.verification import BadObject
from raystate.reader.saving import save
from raystate.storage import RunLog, StepFolder, Storage, open_storage
from tests.cli.conftest import Command
from tests.orbax.published import committed
from tests.processes import run_python
from tests.record.a_record import play
from tests.storage.backends import a_package


def test_as_a_program(tmp_path: Path) -> None:
    """The others call it in their own process."""
    done = run_python("-m", "raystate", "verify", tmp_path, code=2)
    assert done.stdout == ""
    assert done.stderr.startswith("raystate: ")
    assert "has no step" in done.stderr


def test_the_version(raystate: Command) -> None:
    assert raystate("--version") == (0, f"raystate {__version__}\n", "")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 7, with a package, and 9, without."""
    committed(tmp_path, 7)
    committed(tmp_path, 9, package=False)
    return tmp_path


def test_verify_says_what_is_fine_and_what_cannot_be_known(raystate: Command, run: Path) -> None:
    code, out, _ = raystate("verify", run)
    assert code == 0
    assert "ok   step 7: " in out and "against its package" in out
    assert "ok   step 9: " in out and "not checked its small files" in out
    assert out.splitlines()[-1] == f"2 steps of file://{run}: nothing bad"


def test_verify_lists_what_is_bad(raystate: Command, run: Path) -> None:
    data = next(path for path in (run / "7/state").rglob("d/*") if path.stat().st_size > 4000)
    whole = data.read_bytes()
    data.write_bytes(whole[:2000] + bytes([whole[2000] ^ 1]) + whole[2001:])
    (run / "7/state/_sharding").unlink()
    (run / "7/data/process_0-of-2.json").write_bytes(b'{"next": 40}')
    code, out, _ = raystate("verify", run, 7)
    assert code == 1
    assert f"{data.relative_to(run)} has crc32c" in out
    assert "7/state/_sharding is missing" in out
    assert "7/data/process_0-of-2.json has 12 bytes instead of 11" in out
    assert "3 bad objects" in out
    code, out, _ = raystate("verify", run, "--json")
    found: dict[str, Any] = json.loads(out)
    assert (code, found["bad"]) == (1, 3)
    assert {one["step"]: len(one["bad"]) for one in found["steps"]} == {7: 3, 9: 0}


@pytest.mark.parametrize("when", ["before its turn", "while it is read"])
def test_verify_beside_retention(raystate: Command, run: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """What retention takes meanwhile is no damage."""
    real = verifying.verify_step

    def verify_step(storage: Any, step: int, **options: Any) -> Any:
        if step == 7 and when == "while it is read":
            report = real(storage, step, **options)
            shutil.rmtree(run / "7")
            return dataclasses.replace(report, bad=(BadObject(name="7/state", problem="is missing"),))
        shutil.rmtree(run / "7", ignore_errors=True)
        return real(storage, step, **options)

    monkeypatch.setattr(verifying, "verify_step", verify_step)
    code, out, _ = raystate("verify", run)
    assert code == 0 and "step 7" not in out
    assert out.splitlines()[-2:] == ["retired meanwhile: 1 step", f"1 step of file://{run}: nothing bad"]


@pytest.mark.parametrize("removed", [True, False])
def test_verify_of_one_checkpoint_beside_its_writer(
    raystate: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    """It was named: nothing that is not verified is fine."""
    save(tmp_path / "one", {"w": np.arange(1000.0)})
    real, times = verification.boxes_of, []

    def boxes_of(array: Any) -> Any:
        if not times:
            times.append(1)
            if removed:
                shutil.rmtree(tmp_path / "one")
            else:
                save(tmp_path / "one", {"w": np.arange(2000.0)}, overwrite=True)
        return real(array)

    monkeypatch.setattr(verification, "boxes_of", boxes_of)
    code, out, err = raystate("verify", tmp_path / "one")
    if removed:
        assert code != 0 and "was retired while it was read" in err
    else:
        assert code == 0 and "15.6 KiB" in out and out.endswith("nothing bad\n")


def test_verify_of_a_run_that_has_lost_all_steps(raystate: Command, tmp_path: Path) -> None:
    """A monitor looks for 1, not for 2, which is bad usage."""
    RunLog(open_storage(tmp_path)).claim(lambda tail: claim_entry(tail, "writer", "lm", (10, 20)))
    code, out, _ = raystate("verify", tmp_path, "--json")
    assert code == 1 and json.loads(out)["bad"] >= 2
    assert raystate("verify", tmp_path, "10")[0] == 2


def test_names_with_brackets_are_no_markup(raystate: Command, tmp_path: Path) -> None:
    root = tmp_path / "[old]"
    save(root / "[/b]1", {"[/b]": np.arange(3.0)})
    assert f"{root}/[/b]1" in raystate("verify", root / "[/b]1")[1].replace("\n", "")
    RunLog(open_storage(root / "run")).claim(lambda tail: claim_entry(tail, "writer", "lm"))
    code, out, _ = raystate("gc", root / "run")
    assert code == 0 and f"{root}/run" in out.replace("\n", "")


def test_gc_says_what_it_has_done_when_it_has_done_it(raystate: Command, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_args: Any, **_options: Any) -> None:
        raise StorageError("read-only")

    monkeypatch.setattr(gc, "remove_garbage", fails)
    code, out, error = raystate("gc", run, "--json")
    assert (code, out) == (1, "") and "read-only" in error


def test_verify_beside_a_commit(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log's newest entry was read before a step that it does not know became visible."""
    storage, steps = open_storage(run), []
    log = RunLog(storage)
    claimed = log.claim(lambda tail: claim_entry(tail, "writer", "lm"))

    def visible(storage: Storage) -> list[int]:
        if not steps:
            live = (LiveStep(step=7, save="a1k7", metrics={}, time_s=2.0, lineage="1.1"),)
            assert log.append(dataclasses.replace(claimed, seq=claimed.seq + 1, kind="commit", live=live)).outcome == "ok"
            steps.append(7)
        return [*steps]

    monkeypatch.setattr(verification, "visible_steps", visible)
    assert verification.verify_log(storage) == () and steps == [7]


def test_gc_lists_and_removes_what_a_crashed_attempt_left(raystate: Command, tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    for writer in ("one", "two"):
        if writer == "two":
            package, data = a_package(5, "a1k1")
            for name, part in data.items():
                storage.create(f"{StepFolder(storage, 5, 'a1k1').write_prefix}/{name}", part)
            StepFolder(storage, 5, "a1k1").put_package(package)
        RunLog(storage).claim(lambda tail, writer=writer: claim_entry(tail, writer, "lm"))
    code, out, _ = raystate("gc", tmp_path, "--dry-run")
    assert code == 0
    assert ".raystate/work/5.a1k1/  (an unfinished save of step 5 by attempt 1)" in out
    assert "2 things, " in out and "would be removed" in out
    assert storage.list(".raystate/work")
    code, out, _ = raystate("gc", tmp_path, "--json")
    assert (code, len(json.loads(out)["garbage"])) == (0, 2)
    assert storage.list(".raystate/work") == storage.list(".raystate/steps") == []
    code, out, _ = raystate("gc", tmp_path)
    assert (code, out) == (0, f"nothing to remove in file://{tmp_path}\n")


@pytest.fixture
def ray_tmp(tmp_path: Path) -> Path:
    """Where a Ray session has the record of run "lm", which saved steps 10 to 30, among its logs."""
    play(tmp_path / "run", tmp_path / "ray/session_latest/logs/raystate/lm-0123")
    return tmp_path


def test_story_tells_a_step_from_the_logs_of_ray(raystate: Command, ray_tmp: Path) -> None:
    code, out, _ = raystate("story", ray_tmp / "run", 20, RAY_TMPDIR=str(ray_tmp), TZ="UTC")
    assert code == 0
    first, *lines, last = [line for line in out.splitlines() if line]
    assert first.startswith("Step 20 of run lm  2025-06-15, from ") and first.endswith("raystate/lm-0123")
    assert lines[0] == "attempt 1"
    begun = lines.index("             →  write save a1k2: hosts firsthost0, firsthost1, firsthost2")
    assert lines[begun + 1] == "                because: save a1k2 of step 20 (due, try 1) on 3 hosts"
    refused = next(line for line in lines if "could not write save a1k2" in line)
    assert refused.startswith("  15:06:4") and refused.endswith("StorageError: 503: try again")
    assert "             →  step 20 is durable" in lines
    assert "attempt 2" in lines
    assert last.startswith("In short  staged 15:06:4") and "durable +2." in last


def test_story_without_a_step_is_of_the_newest(raystate: Command, ray_tmp: Path) -> None:
    code, out, _ = raystate("story", ray_tmp / "run", RAY_TMPDIR=str(ray_tmp))
    assert code == 0 and out.startswith("Step 30 of run lm")


def test_story_as_json(raystate: Command, ray_tmp: Path) -> None:
    code, out, _ = raystate(
        "story", ray_tmp / "run", 30, "--record", ray_tmp / "ray/session_latest/logs/raystate/lm-0123", "--json"
    )
    told: dict[str, Any] = json.loads(out)
    assert (code, told["step"], told["run"]) == (0, 30, "lm")
    assert {moment["attempt"] for moment in told["moments"]} == {1, 2}
    assert all({"text", "reason", "level"} == decision.keys() for moment in told["moments"] for decision in moment["decisions"])


def test_story_of_what_it_does_not_know(raystate: Command, ray_tmp: Path) -> None:
    logs, run = ray_tmp / "ray/session_latest/logs/raystate", ray_tmp / "run"
    code, _, complaint = raystate("story", run, 77, "--record", logs)
    assert code == 2
    assert complaint.strip() == f"raystate: {logs / 'lm-0123'} tells nothing of step 77; it knows 3 steps from 10 to 30"
    for asked in ((ray_tmp / "another",), (run, "--run", "nobodys-run")):
        code, _, complaint = raystate("story", *asked[:1], 10, *asked[1:], RAY_TMPDIR=str(ray_tmp), TZ="UTC")
        assert code == 2
        assert "there is no record of " in complaint and str(asked[-1]) in complaint
        assert f"\n  file://{run}, run 'lm', until 2025-06-15 15:0" in complaint
    (logs / "mt-4567").mkdir()
    for path in (logs / "lm-0123").iterdir():
        (logs / "mt-4567" / path.name).write_bytes(path.read_bytes().replace(b'"run": "lm"', b'"run": "mt"'))
    code, _, complaint = raystate("story", run, 10, "--record", logs)
    assert code == 2
    assert f"there are several records of file://{run}; name one by --run or --record" in complaint
    assert "run 'mt', until " in complaint and str(logs / "mt-4567") in complaint
    code, out, _ = raystate("story", run, 10, "--record", logs, "--run", "mt")
    assert code == 0
    assert out.startswith("Step 10 of run mt")


def test_story_from_the_logs_of_a_ray_that_has_its_own_folder(raystate: Command, ray_tmp: Path, tmp_path: Path) -> None:
    """`ray start --temp-dir`: nothing but the command line of its processes says where."""
    command = ["/opt/ray/raylet", "-c", "read _", f"--log_dir={ray_tmp / 'ray/session_latest/logs'}"]
    with subprocess.Popen(command, executable="/bin/sh", stdin=subprocess.PIPE) as raylet:
        code, out, _ = raystate("story", ray_tmp / "run", 20, RAY_TMPDIR=str(tmp_path / "nothing"))
        raylet.communicate()
    assert code == 0
    assert out.startswith("Step 20 of run lm")


def test_story_beside_a_record_of_another_version(raystate: Command, ray_tmp: Path) -> None:
    """The story of a run ended with an error, because of another run's record on the same node."""
    logs = ray_tmp / "ray/session_latest/logs/raystate"
    (logs / "of-others").mkdir()
    for path in (logs / "lm-0123").iterdir():
        (logs / "of-others" / path.name).write_bytes(path.read_bytes().replace(b'"format": ', b'"format": 9'))
    code, out, _ = raystate("story", ray_tmp / "run", 20, RAY_TMPDIR=str(ray_tmp))
    assert (code, out.splitlines()[0].split("  ")[0]) == (0, "Step 20 of run lm")


def test_story_of_a_damaged_record(raystate: Command, ray_tmp: Path) -> None:
    folder = ray_tmp / "ray/session_latest/logs/raystate/lm-0123"
    (folder / "000001-000000.jsonl").write_text("what is this?\n")
    code, _, complaint = raystate("story", ray_tmp / "run", 10, "--record", folder)
    assert code == 1
    assert "000001-000000.jsonl is not the record of a run" in complaint


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["verify"], "Missing argument"),
        (["verify", "gs://"], "storage: 'gs://' is not usable"),
        (["verify", "hdfs://host/x"], "unsupported scheme hdfs://"),
        (["verify", "EMPTY"], "has no step"),
        (["verify", "EMPTY", "twelve"], "STEP: expected a step's number or 'latest', not 'twelve'"),
        (["inspect", "EMPTY", "twelve"], "STEP: expected a step's number or 'latest', not 'twelve'"),
        (["gc", "EMPTY"], "is no run: it is an empty directory"),
        (["gc", "FILE"], "is no run"),
        (["story"], "Missing argument"),
        (["story", "EMPTY", "ten"], "Invalid value"),
        (["status", "--watch", "--every", "inf"], "Invalid value"),
        (["story", "EMPTY", "10", "--record", "EMPTY"], "give the run's record_dir"),
        (["story", "EMPTY", "10", "--record", "EMPTY/nowhere"], "nowhere, which does not exist"),
        (["polish"], "No such command"),
    ],
)
def test_bad_usage(raystate: Command, tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    there = {"EMPTY": str(tmp_path / "empty"), "FILE": str(tmp_path / "file")}
    code, _, complaint = raystate(
        *(functools.reduce(lambda text, name: text.replace(name, there[name]), there, one) for one in arguments)
    )
    assert code == 2
    assert said in complaint


def test_what_is_no_run_is_not_looked_after(raystate: Command, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    code, _, complaint = raystate("gc", str(tmp_path))
    assert code == 2
    assert "there is no .raystate/ in it, which every run has" in complaint
    code, _, complaint = raystate("ls", str(tmp_path))
    assert code == 2
    assert "expected folders of steps, such as 1200/, with a checkpoint in each; there is 'notes.txt'" in complaint


def test_an_attempt_that_never_was_is_not_taken_for_dead(raystate: Command, run: Path) -> None:
    code, _, complaint = raystate("gc", str(run), "--assume-dead", "3")
    assert code == 2
    assert "attempt 3 of" in complaint


def test_latest_is_a_step(raystate: Command, run: Path) -> None:
    for command in ("inspect", "verify"):
        assert raystate(command, str(run), "latest")[0] == 0
