"""A folder outside of any run appears whole or not at all, on each back end, and whatever fails on the way."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from pathlib import Path
from unittest import mock

import pytest

from raystate.core.formats.errors import StorageError
from raystate.storage import (
    ObjectInfo,
    ObjectMissingError,
    Storage,
    StorageWrapper,
    new_folder,
    open_storage,
    posix,
)
from raystate.storage.names import MARKER, STATE, log_name
from raystate.storage.owner import owner_of
from raystate.storage.placing import TEMPORARY, NewFolder
from raystate.testing.storage.faults import Recording
from tests.storage.interrupted import Interrupted

FILES = {"_CHECKPOINT_METADATA": b"{}", "state/_METADATA": b"tree", "state/" + MARKER: b"", MARKER: b"done"}


def write(storage: Storage, folder: str, text: bytes, *, overwrite: bool = False, more: str = "") -> NewFolder:
    files = {**FILES, "_CHECKPOINT_METADATA": text, **({more: b"more"} if more else {})}
    with new_folder(storage, folder, overwrite=overwrite) as place:
        storage.create(f"{place.prefix}/state/ocdbt.process_{place.save}h0/d/data", text)
        place.publish(files)
    return place


def tree(storage: Storage) -> dict[str, bytes]:
    return {info.name: storage.read(info.name) for info in storage.list()}


def expected(place: NewFolder, text: bytes, more: str = "") -> dict[str, bytes]:
    files = {**FILES, "_CHECKPOINT_METADATA": text, **({more: b"more"} if more else {})}
    data = {f"{place.folder}/state/ocdbt.process_{place.save}h0/d/data": text}
    return {**{f"{place.folder}/{name}": part for name, part in files.items()}, **data}


class FailingAt(StorageWrapper):
    """The nth operation that changes something fails; those before and after take place."""

    def __init__(self, inner: Storage, nth: int):
        super().__init__(inner)
        self.left = nth

    def before(self, operation: str, name: str) -> None:
        if operation in ("create", "delete", "fsync_tree", "rename_tree", "delete_tree"):
            self.left -= 1
            if self.left == -1:
                raise StorageError(f"{operation} {name} failed: out of service", operation=operation, path=name)


def test_a_folder_appears(storage: Storage):
    place = write(storage, "one", b"1")
    assert tree(storage) == expected(place, b"1")


def test_the_marker_is_last_on_an_object_store(storage: Storage):
    recording = Recording(storage)
    write(recording, "one", b"1")
    changes = [(what, name) for what, name in recording.operations if what in ("create", "rename_tree")]
    if storage.is_directory:
        assert [what for what, _ in changes][-1] == "rename_tree"
        assert not any(name.startswith("one/") for what, name in changes if what == "create")
    else:
        assert changes[-1] == ("create", f"one/{MARKER}")
        assert changes[1] == ("create", "one/_CHECKPOINT_METADATA")


def test_what_is_there_is_refused_and_kept(storage: Storage):
    place = write(storage, "one", b"1")
    with pytest.raises(StorageError, match=r"one: it exists already.*overwrite=True"):
        write(storage, "one", b"2")
    assert tree(storage) == expected(place, b"1")


def test_overwriting_leaves_nothing_of_the_old_one(storage: Storage):
    write(storage, "one", b"1", more="array_metadatas/process_1")
    place = write(storage, "one", b"2", overwrite=True, more="extra")
    assert tree(storage) == expected(place, b"2", "extra")


def test_overwriting_what_is_not_there(storage: Storage):
    place = write(storage, "one", b"1", overwrite=True)
    assert tree(storage) == expected(place, b"1")


@pytest.mark.parametrize("item", ["state/", ""])
def test_an_unfinished_save_is_overwritten_where_nothing_is_renamed(storage: Storage, item: str):
    storage.create(f"one/{item}ocdbt.process_s0123456789abcdefh0/d/x", b"left by a dead one")
    if storage.is_directory:  # there it would lie under a temporary name
        with pytest.raises(StorageError, match="this is none"):
            write(storage, "one", b"1", overwrite=True)
        return
    place = write(storage, "one", b"1", overwrite=True)
    assert tree(storage) == expected(place, b"1")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("one/notes.txt", "this is none: it holds 'notes.txt'"),
        ("one/inner/_CHECKPOINT_METADATA", "this is none: it holds 'inner/'"),
        ("one/inner/state/ocdbt.process_s0123456789abcdefh0/d/x", "this is none: it holds 'inner/'"),
        (f"one/{log_name(1)}", "storage of a run"),
    ],
)
def test_only_a_checkpoint_is_overwritten(storage: Storage, name: str, why: str):
    storage.create(name, b"precious")
    with pytest.raises(StorageError, match=why):
        write(storage, "one", b"1", overwrite=True)
    assert tree(storage) == {name: b"precious"}


@pytest.mark.parametrize(
    "complete", ["_METADATA", "manifest.ocdbt", "d/s1111111111111111h0", "ocdbt.process_0/d/x", "_CHECKPOINT_METADATA"]
)
@pytest.mark.parametrize("state", [False, True])
def test_many_checkpoints_with_an_unfinished_one_are_not_overwritten(storage: Storage, complete: str, state: bool):
    names = {f"one/checkpoint_1/{complete}", f"one/checkpoint_1/{MARKER}", "one/checkpoint_2/ocdbt.process_s0123456789abcdefh0/d/x"}
    if state:
        names.add("one/state/ocdbt.process_s2222222222222222h0/d/x")
    for name in names:
        storage.create(name, b"precious")
    with pytest.raises(StorageError, match="this is none"):
        write(storage, "one", b"1", overwrite=True)
    assert tree(storage) == dict.fromkeys(names, b"precious")


def test_a_step_of_a_run_is_its_managers(storage: Storage):
    storage.create(log_name(1), b"{}")
    for overwrite in (False, True):
        for folder in ("1200", "final", "05", "step_5", STATE):
            with pytest.raises(StorageError, match=r"run is the storage of a run, whose StateManager|run/\.raystate is part of"):
                write(storage, folder, b"1", overwrite=overwrite)
    assert tree(storage) == {log_name(1): b"{}"}


@pytest.mark.parametrize("inside", ["1200", "1200/state", "notes", f"{STATE}/work"])
def test_nothing_is_put_into_a_run(storage: Storage, inside: str):
    storage.create(log_name(1), b"{}")
    write_step(storage, "1200")
    before = tree(storage)
    for folder in ("state", "other"):
        with pytest.raises(StorageError, match="whose StateManager alone writes there"):
            write(open_storage(f"{storage.url}/{inside}"), folder, b"1", overwrite=True)
    assert tree(storage) == before


@pytest.mark.parametrize("inside", ["one", "one/state"])
def test_nothing_is_put_into_a_checkpoint(storage: Storage, inside: str):
    place = write(storage, "one", b"1")
    for folder in ("state", "other"):
        with pytest.raises(StorageError, match=r"one is a checkpoint: save elsewhere"):
            write(open_storage(f"{storage.url}/{inside}"), folder, b"2", overwrite=True)
    assert tree(storage) == expected(place, b"1")


def test_what_lies_above_may_be_closed_to_this_account(storage: Storage):
    """On a bucket an account may have one prefix only."""
    if storage.is_directory:
        pytest.skip("nobody reaches a folder whose parent is closed")

    def exists(asked: Storage, name: str) -> bool:
        if asked.url != storage.url:
            raise StorageError("403", operation="stat", path=name)
        return False

    with mock.patch.object(type(storage), "exists", exists):
        place = write(storage, "one", b"1")
    assert tree(storage) == expected(place, b"1")


def test_two_small_requests_for_each_folder_above(tmp_path: Path):
    storage = open_storage(f"memory://{tmp_path.name}/a/b")
    asked: list[str] = []
    with mock.patch.object(type(storage), "stat", autospec=True, side_effect=lambda at, name: missing(asked, f"{at.url}/{name}")):
        assert owner_of(storage.url) == ""
    assert len(asked) == len(set(asked)) == 2 * 3


def missing(asked: list[str], name: str) -> ObjectInfo:
    asked.append(name)
    raise ObjectMissingError("none", operation="stat", path=name)


def write_step(storage: Storage, folder: str) -> None:
    for name, data in FILES.items():
        storage.create(f"{folder}/{name}", data)


@pytest.mark.parametrize(
    "other",
    [
        "notes/my.txt",
        "README",
        "child/_CHECKPOINT_METADATA",
        "child/_METADATA",
        f"run/{log_name(1)}",
        f"state/{log_name(1)}",
        "state/_CHECKPOINT_METADATA",
        "state/my.txt",
        "state/d/deeper/my.txt",
        "metrics/_CHECKPOINT_METADATA",
    ],
)
@pytest.mark.parametrize("says", [b'{"item_handlers": {"state": "a handler", "metrics": "another"}}', b"damaged"])
def test_overwriting_takes_nothing_else_away(storage: Storage, other: str, says: bytes):
    write(storage, "one", says, more="metrics/metrics")
    if says == b"damaged" and other == "child/_METADATA":
        pytest.skip("then nobody can tell it from an item")
    storage.create(f"one/{other}", b"precious")
    before = tree(storage)
    with pytest.raises(StorageError, match=f"here is more: '{re.escape(other)}'"):
        write(storage, "one", b"2", overwrite=True)
    assert tree(storage) == before


@pytest.mark.parametrize("nth", range(12))
def test_what_a_dead_save_left_in_a_bucket_is_overwritten(nth: int, tmp_path: Path):
    storage = open_storage(f"memory://{tmp_path.name}/{nth}")

    class Dead(FailingAt):
        def before(self, operation: str, name: str) -> None:
            if self.left < 0 and operation in ("create", "delete", "list"):
                raise StorageError("dead", operation=operation, path=name)
            super().before(operation, name)

    old = write(storage, "one", b"1", more="metrics/metrics")
    with contextlib.suppress(StorageError):
        write(Dead(storage, nth), "one", b"2", overwrite=True)
    place = write(storage, "one", b"3", overwrite=True)
    assert tree(storage) == expected(place, b"3") and place.save != old.save


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failure_at_any_point_leaves_what_was_there(storage: Storage, overwrite: bool):
    if storage.url.startswith("gs://"):
        pytest.skip("as on the memory back end, only slower")
    nth, fails = 0, True
    while fails:
        for info in storage.list():
            storage.delete(info.name)
        if storage.is_directory and storage.exists("one") is False:
            storage.delete_tree("one")
        old = expected(write(storage, "one", b"1"), b"1") if overwrite else {}
        failing = FailingAt(storage, nth)
        try:
            place = write(failing, "one", b"2", overwrite=overwrite)
            assert tree(storage).items() >= expected(place, b"2").items()  # left-overs of the old one are warned of
            fails = failing.left < 0
        except StorageError:
            assert tree(storage) == old
        nth += 1
    assert nth > 5


def test_the_faster_of_two_wins(storage: Storage):
    def beside_another() -> None:
        with mock.patch.object(NewFolder, "_check_free", return_value=[]), new_folder(storage, "one") as slow:  # both looked before
            storage.create(f"{slow.prefix}/state/ocdbt.process_{slow.save}h0/d/data", b"slow")
            faster.append(write(storage, "one", b"fast"))
            slow.publish(FILES)

    faster: list[NewFolder] = []
    with pytest.raises(StorageError, match="somebody else"):
        beside_another()
    assert tree(storage) == expected(faster[0], b"fast")


@pytest.mark.parametrize("when", ["before", "after"])
def test_another_overwrites_at_any_point(when: str, tmp_path: Path):
    """A signal's handler, or another process: who was told that its checkpoint is there has it there."""
    nth, came, refused = 0, True, 0
    while came:
        storage = open_storage(f"memory://{tmp_path.name}/{when}/{nth}")
        write(storage, "one", b"1")
        interrupted = Interrupted(storage, nth, when, lambda inner: write(inner, "one", b"3", overwrite=True))
        place: NewFolder | None = None
        with contextlib.suppress(StorageError):
            place = write(interrupted, "one", b"2", overwrite=True)
        good = [expected(one, text) for one, text in ((place, b"2"), (interrupted.got, b"3")) if one is not None]
        assert tree(storage) in good
        refused += place is None
        came = interrupted.came
        nth += 1
    assert nth > 10 and refused > 5


