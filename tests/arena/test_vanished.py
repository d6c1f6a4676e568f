"""Files of an arena that somebody removes: they are missed, and who removes such files is named where it may happen."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from raystate.arena import HostArena, TrainerArena, vanished
from raystate.arena.vanished import vanished_text, why_files_may_vanish
from tests.arena.sets import OpenHost


@pytest.mark.parametrize(
    "name", ["host.lock", "meta.json", "layouts", "set-0/set.json", "set-0/host.cell", "set-0/trainer.cell", "set-0/slot-2"]
)
def test_each_file_is_missed(name: str, host: HostArena):
    held = host.allot(trainer="t1", data_bytes=8192, table_bytes=100)
    assert host.missing() is None
    with TrainerArena.attach(held.path, trainer="t1") as trainer:
        assert trainer.is_there
        path = host.path / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        assert host.missing() == path
        if name == "host.lock":
            path.touch()
            assert host.missing() == path, "another file of that name"
        shutil.rmtree(held.path)
        assert not trainer.is_there


def test_a_trainer_does_not_take_anothers_set_of_that_name_for_its_own(open_host: OpenHost):
    first = open_host()
    path = first.allot(trainer="t1", data_bytes=8192, table_bytes=100).path
    with TrainerArena.attach(path, trainer="t1") as trainer:
        shutil.rmtree(first.path)
        first.close()
        second = open_host()
        assert second.allot(trainer="t2", data_bytes=8192, table_bytes=100).path == path
        assert not trainer.is_there


def machine(root: Path, *, linger: bool = False, conf: str = "") -> Path:
    """A directory that looks like that of a machine with systemd-logind."""
    (root / "run/systemd/seats").mkdir(parents=True)
    (root / "var/lib/systemd/linger").mkdir(parents=True)
    (root / "etc/systemd/logind.conf.d").mkdir(parents=True)
    (root / "etc/systemd/logind.conf.d/10.conf").write_text(conf)
    if linger:
        (root / "var/lib/systemd/linger/somebody").touch()
    return root


def test_logind_is_named_where_it_would_remove_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shared = Path("/dev/shm/raystate-1000")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(vanished, "_user_name", lambda _: "somebody")
    assert why_files_may_vanish(shared, system=tmp_path) == "", "no systemd, as in a container"
    here = machine(tmp_path / "1", conf="[Login]\n#RemoveIPC=no\n")
    assert "loginctl enable-linger" in why_files_may_vanish(shared, system=here)
    assert why_files_may_vanish(tmp_path, system=here) == "", "it only looks into shared memory"
    assert why_files_may_vanish(shared, system=machine(tmp_path / "2", conf="[Login]\nRemoveIPC = no\n")) == ""
    assert why_files_may_vanish(shared, system=machine(tmp_path / "3", linger=True)) == ""
    (here / "etc/systemd/logind.conf").symlink_to("/proc/self/mem")
    assert why_files_may_vanish(shared, system=here), "a file that can't be read turns nothing off"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert why_files_may_vanish(shared, system=here) == "", "system users are left alone"


def test_the_warning_names_logind_and_what_is_to_be_spared():
    arena = Path("/dev/shm/raystate-1000/raystate-r-n")
    text = vanished_text(arena / "set-0/slot-1", arena)
    assert "RemoveIPC=no" in text and text.endswith("spare /dev/shm/raystate-1000")
