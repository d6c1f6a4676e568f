"""What only a file system does: errors by number, order of fsyncs, temporary files, links."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raystate import load, save
from raystate.core.formats.errors import ConfigError, StorageError
from raystate.machine.memory import MOST_READ_BYTES
from raystate.storage import ObjectExistsError, ObjectMissingError, open_storage
from raystate.storage.base import TEMPORARY_PREFIX
from raystate.storage.names import LOG, STATE, TRASH, WORK


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return Path(os.path.realpath(tmp_path)) / "run"


def failing(number: int) -> Callable[..., Any]:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def temporary_files(root: Path) -> list[Path]:
    return list(root.rglob(f"{TEMPORARY_PREFIX}*"))


@pytest.mark.parametrize(
    ("call", "number", "hint"),
    [
        ("write", errno.ENOSPC, "full"), ("fsync", errno.ENOSPC, "full"), ("link", errno.EDQUOT, "quota"),
        ("open", errno.EROFS, "read-only"), ("open", errno.EACCES, "owner and mode"), ("link", errno.EIO, "EIO"),
    ],
)  # fmt: skip
def test_errors_name_operation_and_path(root: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, hint: str):
    storage = open_storage(root)
    storage.create("folder/first", b"1")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(number))
        with pytest.raises(StorageError) as caught:
            storage.create("folder/name", b"data")
    error = caught.value
    assert (error.operation, error.path, error.errno) == ("create", str(root / "folder/name"), number)
    for part in ("create", str(root / "folder/name"), errno.errorcode[number], hint):
        assert part in error.message
    assert [info.name for info in storage.list()] == ["folder/first"]
    assert temporary_files(root) == []


def test_other_operations_name_themselves(root: Path, monkeypatch: pytest.MonkeyPatch):
    storage = open_storage(root)
    storage.create("a/b", b"1")
    calls: list[tuple[str, str, Callable[[], object]]] = [
        ("stat", "stat", lambda: storage.stat("a/b")),
        ("scandir", "list", lambda: storage.list("a")),
        ("unlink", "delete", lambda: storage.delete("a/b")),
        ("fsync", "fsync", lambda: storage.fsync_tree("a")),
        ("rename", "rename", lambda: storage.rename_tree("a", "c")),
    ]
    for call, operation, use in calls:
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing(errno.EACCES))
            with pytest.raises(StorageError) as caught:
                use()
        assert caught.value.operation == operation
        assert str(root / "a") in caught.value.path
        assert "EACCES" in caught.value.message


def test_a_file_where_a_folder_is_needed(root: Path):
    storage = open_storage(root)
    storage.create("file", b"1")
    with pytest.raises(StorageError, match="ENOTDIR") as caught:
        storage.create("file/below/name", b"2")
    assert caught.value.path == str(root / "file/below/name")
    assert not isinstance(caught.value, ObjectMissingError)
    assert caught.value.message.endswith(f"ENOTDIR: {root}/file is a file, and nothing lies below it")
    for inside in ("file", "file/runs", "file/runs/lm"):
        with pytest.raises(
            ConfigError, match=rf"^storage: file://{root}/{inside} can be no folder: {root}/file is a file, and"
        ) as found:
            open_storage(root / inside).self_test()
        assert found.value.field == "storage"
    os.mkfifo(root / "pipe")
    with pytest.raises(ConfigError, match=f"{root}/pipe is no folder, and nothing lies below it"):
        open_storage(root / "pipe/runs").self_test()


def test_where_no_folder_can_be_made_no_run_begins():
    with pytest.raises(StorageError, match=r"^file:///proc/nobody can't be written to: create /proc/nobody/\.raystate/") as found:
        open_storage("/proc/nobody").self_test()
    assert "create-once" not in found.value.message, "another mount would not help"


def test_passing_errors_are_retried(root: Path, monkeypatch: pytest.MonkeyPatch):
    storage = open_storage(root, timeout_s=30.0)
    real, left = os.link, [errno.ESTALE, errno.EINTR]

    def link(*args: Any, **kwargs: Any) -> None:
        if left:
            failing(left.pop())()
        real(*args, **kwargs)

    monkeypatch.setattr(os, "link", link)
    storage.create("name", b"data")
    assert storage.read("name") == b"data"
    assert left == []


def test_retries_end_at_the_deadline(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "link", failing(errno.ESTALE))
    with pytest.raises(StorageError, match="ESTALE"):
        open_storage(root, timeout_s=0.1).create("name", b"data")


def test_a_link_that_worked_and_said_otherwise(root: Path, monkeypatch: pytest.MonkeyPatch):
    """NFS repeats a request whose answer was lost, and then finds its own link."""
    storage = open_storage(root)
    real = os.link

    def link(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        failing(errno.EEXIST)()

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", link)
        storage.create("name", b"data")
    assert storage.read("name") == b"data"
    with pytest.raises(ObjectExistsError):
        storage.create("name", b"data")


def test_a_temporary_file_swept_away_is_written_again(root: Path, monkeypatch: pytest.MonkeyPatch):
    storage = open_storage(root)
    real, swept = os.link, [0, 0]

    def link(*args: Any, **kwargs: Any) -> None:
        if swept:
            swept.pop()
            assert storage.sweep("") == 1
        real(*args, **kwargs)

    monkeypatch.setattr(os, "link", link)
    storage.create("a/name", b"data")
    assert storage.read("a/name") == b"data"
    assert temporary_files(root) == []


def test_what_the_dead_left_is_invisible_until_swept(root: Path):
    storage = open_storage(root)
    storage.create("a/name", b"data")
    (root / "a" / f"{TEMPORARY_PREFIX}0123").write_bytes(b"half")
    assert [info.name for info in storage.list()] == ["a/name"]
    assert [info.name for info in storage.list("a", recursive=False)] == ["a/name"]
    assert storage.sweep("a") == 1
    assert storage.sweep("a") == storage.sweep("absent") == 0
    assert storage.read("a/name") == b"data"


def trace(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Every os.fsync, link and mkdir from now on, with the path."""
    calls: list[tuple[str, str]] = []

    def traced(name: str, call: Callable[..., Any]) -> Callable[..., None]:
        def made(first: Any, *rest: Any) -> None:
            calls.append((name, os.readlink(f"/proc/self/fd/{first}") if name == "fsync" else first))
            call(first, *rest)

        return made

    for name in ("fsync", "link", "mkdir"):
        monkeypatch.setattr(os, name, traced(name, getattr(os, name)))
    return calls


