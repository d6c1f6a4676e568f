"""What others wrote, copied or moved: it works, or is refused with the reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raystate
from raystate.core.formats.messages import LiveStep
from raystate.core.formats.tree import Package
from raystate.inspection.verification import verify_log, verify_step
from raystate.storage import RunLog, StepFolder, Storage, visible_steps
from raystate.storage.names import MARKER
from tests.orbax.published import committed
from tests.orbax.state_example import ARRAYS, array
from tests.processes import run_python
from tests.storage.backends import claim, gcs_backend

STOCK = """
import sys
import numpy as np
import orbax.checkpoint as ocp
with ocp.CheckpointManager(sys.argv[1]) as manager:
    for step in (3, 7):
        manager.save(step, args=ocp.args.StandardSave({"w": np.full((5, 3), step, np.float32), "n": np.arange(4)}))
"""


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Storage]:
    with gcs_backend(tmp_path) as storage:
        yield storage


def copy_tree(source: Storage, target: Storage, *, but: str = "") -> None:
    """As `gsutil cp -r` does."""
    for info in source.list():
        if not but or but not in info.name:
            target.create(info.name, source.read(info.name))


def check_restores(storage: Storage, step: int) -> None:
    restored = raystate.Reader(storage.url).restore()
    assert restored.step == step
    for name in ARRAYS:
        node: Any = restored.state
        for key in name.split("."):
            node = node[int(key) if isinstance(node, list) else key]
        assert np.asarray(node).tobytes() == array(name).tobytes(), name


@pytest.fixture
def a_run(tmp_path: Path) -> Storage:
    """A directory with one step, as raystate leaves it."""
    root = tmp_path / "run"
    storage = committed(root, 1200, "a7k1").storage
    claimed = claim(storage)
    live = (LiveStep(step=1200, save="a7k1"),)
    assert RunLog(storage).append(dataclasses.replace(claimed, seq=2, kind="commit", live=live)).outcome == "ok"
    return storage


def test_a_bucket_that_orbax_alone_wrote(bucket: Storage) -> None:
    run_python("-c", STOCK, bucket.url)
    assert visible_steps(bucket) == (3, 7)
    assert raystate.Reader(bucket.url).restore().state["w"].tolist() == np.full((5, 3), 7, np.float32).tolist()
    assert [(one.step, one.save) for one in claim(bucket).live] == [(3, None), (7, None)]
    report = verify_step(bucket, 7)
    assert (report.kind, report.bad, report.objects) == ("orbax", (), 2)
    assert any("without checksums" in one for one in report.unchecked)
    StepFolder(bucket, 3, None).retire()
    assert visible_steps(bucket) == (7,)
    assert bucket.list("3") == []


def test_a_run_that_moves_to_a_bucket(a_run: Storage, bucket: Storage) -> None:
    copy_tree(a_run, bucket)
    check_restores(bucket, 1200)
    assert [(one.step, one.save) for one in claim(bucket).live] == [(1200, "a7k1")]
    assert verify_log(bucket) == ()
    report = verify_step(bucket, 1200)
    assert (report.kind, report.bad) == ("raystate", ())
    StepFolder(bucket, 1200, "a7k1").retire()
    assert bucket.list("1200") == []


def test_a_step_that_was_copied_alone(a_run: Storage, bucket: Storage) -> None:
    """Without `.raystate`: a plain Orbax checkpoint, whose arrays still carry their checksums."""
    copy_tree(a_run, bucket, but=".raystate/")
    check_restores(bucket, 1200)
    assert [(one.step, one.save) for one in claim(bucket).live] == [(1200, None)]
    report = verify_step(bucket, 1200)
    assert (report.kind, report.bad) == ("orbax", ())
    assert not any("without checksums" in one for one in report.unchecked)
    assert any("no package" in one for one in report.unchecked)


def test_a_copy_that_lost_its_marker(a_run: Storage, bucket: Storage) -> None:
    copy_tree(a_run, bucket, but=f"1200/{MARKER}")
    assert visible_steps(bucket) == ()
    with pytest.raises(raystate.StepNotFoundError, match=r"no step 1200; .* no commit_success.txt in it: .* lost its marker"):
        raystate.Reader(bucket.url).restore(step=1200)
    assert [one.problem for one in verify_log(bucket)] == ["committed by log entry 2 and not visible"]
    bucket.create(f"1200/{MARKER}", a_run.read(f"1200/{MARKER}"))
    check_restores(bucket, 1200)


def test_a_copy_over_another_step_is_refused(a_run: Storage, bucket: Storage) -> None:
    """A copied step of the same number belongs to nobody's save: nothing is committed over it."""
    copy_tree(a_run, bucket, but=".raystate/")
    package = Package(step=1200, save="a8k1", run="lm", files={MARKER: b"x"}, objects=())
    with pytest.raises(raystate.StorageError, match="is there already"):
        StepFolder(bucket, 1200, "a8k1").assemble(package)
