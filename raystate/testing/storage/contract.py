"""What every storage back end promises, as tests.

A back end is complete when they pass; `StorageModel` looks for what they forgot. Subclass `StorageContract` in a test file, with a
fixture `storage` that gives an empty storage whose operations give up after a few seconds at most.
"""

from __future__ import annotations

import pickle
import threading

import pytest

from raystate.core.formats.errors import StorageError
from raystate.storage import ObjectChangedError, ObjectExistsError, ObjectMissingError, Storage
from raystate.storage.names import GUARD
from raystate.testing.storage.faults import Failing, LosingAnswers

CREATORS = 12  # that race for one name


def tree(storage: Storage, prefix: str = "") -> dict[str, bytes]:
    """All objects below a folder with their bytes."""
    return {info.name: storage.read(info.name) for info in storage.list(prefix)}


class StorageContract:
    """The tests. Each gets `storage`: empty, for this test alone, not even created yet."""

    def test_create_then_read(self, storage: Storage):
        storage.create("a/b/c.json", b"bytes")
        assert storage.read("a/b/c.json") == b"bytes"
        assert storage.exists("a/b/c.json")
        info = storage.stat("a/b/c.json")
        assert (info.name, info.size, info.is_folder) == ("a/b/c.json", 5, False)

    def test_an_empty_object_exists(self, storage: Storage):
        storage.create("empty", b"")
        assert storage.read("empty") == b""
        assert storage.stat("empty").size == 0

    def test_create_is_once(self, storage: Storage):
        storage.create("name", b"first")
        with pytest.raises(ObjectExistsError) as caught:
            storage.create("name", b"first")
        assert (caught.value.operation, "name" in caught.value.path) == ("create", True)
        assert storage.read("name") == b"first"

    def test_one_of_many_creators_wins(self, storage: Storage):
        start = threading.Barrier(CREATORS)
        won: list[bytes] = []

        def create(data: bytes) -> None:
            start.wait(timeout=300)
            try:
                storage.create("folder/name", data)
            except ObjectExistsError:
                return
            won.append(data)

        threads = [threading.Thread(target=create, args=(bytes([index]) * 1000,)) for index in range(CREATORS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=300)
        assert [storage.read("folder/name")] == won
        assert list(tree(storage)) == ["folder/name"]

    def test_create_or_same(self, storage: Storage):
        storage.create_or_same("name", b"same")
        storage.create_or_same("name", b"same")
        with pytest.raises(ObjectExistsError, match="other bytes"):
            storage.create_or_same("name", b"different")
        assert storage.read("name") == b"same"

    def test_create_or_same_survives_a_lost_answer(self, storage: Storage):
        losing = LosingAnswers(storage)
        losing.create_or_same("name", b"data")
        assert losing.times == 0
        assert storage.read("name") == b"data"

    def test_create_or_same_reports_what_really_failed(self, storage: Storage):
        with pytest.raises(StorageError, match="out of service"):
            Failing(storage, "create").create_or_same("name", b"data")
        with pytest.raises(StorageError, match="create name"):
            Failing(storage, "create", "read").create_or_same("name", b"data")
        assert not storage.exists("name")

    @pytest.mark.parametrize("name", ["nothing", "a/nothing", "a/b/nothing", "a"])
    def test_absent_names(self, storage: Storage, name: str):
        storage.create("a/b/c", b"1")
        assert not storage.exists(name)
        assert not storage.delete(name)
        for call in (storage.read, storage.stat):
            with pytest.raises(ObjectMissingError) as caught:
                call(name)
            assert caught.value.operation in ("read", "stat")
            assert name in caught.value.path

    def test_below_an_object_is_nothing(self, storage: Storage):
        storage.create("object", b"1")
        assert not storage.exists("object/below")
        assert storage.list("object/below") == []
        with pytest.raises(ObjectMissingError):
            storage.read("object/below")

    def test_list(self, storage: Storage):
        for name in ("12/x", "1200/state/d/1", "1200/state/d/0", "1200/commit", "top"):
            storage.create(name, name.encode())
        assert [info.name for info in storage.list()] == ["12/x", "1200/commit", "1200/state/d/0", "1200/state/d/1", "top"]
        assert [info.name for info in storage.list(recursive=False)] == ["12/", "1200/", "top"]
        assert [info.name for info in storage.list("1200", recursive=False)] == ["1200/commit", "1200/state/"]
        assert [info.name for info in storage.list("12")] == ["12/x"], "a prefix is a folder, not a string"
        assert storage.list("nothing") == storage.list("nothing", recursive=False) == []
        assert {info.name: info.size for info in storage.list("1200")} == {
            "1200/commit": 11, "1200/state/d/0": 14, "1200/state/d/1": 14
        }  # fmt: skip
        for info in storage.list():
            assert info == storage.stat(info.name), "list and stat give the same generation"

    def test_a_new_storage_is_empty_and_reading_creates_nothing(self, storage: Storage):
        assert storage.list() == []
        assert not storage.exists("a")
        if storage.is_directory:
            assert not storage.local_path("").exists()

    def test_delete(self, storage: Storage):
        storage.create("a/b", b"1")
        assert storage.delete("a/b") is True
        assert storage.delete("a/b") is False
        assert not storage.exists("a/b")
        storage.create("a/b", b"again")
        assert storage.read("a/b") == b"again"

    def test_delete_of_a_generation(self, storage: Storage):
        storage.create("a", b"1")
        before = storage.stat("a").generation
        assert before
        storage.delete("a")
        storage.create("keep-the-inode", b"x")
        storage.create("a", b"2")
        with pytest.raises(ObjectChangedError):
            storage.delete("a", before)
        assert storage.read("a") == b"2"
        assert storage.delete("a", storage.stat("a").generation) is True
        assert storage.delete("a", before) is False

    def test_delete_tree(self, storage: Storage):
        for name in ("12/a/b", "12/c", "1200/a", "top"):
            storage.create(name, b"1")
        storage.delete_tree("12")
        storage.delete_tree("12")
        assert [info.name for info in storage.list()] == ["1200/a", "top"]
        assert storage.list("12", recursive=False) == []

    def test_copy(self, storage: Storage):
        storage.create("a/b", b"1")
        for _ in range(2):
            storage.copy("a/b", "c/d")
        assert tree(storage) == {"a/b": b"1", "c/d": b"1"}
        with pytest.raises(ObjectMissingError):
            storage.copy("nothing", "x")

    @pytest.mark.parametrize(
        "name", ["", "/a", "a/", "a//b", "../a", "a/../b", "./a", "a/.", "a\0b", ".raystate-tmp-1", "a/.raystate-tmp-2"]
    )
    def test_names_stay_inside(self, storage: Storage, name: str):
        for call in (storage.read, storage.exists, storage.stat, storage.delete, storage.delete_tree, storage.fsync_tree):
            with pytest.raises(StorageError, match="not a valid object name"):
                call(name)
        with pytest.raises(StorageError, match="not a valid object name"):
            storage.create(name, b"")
        assert storage.list() == []

    def test_odd_but_valid_names(self, storage: Storage):
        names = ["..a", "a..b", "ä ö", "a%20b", "#x?y", ".hidden", "{curly}", "-"]
        for name in names:
            storage.create(f"f/{name}", name.encode())
        assert {info.name: storage.read(info.name) for info in storage.list("f")} == {f"f/{name}": name.encode() for name in names}

    def test_self_test_leaves_nothing_that_a_run_has_not(self, storage: Storage):
        storage.self_test()
        storage.self_test()
        assert [info.name for info in storage.list()] == ([] if storage.is_directory else [GUARD])

    def test_a_storage_pickles(self, storage: Storage):
        storage.create("a", b"1")
        other = pickle.loads(pickle.dumps(storage))
        assert (other.url, other.is_directory, other.read("a")) == (storage.url, storage.is_directory, b"1")

    def test_rename_and_local_paths_are_for_directories(self, storage: Storage):
        storage.create("from/a", b"1")
        if not storage.is_directory:
            for call in (lambda: storage.rename_tree("from", "to"), lambda: storage.local_path("from")):
                with pytest.raises(StorageError, match="not possible"):
                    call()
            return
        assert storage.local_path("from/a").read_bytes() == b"1"
        storage.rename_tree("from", "deep/er/to")
        assert tree(storage) == {"deep/er/to/a": b"1"}
        with pytest.raises(ObjectMissingError):
            storage.rename_tree("from", "deep/er/to")
        storage.create("other/b", b"2")
        with pytest.raises(ObjectExistsError):
            storage.rename_tree("other", "deep/er/to")
        with pytest.raises(ObjectMissingError):
            storage.rename_tree("absent", "target")
        assert tree(storage) == {"deep/er/to/a": b"1", "other/b": b"2"}
