"""`raystate verify` and `raystate gc` as a user types them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raystate.core.log import claim_entry
from raystate.core.tree import Package
from raystate.storage import RunLog, StepFolder, open_storage
from tests.orbax.published import publish
from tests.storage.backends import a_package


def raystate(*arguments: object) -> tuple[int, str, str]:
    """(exit code, standard output, standard error)."""
    done = subprocess.run(
        [sys.executable, "-m", "raystate.cli", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 7, with a package, and 9, without."""
    for step in (7, 9):
        folder, files, objects = publish(tmp_path, step, f"a1k{step}")
        for path in [path for path in folder.rglob("*") if path.is_file() and "process_a6k9" in str(path)]:
            path.unlink()  # the stranger's
        if step == 7:
            package = Package(step=7, save="a1k7", run="lm", files=files, objects=tuple(objects))
            StepFolder(open_storage(tmp_path), 7, "a1k7").put_package(package)
    return tmp_path


def test_verify_says_what_is_fine_and_what_cannot_be_known(run: Path) -> None:
    code, out, _ = raystate("verify", run)
    assert code == 0
    assert "ok   step 7: " in out and "against its package" in out
    assert "ok   step 9: " in out and "not checked its small files" in out
    assert out.splitlines()[-1] == f"2 steps of file://{run}: nothing bad"


def test_verify_lists_what_is_bad(run: Path) -> None:
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


def test_verify_reads_a_step_without_a_package(run: Path) -> None:
    for data in (run / "9/state").rglob("d/*"):
        if data.stat().st_size > 4000:
            whole = data.read_bytes()
            data.write_bytes(whole[:2000] + bytes([whole[2000] ^ 1]) + whole[2001:])
    code, out, _ = raystate("verify", run, 9)
    assert code == 1
    assert "BAD  step 9" in out


def test_gc_lists_and_removes_what_a_crashed_attempt_left(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["verify"], "Missing argument"),
        (["verify", "gs://"], "storage: 'gs://' is not usable"),
        (["verify", "s3://bucket/x"], "unsupported scheme s3://"),
        (["verify", "EMPTY"], "has no step"),
        (["verify", "EMPTY", "twelve"], "Invalid value"),
        (["gc", "EMPTY", "--assume-dead", "3"], "attempt 3 of"),
        (["polish"], "No such command"),
    ],
)
def test_bad_usage(tmp_path: Path, arguments: list[str], said: str) -> None:
    code, _, complaint = raystate(*(str(tmp_path) if one == "EMPTY" else one for one in arguments))
    assert code == 2
    assert said in complaint