def test_create_is_durable_in_order(root: Path, monkeypatch: pytest.MonkeyPatch):
    storage = open_storage(root)
    calls = trace(monkeypatch)
    storage.create("a/b/name", b"data")
    temporary = next(path for call, path in calls if call == "link")
    above = [call for call in calls if call[0] == "fsync" and Path(call[1]) in root.parent.parents]
    assert [Path(path) for _, path in above] == [*reversed(root.parent.parents)], "whoever made them may have died before its fsync"
    assert [call for call in calls if call not in above] == [
        ("mkdir", str(root)), ("fsync", str(root.parent)),
        ("mkdir", str(root / "a")), ("fsync", str(root)),
        ("mkdir", str(root / "a/b")), ("fsync", str(root / "a")),
        ("fsync", temporary), ("link", temporary), ("fsync", str(root / "a/b")),
    ]  # fmt: skip
    assert Path(temporary).parent == root / "a/b"


def test_rename_never_replaces(root: Path, monkeypatch: pytest.MonkeyPatch):
    storage = open_storage(root)
    storage.create("a/f", b"1")
    (root / "file").write_bytes(b"3")
    (root / "link").symlink_to(root / "nowhere")
    for there in ("file", "link"):
        with pytest.raises(ObjectExistsError):
            storage.rename_tree("a", there)
    storage.create("full/f", b"2")
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "lexists", lambda path: path == str(root / "a"))  # it appears after the look
        with pytest.raises(ObjectExistsError):
            storage.rename_tree("a", "full")
    assert (storage.read("a/f"), storage.read("full/f")) == (b"1", b"2")


def test_links_to_elsewhere(root: Path, tmp_path: Path):
    storage = open_storage(root)
    storage.create("a/f", b"1")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_bytes(b"!")
    (root / "12").symlink_to(elsewhere)
    (root / "dangling").symlink_to(root / "nowhere")
    assert [info.name for info in storage.list()] == ["12/precious", "a/f"]
    storage.delete_tree("12")
    assert (elsewhere / "precious").read_bytes() == b"!"
    assert [info.name for info in storage.list(recursive=False)] == ["a/"]


# ---------------------------------------------------------------- the self-test finds what is missing


def test_self_test_of_a_mount_without_links(root: Path, monkeypatch: pytest.MonkeyPatch):
    for number in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
        with monkeypatch.context() as patch:
            patch.setattr(os, "link", failing(number))
            with pytest.raises(StorageError) as caught:
                open_storage(root).self_test()
        for part in (str(root), "create", errno.errorcode[number], "create-once", "gs://"):
            assert part in caught.value.message
        assert open_storage(root).list() == []


def test_self_test_of_a_link_that_replaces(root: Path, monkeypatch: pytest.MonkeyPatch):
    def link(source: str, target: str) -> None:
        os.replace(source, target)

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(StorageError, match="second link"):
        open_storage(root).self_test()


def test_self_test_of_a_rename_that_merges(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "rename", lambda _source, _target: None)
    with pytest.raises(StorageError, match="not empty was replaced"):
        open_storage(root).self_test()


