"""A disk that is full, then read-only, then fine again: training goes on, the last step stays, saving goes on by itself."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import raystate
from raystate.actors.naming import run_actors
from raystate.inspection.verification import verify_log, verify_step
from raystate.storage import find_garbage, open_storage, run_hash
from tests.cluster.training import STEPS, Training, wait_for

EVERY = 5


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", path], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"it takes the right to mount a small file system: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@pytest.mark.long
def test_a_full_and_a_read_only_disk(ray_cluster: Any, make_run: Any, tmp_path: Path, disk: Path, undisturbed: list[str]) -> None:
    config = raystate.StateConfig(storage=str(disk / "run"), run=make_run().run, save_every_steps=EVERY, keep_last=2)
    reader = raystate.Reader(config.storage)
    training = Training(config, tmp_path / "out", steps=STEPS, step_s=0.3)

    def durable_after(step: int) -> int:
        wait_for(lambda: (reader.latest_step() or 0) > step, f"a durable step after {step}", failed=lambda: training.error)
        return reader.latest_step() or 0

    def goes_on_with(stood: int) -> None:
        training.wait_step(training.events.newest_step() + 3 * EVERY)
        newest = reader.latest_step() or 0
        assert newest <= stood + EVERY, "at most what was already committed became durable"
        assert reader.restore().step == newest

    stood = durable_after(0)
    fill(disk / "filler")
    goes_on_with(stood)
    (disk / "filler").unlink()
    stood = durable_after(reader.latest_step() or 0)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    with pytest.raises(OSError) as refused:
        os.mkdir(disk / "x")
    assert refused.value.errno == errno.EROFS
    goes_on_with(stood)
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    durable_after(reader.latest_step() or 0)
    training.finish()
    assert training.digests() == undisturbed
    assert reader.latest_step() == STEPS
    storage = open_storage(config.storage)
    assert verify_log(storage) == ()
    assert [verify_step(storage, step).bad for step in reader.all_steps()] == [()] * len(reader.all_steps())
    assert [one for one in find_garbage(storage) if not one.name.startswith(".raystate/work")] == []
    assert run_actors(run_hash(config.storage, config.run)) == []
