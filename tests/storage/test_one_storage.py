"""Whether a node sees what its Coordinator has just written: another disk at the same path has not got it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from raystate.core.formats.errors import StorageError
from raystate.core.formats.log import claim_entry
from raystate.runtime.coordinator import one_storage
from raystate.runtime.coordinator.one_storage import Claim, not_one_storage, sees
from raystate.storage import ObjectMissingError, RunLog, open_storage
from raystate.storage.directory import DirectoryStorage


def claimed(folder: Path, writer: str) -> Claim:
    entry = RunLog(open_storage(folder)).claim(lambda tail: claim_entry(tail, writer, "lm"))
    return Claim(seq=entry.seq, writer=entry.writer)


def test_only_the_very_claim_counts_and_a_failure_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_storage, "FILE_S", 0.2)
    here, there, empty = (tmp_path / name for name in ("here", "there", "empty"))
    claim = claimed(here, "first")
    claimed(there, "another")
    assert sees(str(here), claim)
    assert not sees(str(there), claim), "that disk has a run of its own"
    assert not sees(str(empty), claim)
    assert not empty.exists(), "whoever looks leaves nothing"

    def fails(*_: object) -> bytes:
        raise StorageError("the disk is slow")

    monkeypatch.setattr(DirectoryStorage, "read", fails)
    assert sees(str(there), claim), "an outage is no other disk"


def test_a_mount_that_shows_it_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = claimed(tmp_path / "elsewhere", "first")
    looks: list[float] = []

    def appears(seconds: float) -> None:
        looks.append(seconds)
        (tmp_path / "elsewhere").rename(tmp_path / "run")

    monkeypatch.setattr(one_storage, "time", SimpleNamespace(sleep=appears))
    assert sees(str(tmp_path / "run"), claim)
    assert len(looks) == 1


def test_a_folder_is_opened_before_each_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount that remembers what was absent until the folder in which it was is opened, the uppermost first, as NFS does."""
    claim = claimed(tmp_path / "run", "first")
    absent, read, scandir = [tmp_path / "run", tmp_path / "run/.raystate"], DirectoryStorage.read, os.scandir

    def reads(storage: DirectoryStorage, name: str) -> bytes:
        if absent:
            raise ObjectMissingError("it was absent")
        return read(storage, name)

    def opens(folder: Path) -> object:
        if absent and folder == absent[0].parent:
            absent.pop(0)
        return scandir(folder)

    monkeypatch.setattr(DirectoryStorage, "read", reads)
    monkeypatch.setattr(os, "scandir", opens)
    monkeypatch.setattr(one_storage, "FILE_S", 0.0)
    assert sees(str(tmp_path / "run"), claim)


def test_the_refusal_names_both_hosts() -> None:
    failure = not_one_storage("file:///data/lm", {"b" * 56: "node bbbbbbbb (host-b)"}, "node aaaaaaaa (host-a)")
    assert failure.error == "ConfigError"
    assert "on node aaaaaaaa (host-a) has just written there does not appear on node bbbbbbbb (host-b)" in failure.message