def test_self_test_of_a_mount_that_cannot_fsync_folders(root: Path, monkeypatch: pytest.MonkeyPatch):
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            failing(errno.EINVAL)()
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StorageError, match="EINVAL"):
        open_storage(root).self_test()


def test_self_test_of_a_full_or_read_only_mount_says_so(root: Path, monkeypatch: pytest.MonkeyPatch):
    for call, number in (("write", errno.ENOSPC), ("mkdir", errno.EROFS)):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing(number))
            with pytest.raises(StorageError) as caught:
                open_storage(root).self_test()
        assert caught.value.errno == number
        assert "gs://" not in caught.value.message, "another mount is not what is needed"


def test_a_pipe_is_no_object(tmp_path: Path):
    """It would be waited for without end."""
    storage = open_storage(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    for look in (storage.read, storage.checksums, storage.stat):
        with pytest.raises(ObjectMissingError):
            look("pipe")
    assert not storage.exists("pipe")


def test_links_that_lead_nowhere_are_passed_over(tmp_path: Path):
    storage = open_storage(tmp_path / "run")
    storage.create("1/a", b"a")
    storage.create("2/b", b"b")
    for name, target in {"1/self": "self", "1/gone": "nothing", "1/up": "..", "1/two": "../2", "2/one": "../1"}.items():
        os.symlink(target, tmp_path / "run" / name)
    names = [info.name for info in storage.list()]
    assert names == ["1/a", "1/two/b", "1/two/one/a", "2/b", "2/one/a", "2/one/two/b"]
    assert {info.name for info in storage.list("1", recursive=False)} == {"1/a", "1/two/", "1/up/"}


@pytest.mark.parametrize("folder", [STATE, TRASH, LOG, WORK])
def test_in_the_runs_own_folder_no_link_is_followed(tmp_path: Path, folder: str):
    """gc deleted whatever lay where a link named trash pointed."""
    storage = open_storage(tmp_path / "run")
    storage.self_test()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "5.a1k5.0123abcd").write_bytes(b"!")
    (tmp_path / "run" / folder).parent.mkdir(exist_ok=True)
    if folder == STATE:
        shutil.rmtree(tmp_path / "run" / STATE)
    (tmp_path / "run" / folder).symlink_to(elsewhere)
    what = f"{tmp_path}/run/{folder} is a symbolic link, and none is followed there: put what it points to in its place"
    inside = f"{folder}/5.a1k5.0123abcd"
    for refused in (
        storage.self_test,
        lambda: storage.list(folder),
        lambda: storage.read(inside),
        lambda: storage.exists(inside),
        lambda: storage.create(f"{folder}/new", b"1"),
        lambda: storage.delete(inside),
        lambda: storage.delete_tree(inside),
        lambda: storage.rename_tree(inside, "5"),
        lambda: storage.rename_tree(folder, "5"),
        lambda: storage.sweep(folder),
        lambda: storage.fsync_tree(folder),
        lambda: storage.kvstore(folder),
    ):
        with pytest.raises(StorageError, match=re.escape(what)):
            refused()
    assert storage.list() == [info for info in storage.list() if not info.is_folder and info.name == folder]
    storage.delete_tree(folder)
    assert [path.name for path in elsewhere.iterdir()] == ["5.a1k5.0123abcd"]
    storage.self_test()


def test_what_replaces_a_checkpoint_at_a_link_replaces_what_it_leads_to(tmp_path: Path):
    save(tmp_path / "disk/one", {"w": np.ones(2)})
    save(tmp_path / "disk/two", {"w": np.ones(2)})
    (tmp_path / "latest").symlink_to(tmp_path / "disk/one")
    (tmp_path / "disk/one/state/d/more").symlink_to(tmp_path / "disk/two")
    with pytest.raises(StorageError, match="here is more"):
        save(tmp_path / "latest", {"w": np.zeros(2)}, overwrite=True)
    (tmp_path / "disk/one/state/d/more").unlink()
    before = {path: path.read_bytes() for path in (tmp_path / "disk/two").rglob("*") if path.is_file()}
    save(tmp_path / "latest", {"w": np.zeros(2)}, overwrite=True)
    assert (tmp_path / "latest").is_symlink() and not load(tmp_path / "disk/one")["w"].any()
    assert before == {path: path.read_bytes() for path in (tmp_path / "disk/two").rglob("*") if path.is_file()}


def test_a_file_that_fills_the_memory_is_refused(tmp_path: Path):
    storage = open_storage(tmp_path)
    storage.create("small", b"1")
    os.truncate(tmp_path / "small", MOST_READ_BYTES + 1)  # it takes no room on the disk
    with pytest.raises(StorageError, match=r"it has 1,073,741,825 bytes; a file that is read whole has at most 1,073,741,824"):
        storage.read("small")
