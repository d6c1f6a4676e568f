"""Another user of the machine, by a real user id, beside folders that anybody may change, as Ray's are."""

from __future__ import annotations

import logging
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from raystate.compilation import ProgramStore, anybody_can_write, node_folder
from raystate.compilation import store as store_module
from raystate.core.formats.messages import Settings
from raystate.observe.record import Recorder
from tests.patience import PATIENCE_S

KEY = "jit_step-" + "a" * 64
NOBODY = 65534
SETTINGS = Settings(run="lm", storage="s")

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        yield Path(folder)


def as_nobody(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", "-c", command], cwd=folder, user=NOBODY, group=NOBODY, extra_groups=[],
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip


def test_what_another_user_puts_in_its_place_is_not_loaded(open_to_all: Path):
    folder = open_to_all / "programs"
    folder.mkdir(mode=0o700)
    store = ProgramStore(folder, 1 << 20)
    store.put(KEY, b"ours")
    (program,) = folder.iterdir()
    planted = open_to_all / "planted"
    planted.write_bytes(store_module.FORMAT + store_module._digest(store_module.program_name(KEY), b"theirs") + b"theirs")
    planted.chmod(0o644)
    done = as_nobody(f"mv programs away && mkdir programs && cp planted programs/{program.name}", open_to_all)
    assert done.returncode == 0, done.stderr
    assert store.get(KEY) == b"ours"
    assert ProgramStore(folder, 1 << 20).get(KEY) is None
    assert not ProgramStore(folder, 1 << 20).put(KEY, b"ours"), "nor is anything given away there"


def test_a_folder_is_made_only_where_no_other_user_can_move_it(open_to_all: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    inside = open_to_all / "session"
    inside.mkdir(mode=0o755)
    assert node_folder(open_to_all, inside) is None
    assert f"other users could put theirs in the place of a folder in {open_to_all} and {inside}" in caplog.text
    assert [path.name for path in open_to_all.iterdir()] == ["session"]
    folder = node_folder(open_to_all, tmp_path)
    assert folder is not None and folder.parent == tmp_path.resolve()
    open_to_all.chmod(0o1777)
    folder = node_folder(open_to_all)
    assert folder is not None and folder.parent == open_to_all.resolve()
    assert as_nobody(f"mv {folder.name} away", open_to_all).returncode != 0


def test_programs_stay_on_their_node_where_any_user_could_replace_the_runs_folder(open_to_all: Path):
    run = open_to_all / "runs" / "lm"
    assert anybody_can_write(run)
    run.mkdir(parents=True)
    assert anybody_can_write(run), "its parent may be renamed"
    open_to_all.chmod(0o1777)
    assert not anybody_can_write(run / ".raystate" / "compiled")
    os.chown(run, NOBODY, NOBODY)
    assert anybody_can_write(run / ".raystate" / "compiled")


def test_a_program_of_another_user_is_not_loaded(tmp_path: Path):
    store = ProgramStore(tmp_path, 1 << 20)
    for spoil in (lambda path: os.chown(path, NOBODY, NOBODY), lambda path: os.chmod(path, 0o666)):
        store.put(KEY, b"program")
        (program,) = tmp_path.iterdir()
        spoil(program)
        assert store.get(KEY) is None
        assert not program.exists()


def test_no_other_user_reads_the_record(open_to_all: Path):
    folder = open_to_all / "logs" / "raystate" / "lm-0123"
    recorder = Recorder(folder)
    recorder.begin(1, SETTINGS)
    recorder.close(PATIENCE_S)
    (part,) = folder.iterdir()
    assert "Permission denied" in as_nobody(f"cat {part}", open_to_all).stderr
    folder.chmod(0o777)  # the files themselves are closed, too
    assert "Permission denied" in as_nobody(f"cat {part}", open_to_all).stderr


def test_no_record_is_written_into_another_users_folder(open_to_all: Path, caplog: pytest.LogCaptureFixture):
    as_nobody("mkdir lm-0123", open_to_all)
    recorder = Recorder(open_to_all / "lm-0123")
    with caplog.at_level(logging.WARNING):
        recorder.begin(1, SETTINGS)
        recorder.close(PATIENCE_S)
    assert "ends here: it is not a folder that only this user can enter: remove it, or set another record_dir" in caplog.text
    assert not list((open_to_all / "lm-0123").iterdir())
