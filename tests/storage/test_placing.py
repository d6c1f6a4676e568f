"""A folder outside of any run appears whole or not at all, on each back end, and whatever fails on the way."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from unittest import mock

import pytest

from raystate.core.errors import StorageError
from raystate.storage import ObjectExistsError, Storage, StorageWrapper, new_folder, open_storage, posix
from raystate.storage.names import MARKER, log_name
from raystate.storage.placing import TEMPORARY, NewFolder
from raystate.testing.storage.faults import Recording

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


def test_row1_a_folder_appears(storage: Storage):
    place = write(storage, "one", b"1")
    assert tree(storage) == expected(place, b"1")


def test_row1_the_marker_is_last_on_an_object_store(storage: Storage):
    recording = Recording(storage)
    write(recording, "one", b"1")
    changes = [(what, name) for what, name in recording.operations if what in ("create", "rename_tree")]
    if storage.is_directory:
        assert [what for what, _ in changes][-1] == "rename_tree"
        assert not any(name.startswith("one/") for what, name in changes if what == "create")
    else:
        assert changes[-1] == ("create", f"one/{MARKER}")
        assert changes[1] == ("create", "one/_CHECKPOINT_METADATA")


def test_row1_what_is_there_is_refused_and_kept(storage: Storage):
    place = write(storage, "one", b"1")
    with pytest.raises(StorageError, match=r"one: it exists already.*overwrite=True"):
        write(storage, "one", b"2")
    assert tree(storage) == expected(place, b"1")


def test_row1_overwriting_leaves_nothing_of_the_old_one(storage: Storage):
    write(storage, "one", b"1", more="array_metadatas/process_1")
    place = write(storage, "one", b"2", overwrite=True, more="extra")
    assert tree(storage) == expected(place, b"2", "extra")


def test_row1_overwriting_what_is_not_there(storage: Storage):
    place = write(storage, "one", b"1", overwrite=True)
    assert tree(storage) == expected(place, b"1")


@pytest.mark.parametrize("item", ["state/", ""])
def test_row1_an_unfinished_save_is_overwritten_where_nothing_is_renamed(storage: Storage, item: str):
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
def test_row1_only_a_checkpoint_is_overwritten(storage: Storage, name: str, why: str):
    storage.create(name, b"precious")
    with pytest.raises(StorageError, match=why):
        write(storage, "one", b"1", overwrite=True)
    assert tree(storage) == {name: b"precious"}


def test_row1_a_step_of_a_run_is_its_managers(storage: Storage):
    storage.create(log_name(1), b"{}")
    for overwrite in (False, True):
        with pytest.raises(StorageError, match="StateManager"):
            write(storage, "1200", b"1", overwrite=overwrite)
    write(storage, "final", b"1")


@pytest.mark.parametrize("overwrite", [False, True])
def test_row1_a_failure_at_any_point_leaves_nothing_new(storage: Storage, overwrite: bool):
    if storage.url.startswith("gs://"):
        pytest.skip("as on the memory back end, only slower")
    nth, fails, lost = 0, True, 0
    while fails:
        for info in storage.list():
            storage.delete(info.name)
        if storage.is_directory and storage.exists("one") is False:
            storage.delete_tree("one")
        old = expected(write(storage, "one", b"1"), b"1") if overwrite else {}
        failing = FailingAt(storage, nth)
        try:
            place = write(failing, "one", b"2", overwrite=overwrite)
            assert tree(storage) == expected(place, b"2") or storage.is_directory  # left-overs of the old one are warned of
            fails = failing.left < 0
        except StorageError as error:
            found, said = tree(storage), error.message
            if found != old:  # an object store, between the old marker and the new one
                assert overwrite and not storage.is_directory
                assert f"one/{MARKER}" not in found and found.items() <= old.items()
                assert "none is there now" in said
                lost += 1
        nth += 1
    assert nth > 5
    assert bool(lost) == (overwrite and not storage.is_directory)


def test_row1_the_faster_of_two_wins(storage: Storage):
    def beside_another() -> None:
        with mock.patch.object(NewFolder, "_check_free", return_value=[]), new_folder(storage, "one") as slow:  # both looked before
            storage.create(f"{slow.prefix}/state/ocdbt.process_{slow.save}h0/d/data", b"slow")
            faster.append(write(storage, "one", b"fast"))
            slow.publish(FILES)

    faster: list[NewFolder] = []
    with pytest.raises(StorageError, match="somebody else"):
        beside_another()
    assert tree(storage) == expected(faster[0], b"fast")


def test_row1_what_a_dead_one_left_goes_with_the_next(tmp_path: Path):
    storage = open_storage(tmp_path)
    dead, alive, other = (f"{name}{TEMPORARY}s{digit * 16}" for name, digit in (("one", "0"), ("one", "1"), ("another", "2")))
    for folder in (dead, alive, other):
        storage.create(f"{folder}/state/data", b"")
    descriptor = os.open(tmp_path / alive, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    write(storage, "one", b"1")
    os.close(descriptor)
    assert {path.name for path in tmp_path.iterdir()} == {"one", alive, other}


def test_row1_folders_that_were_made_for_it_go_too(tmp_path: Path):
    storage = open_storage(tmp_path / "a" / "b")
    with pytest.raises(ZeroDivisionError), new_folder(storage, "one"):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def test_row1_a_file_system_that_cannot_exchange_names(tmp_path: Path):
    storage = open_storage(tmp_path)
    write(storage, "one", b"1")
    with mock.patch.object(posix, "exchange", side_effect=OSError(22, "Invalid argument")):
        place = write(storage, "one", b"2", overwrite=True)
        assert tree(storage) == expected(place, b"2")
        failing = Recording(storage)
        with (
            mock.patch.object(
                failing, "rename_tree", side_effect=[None, ObjectExistsError("no", operation="rename"), None]
            ) as rename,
            pytest.raises(ObjectExistsError),
        ):
            write(failing, "one", b"3", overwrite=True)
        assert rename.call_args_list[0].args == tuple(reversed(rename.call_args_list[2].args)), "the old one is put back"


def test_row1_a_reader_finds_the_old_or_the_new_one_at_every_moment(tmp_path: Path):
    storage = open_storage(tmp_path)
    write(storage, "one", b"1")

    class Looking(StorageWrapper):
        def before(self, operation: str, name: str) -> None:
            assert storage.read("one/_CHECKPOINT_METADATA") in (b"1", b"2")

        after = before

    write(Looking(storage), "one", b"2", overwrite=True)


def test_row1_a_file_is_in_the_way(tmp_path: Path):
    (tmp_path / "one").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(StorageError, match="a file of that name"):
            write(open_storage(tmp_path), "one", b"1", overwrite=overwrite)
    assert (tmp_path / "one").read_text() == "mine"
