"""flax's calls and older files on gs://: nothing can be renamed there, so a marker says what is complete."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import serialization

import raystate
from raystate.compat import flax_checkpoints as ours
from raystate.compat import flax_directory, flax_writing
from raystate.core.formats.errors import CorruptCheckpointError, StorageError
from raystate.storage import Storage, open_storage
from tests.storage.backends import gcs_backend
from tests.storage.interrupted import Failing, Interrupted

TREE = {"a": jnp.arange(4.0), "b": [np.arange(3), 5], "name": "x"}
OTHER = {"a": jnp.ones(4), "b": [np.zeros(3, np.int64), 6], "name": "y"}


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Storage]:
    with gcs_backend(tmp_path) as storage:
        yield storage


def same(got: Any, wanted: Any) -> None:
    assert np.array_equal(got["a"], wanted["a"]) and np.array_equal(got["b"][0], wanted["b"][0])
    assert (got["b"][1], got["name"]) == (wanted["b"][1], wanted["name"])


def folders(bucket: Storage) -> list[str]:
    return [info.name for info in bucket.list(recursive=False)]


def test_on_gcs(bucket: Storage):
    url = bucket.url
    assert ours.restore_checkpoint(url, TREE) is TREE and ours.latest_checkpoint(url) is None
    assert ours.save_checkpoint(url, TREE, 1) == f"{url}/checkpoint_1"
    assert ours.save_checkpoint(f"{url}/", OTHER, 2, keep=2) == ours.latest_checkpoint(url) == f"{url}/checkpoint_2"
    same(ours.restore_checkpoint(url, TREE), OTHER)
    same(ours.restore_checkpoint(url, OTHER, step=1), TREE)
    same(raystate.load(f"{url}/checkpoint_1"), TREE)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        same(checkpointer.restore(f"{url}/checkpoint_2", item=TREE), OTHER)
    with pytest.raises(ValueError, match="checkpoint_2 already exists"):
        ours.save_checkpoint(url, TREE, 2)
    ours.save_checkpoint(url, OTHER, 1, overwrite=True)
    assert folders(bucket) == ["checkpoint_1/"]
    same(ours.restore_checkpoint(url, TREE), OTHER)
    ours.save_checkpoint(url, TREE, 3)
    assert folders(bucket) == ["checkpoint_3/"]


def test_a_save_that_died_on_gcs_is_not_seen_and_can_be_repeated(bucket: Storage, monkeypatch: pytest.MonkeyPatch):
    ours.save_checkpoint(bucket.url, TREE, 1)
    kind = type(bucket)
    whole = kind.create

    def create(self: Storage, name: str, data: bytes) -> None:
        if name.endswith("commit_success.txt"):
            raise StorageError("made to fail", operation="create", path=name)
        whole(self, name, data)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "create", create)
        with pytest.raises(StorageError, match="made to fail"):
            ours.save_checkpoint(bucket.url, OTHER, 2)
        assert folders(bucket) == ["checkpoint_1/"]  # a failed one leaves nothing
    for info in bucket.list("checkpoint_1"):  # a dead one does
        if not info.name.endswith("commit_success.txt"):
            bucket.copy(info.name, info.name.replace("checkpoint_1", "checkpoint_2"))
    assert ours.available_steps(bucket.url) == [1]
    with pytest.raises(raystate.StepNotFoundError, match=r"commit_success\.txt"):
        raystate.load(f"{bucket.url}/checkpoint_2")
    ours.save_checkpoint(bucket.url, OTHER, 2)
    same(ours.restore_checkpoint(bucket.url, TREE), OTHER)
    assert folders(bucket) == ["checkpoint_2/"]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    "error", [StorageError("503"), pytest.param(KeyboardInterrupt(), marks=pytest.mark.long)], ids=["503", "ctrl-c"]
)
@pytest.mark.parametrize(
    "forms", ["tree tree", "file file", *(pytest.param(one, marks=pytest.mark.long) for one in ("tree file", "file tree"))]
)
def test_an_overwrite_that_fails_on_gcs_leaves_a_whole_one(
    bucket: Storage, monkeypatch: pytest.MonkeyPatch, error: BaseException, after: bool, forms: str
):
    first, second = (form == "tree" for form in forms.split())
    nth, failing, found = 0, None, {}

    def save(tree: Any, step: int, *, as_tree: bool) -> None:
        with flax.config.temp_flip_flag("use_orbax_checkpointing", as_tree):
            ours.save_checkpoint(bucket.url, tree, step, keep=0, overwrite=True)

    for step in (1, 2, 3):
        save(TREE, step, as_tree=first)
    before = contents(bucket)
    while failing is None or failing.left < 0:
        with monkeypatch.context() as patch:
            changing = [(type(bucket), name) for name in ("create", "delete", "delete_all")]
            failing = Failing(patch, [*changing, (flax_writing, "write_item")], nth, error, after=after)
            with contextlib.suppress(type(error)):
                save(OTHER, 3, as_tree=second)
        found = contents(bucket)
        assert ours.available_steps(bucket.url) == [1, 2, 3], nth
        if found != before:  # the new one is complete
            same(ours.restore_checkpoint(bucket.url, TREE, 3), OTHER)
            save(TREE, 3, as_tree=first)
            before = contents(bucket)
        nth += 1
    assert nth > 3 and found != before


@pytest.mark.parametrize("old", [False, pytest.param(True, marks=pytest.mark.long)], ids=["alone", "over an old one"])
def test_a_handler_that_saves_and_exits_keeps_what_it_saved(bucket: Storage, monkeypatch: pytest.MonkeyPatch, old: bool):
    """As one does on SIGTERM. The save that it had interrupted removed its files, as if they were its own, or put old ones among them."""
    nth, came = 0, True
    while came:
        url = f"{bucket.url}/{nth}"
        if old:
            ours.save_checkpoint(url, TREE, 1)

        def handler(_: Storage, url: str = url) -> bool:
            with monkeypatch.context() as patch:
                patch.setattr(flax_directory, "open_storage", open_storage)
                ours.save_checkpoint(url, OTHER, 1, overwrite=True)
            return True

        interrupted = Interrupted(open_storage(url), nth, "after", handler, raises=SystemExit(0))
        with monkeypatch.context() as patch, contextlib.suppress(SystemExit):
            patch.setattr(flax_directory, "open_storage", lambda _, storage=interrupted: storage)
            ours.save_checkpoint(url, TREE, 1, overwrite=old)
        came = interrupted.came
        same(ours.restore_checkpoint(url, TREE), OTHER if came else TREE)
        nth += 1
    assert nth > 5


def contents(bucket: Storage) -> dict[str, bytes]:
    return {info.name: bucket.read(info.name) for info in bucket.list() if info.name.startswith("checkpoint_3")}


def test_files_on_gcs(bucket: Storage):
    before = flax.config.flax_use_orbax_checkpointing
    flax.config.update("flax_use_orbax_checkpointing", False)
    try:
        for step in (1, 2):
            ours.save_checkpoint(bucket.url, TREE, step, keep=2)
        ours.save_checkpoint(bucket.url, OTHER, 2, keep=2, overwrite=True)
    finally:
        flax.config.update("flax_use_orbax_checkpointing", before)
    assert folders(bucket) == ["checkpoint_1", "checkpoint_2"]
    same(ours.restore_checkpoint(bucket.url, TREE), OTHER)
    same(raystate.load(f"{bucket.url}/checkpoint_1", TREE), TREE)
    bucket.create("checkpoint_3", serialization.msgpack_serialize({"a": "//GDAPlaceholder:a"}))
    bucket.create("checkpoint_3_gda/a/.zarray", b"{}")
    with pytest.raises(CorruptCheckpointError, match=r"never finished: there is no checkpoint_3_gda/commit_success\.txt"):
        raystate.load(f"{bucket.url}/checkpoint_3")
    bucket.create("checkpoint_4/checkpoint", serialization.msgpack_serialize({"a": 1}))
    with pytest.raises(CorruptCheckpointError, match=r"checkpoint_4 was never finished: there is no commit_success\.txt"):
        raystate.load(f"{bucket.url}/checkpoint_4")
    bucket.create("checkpoint_4/commit_success.txt", b"")
    assert raystate.load(f"{bucket.url}/checkpoint_4") == {"a": 1}
