"""A checkpoint is replaced on a directory, with and without the exchange of names, while each operation of the system fails in turn, or
the process dies there: the old one or the new one is under its name as soon as the next save has begun."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from pathlib import Path

import pytest

from raystate.core.formats.errors import StorageError
from raystate.storage import ObjectExistsError, Storage, StorageWrapper, new_folder, open_storage, posix, put_back, replace_tree
from raystate.storage.placing import TEMPORARY
from tests.storage.interrupted import Failing
from tests.storage.test_placing import tree, write

NO_EXCHANGE = OSError(22, "Invalid argument")


class DeadError(BaseException):
    """The process is gone: nothing that it would do to clean up takes place."""


CHANGING = [(os, "rename"), (os, "link"), (posix, "exchange"), (posix, "fsync"), (posix, "remove_tree")]


@pytest.fixture(params=["exchange", "no exchange"])
def exchanges(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "no exchange":

        def refuse(one: str, other: str) -> None:
            raise NO_EXCHANGE

        monkeypatch.setattr(posix, "exchange", refuse)
    return request.param == "exchange"


def text(storage: Storage) -> bytes:
    """Of the checkpoint, all of whose files are there and of one save."""
    found = tree(storage)
    said = found["one/_CHECKPOINT_METADATA"]
    (data,) = [name for name in found if name.startswith("one/state/ocdbt")]
    assert found[data] == said and len([name for name in found if name.startswith("one/")]) == 5
    return said


@pytest.mark.parametrize(
    ("error", "lasting"),
    [(OSError(5, "made to fail"), 1), (OSError(5, "made to fail"), 2), (OSError(5, "made to fail"), 10**6), (DeadError(), 10**6)],
    ids=["once", "twice", "for ever", "dead"],
)
@pytest.mark.parametrize("after", [False, True])
def test_the_old_or_the_new_one_whatever_fails(tmp_path: Path, exchanges: bool, error: BaseException, lasting: int, after: bool):
    failing, nth = None, 0
    while failing is None or failing.left < 0:
        root = tmp_path / str(nth)
        write(open_storage(root), "one", b"1")
        said: BaseException | None = None
        with pytest.MonkeyPatch.context() as patch:
            failing = Failing(patch, CHANGING, nth, error, after=after, lasting=lasting)
            try:
                write(open_storage(root), "one", b"2", overwrite=True)
            except (StorageError, DeadError) as raised:
                said = raised
        storage = open_storage(root)
        if said is None:
            assert text(storage) == b"2", nth
        elif lasting == 1:  # the save puts back itself what it can
            new = text(storage) == b"2"
            assert new == ("may not survive a power cut" in str(said)), (nth, said)
        with (
            contextlib.suppress(ZeroDivisionError),
            new_folder(storage, "one", overwrite=True),
        ):  # a save that begins, and ends at once
            raise ZeroDivisionError
        assert text(storage) == (b"2" if said is None else text(storage)), nth
        write(storage, "one", b"3", overwrite=True)
        assert text(storage) == b"3"
        assert os.listdir(root) == ["one"], nth
        nth += 1
    assert nth > 10


def leave(root: Path, save: str, what: bytes) -> str:
    """As a save leaves it that died between two renames."""
    storage = open_storage(root)
    write(storage, "another", what)
    dead = f"one{TEMPORARY}s{save * 16}"
    os.rename(root / "another", root / f"{dead}-old")
    storage.create(f"{dead}/_CHECKPOINT_METADATA", b"new")
    return dead


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_a_dead_save_took_the_name_of_gets_it_back(tmp_path: Path, overwrite: bool):
    leave(tmp_path, "0", b"older")
    leave(tmp_path, "1", b"old")
    storage = open_storage(tmp_path)
    if not overwrite:
        with pytest.raises(StorageError, match="it exists already"):
            write(storage, "one", b"2")
        assert text(storage) == b"old"
    write(storage, "one", b"2", overwrite=True)
    assert text(storage) == b"2" and os.listdir(tmp_path) == ["one"]


def test_what_cannot_be_put_back_is_never_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dead = leave(tmp_path, "0", b"old")
    storage = open_storage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(OSError(5, "made to fail")))
        with pytest.raises(StorageError, match="made to fail"):
            write(storage, "one", b"2")
        assert f"{dead}-old" in os.listdir(tmp_path)
    put_back(storage, "two")
    assert not (tmp_path / "one").exists()
    put_back(storage)
    assert text(storage) == b"old"


def test_a_save_that_lives_is_left_between_its_renames(tmp_path: Path):
    dead = leave(tmp_path, "0", b"old")
    descriptor = os.open(tmp_path / dead, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    put_back(open_storage(tmp_path))
    assert not (tmp_path / "one").exists()
    os.close(descriptor)
    put_back(open_storage(tmp_path))
    assert text(open_storage(tmp_path)) == b"old"


def test_somebody_else_takes_the_name_between_two_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    storage = open_storage(tmp_path)
    write(storage, "one", b"1")
    monkeypatch.setattr(posix, "exchange", lambda *_: (_ for _ in ()).throw(NO_EXCHANGE))

    class Slow(StorageWrapper):
        def after(self, operation: str, name: str) -> None:
            if operation == "rename_tree" and name == "one":
                storage.create("one/other", b"of somebody else")

    with pytest.raises(ObjectExistsError):
        write(Slow(storage), "one", b"2", overwrite=True)
    assert storage.read("one/other") == b"of somebody else"


def test_an_exchange_that_may_not_last_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    storage = open_storage(tmp_path)
    for name in ("one", f"one{TEMPORARY}s{'0' * 16}"):
        storage.create(f"{name}/file", name.encode())
    whole = posix.fsync

    def fsync(path: str) -> None:
        if path == str(tmp_path):
            raise OSError(5, "Input/output error")
        whole(path)

    monkeypatch.setattr(posix, "fsync", fsync)
    with pytest.raises(StorageError, match=r"new checkpoint is in its place, .*/one, but may not survive a power cut: EIO"):
        replace_tree(storage, f"one{TEMPORARY}s{'0' * 16}", "one")
    assert tree(storage) == {"one/file": f"one{TEMPORARY}s{'0' * 16}".encode(), f"one{TEMPORARY}s{'0' * 16}/file": b"one"}


def test_an_old_one_that_cannot_be_removed_is_but_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    storage = open_storage(tmp_path)
    write(storage, "one", b"1")

    class Unremoving(StorageWrapper):
        def before(self, operation: str, name: str) -> None:
            if operation == "delete_tree":
                raise StorageError("EBUSY", operation=operation, path=name)

    with caplog.at_level(logging.WARNING, "raystate"):
        write(Unremoving(storage), "one", b"2", overwrite=True)
    assert "the old checkpoint could not be removed and takes up space in" in caplog.text and text(storage) == b"2"
    write(storage, "one", b"3", overwrite=True)
    assert os.listdir(tmp_path) == ["one"]