def test_what_a_dead_one_left_goes_with_the_next(tmp_path: Path):
    storage = open_storage(tmp_path)
    dead, alive, other = (f"{name}{TEMPORARY}s{digit * 16}" for name, digit in (("one", "0"), ("one", "1"), ("another", "2")))
    stock = f"one{TEMPORARY}1763800000000"  # its writer holds no lock, and may live
    for folder in (dead, alive, other, stock):
        storage.create(f"{folder}/state/data", b"")
    descriptor = os.open(tmp_path / alive, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    write(storage, "one", b"1")
    os.close(descriptor)
    assert {path.name for path in tmp_path.iterdir()} == {"one", alive, other, stock}


def test_folders_that_were_made_for_it_go_too(tmp_path: Path):
    storage = open_storage(tmp_path / "a" / "b")
    with pytest.raises(ZeroDivisionError), new_folder(storage, "one"):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def test_a_file_system_that_cannot_exchange_names(tmp_path: Path):
    storage = open_storage(tmp_path)
    write(storage, "one", b"1")
    with mock.patch.object(posix, "exchange", side_effect=OSError(22, "Invalid argument")):
        place = write(storage, "one", b"2", overwrite=True)
        assert tree(storage) == expected(place, b"2")


def test_a_reader_finds_the_old_or_the_new_one_at_every_moment(tmp_path: Path):
    storage = open_storage(tmp_path)
    write(storage, "one", b"1")

    class Looking(StorageWrapper):
        def before(self, operation: str, name: str) -> None:
            assert storage.read("one/_CHECKPOINT_METADATA") in (b"1", b"2")

        after = before

    write(Looking(storage), "one", b"2", overwrite=True)


def test_a_file_is_in_the_way(tmp_path: Path):
    (tmp_path / "one").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(StorageError, match="a file of that name"):
            write(open_storage(tmp_path), "one", b"1", overwrite=overwrite)
    assert (tmp_path / "one").read_text() == "mine"
