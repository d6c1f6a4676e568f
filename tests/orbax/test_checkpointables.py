"""A user's own checkpointable as an item: Orbax v1's `StatefulCheckpointable`, which writes and reads its own files."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import pytest
from orbax.checkpoint import v1

import raystate
from raystate.arrays import checkpointables
from raystate.arrays.checkpointables import is_checkpointable
from raystate.arrays.items import pack_items
from raystate.core.formats.errors import ConfigError, ReferenceMismatchError
from raystate.core.formats.own_files import MOST_BYTES
from raystate.inspection.verification import verify_step
from raystate.storage import open_storage
from raystate.transfer import import_steps, open_source
from tests.model.world import Rank, World

TREE = {"w": np.arange(6, dtype=np.float32)}


@dataclasses.dataclass
class Vocabulary:
    """As a user writes one: a file at once, and files in folders in the background."""

    words: dict[str, int]
    blob: bytes = b""

    async def save(self, directory: Any) -> Any:
        words, blob = dict(self.words), self.blob  # what changes later is not of this step

        async def rest() -> None:
            folder = await directory.await_creation()
            await asyncio.sleep(0)
            if jax.process_index() == 0:
                (folder / "words.json").write_text(json.dumps(words))
                (folder / "more" / "deep").mkdir(parents=True)
                (folder / "more" / "deep" / "_METADATA").write_bytes(blob)

        return rest()

    async def load(self, directory: Any) -> Any:
        async def rest() -> None:
            self.words = json.loads((directory / "words.json").read_text())
            self.blob = (directory / "more" / "deep" / "_METADATA").read_bytes()

        return rest()


class Writes:
    """Writes what a test says."""

    def __init__(self, write: Callable[[Any], Any]):
        self.write = write
        self.loaded: list[str] = []

    async def save(self, directory: Any) -> Any:
        folder = await directory.await_creation()

        async def rest() -> None:
            self.write(folder)

        return rest()

    async def load(self, directory: Any) -> Any:
        async def rest() -> None:
            self.loaded = sorted(path.name for path in directory.iterdir())

        return rest()


def vocabulary() -> Vocabulary:
    return Vocabulary({"ä": 1, "<script>": 2}, bytes(range(256)))


def test_stock_v1_loads_a_checkpointable_that_raystate_saved(tmp_path: Path):
    raystate.save(tmp_path / "one", TREE, items={"words": vocabulary(), "note": {"a": 1}})
    found = v1.load_checkpointables(str(tmp_path / "one"), {"words": Vocabulary({}), "state": TREE, "note": None})
    assert found["words"] == vocabulary()
    np.testing.assert_array_equal(found["state"]["w"], TREE["w"])
    assert (tmp_path / "one/words/more/deep/_METADATA").read_bytes() == bytes(range(256))
    assert raystate.metadata(tmp_path / "one").kinds["words"] == "files"


def test_raystate_loads_a_checkpointable_that_stock_v1_saved(tmp_path: Path):
    v1.save_checkpointables(str(tmp_path / "one"), {"state": TREE, "words": vocabulary()})
    mine = Vocabulary({})
    found = raystate.load(tmp_path / "one", items={"words": mine, "state": TREE})
    assert found["words"] is mine and mine == vocabulary()
    np.testing.assert_array_equal(found["state"]["w"], TREE["w"])
    with v1.training.Checkpointer(str(tmp_path / "many")) as stock:
        stock.save_checkpointables(3, {"state": TREE, "words": vocabulary()})
    mine = Vocabulary({})
    assert raystate.Reader(tmp_path / "many").restore(items={"words": mine}).items["words"] is mine
    assert mine == vocabulary()
    import_steps(str(tmp_path / "run"), open_source(str(tmp_path / "many")))
    mine = Vocabulary({})
    raystate.load(tmp_path / "run", items={"words": mine})
    assert mine == vocabulary()


def run(script: Any, *, ranks: int) -> None:
    world = World(1, ranks=ranks, nodes=ranks, save_every_steps=2)
    try:
        members = [Rank(world, number, script) for number in range(ranks)]
        world.run(members)
        for member in members:
            member.kill()
    finally:
        world.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_saves_and_restores_a_checkpointable_with_its_step(ranks: int):
    def script(rank: Rank) -> None:
        manager = rank.open("first")
        own = Writes(lambda folder: (folder / f"of_{rank.number}").write_text("x"))
        words = vocabulary()
        manager.restore(TREE)
        for step in range(1, 4):
            words.words["step"] = step
            promised = manager.save(step, TREE, items={"words": words, "own": own})
            words.words["step"] = -1  # after save: not of this step
            assert promised == (step == 2)
            manager.wait_until_finished()
        for step, tier in ((None, "memory"), (2, "storage")):
            again, names = Vocabulary({}), Writes(print)
            restored = manager.restore(TREE, step=step, items={"words": again, "own": names})
            assert restored is not None and restored.tier in (tier, "peer"), restored
            assert again.words == {**vocabulary().words, "step": step or 3} and again.blob == vocabulary().blob
            assert names.loaded == [f"of_{number}" for number in range(ranks)], (
                "the files of all processes, as in Orbax's one folder"
            )
        with pytest.raises(ReferenceMismatchError, match=r"'nope'.*it has.*words"):
            manager.restore(TREE, step=2, items={"nope": Vocabulary({})})
        with pytest.raises(ReferenceMismatchError, match="such an object"):
            manager.restore(TREE, step=2, items={"words": None})

    run(script, ranks=ranks)


def test_two_processes_that_write_one_file_differently_are_told():
    def script(rank: Rank) -> None:
        manager = rank.open("first")
        manager.restore(TREE)
        manager.save(2, TREE, items={"own": Writes(lambda folder: (folder / "same").write_text(str(rank.number)))})
        with pytest.raises(ConfigError, match=r"ranks 0 and 1 wrote different bytes to its file 'same'.*process 0 alone"):
            manager.wait_until_finished()

    run(script, ranks=2)


def _nest(folder: Any, depth: int) -> Path:
    inner = Path(folder, *["d" * 99] * depth)
    inner.mkdir(parents=True)
    return inner / "f"


@pytest.mark.parametrize(
    ("write", "told"),
    [
        (lambda folder: (folder / "big").write_bytes(bytes(MOST_BYTES + 1)), "16 MiB.*item of arrays.*get_state"),
        (lambda folder: [(folder / str(n)).touch() for n in range(1001)], "1,001 files"),
        (lambda folder: os.symlink("/etc/passwd", folder / "link"), "'link'.*neither a file nor a folder"),
        (lambda folder: os.mkfifo(folder / "pipe"), "'pipe'.*neither a file nor a folder"),
        (lambda folder: (folder / "commit_success.txt").touch(), "Orbax's own name"),
        (lambda folder: (folder / "a\nb").touch(), r"'a\\nb', which has a character that cannot be printed"),
        (lambda folder: (folder / os.fsdecode(b"\xff")).touch(), r"'\\udcff', which is no text in UTF-8"),
        (lambda folder: _nest(folder, 6).touch(), "has 601 bytes, and 500 are possible"),
    ],
    ids=["bytes", "files", "link", "pipe", "marker", "newline", "no text", "long"],
)
def test_what_a_step_cannot_keep_is_refused_in_save(tmp_path: Path, write: Any, told: str):
    with pytest.raises(ConfigError, match=f"(?s)item 'own'.*{told}"):
        raystate.save(tmp_path / "one", TREE, items={"own": Writes(write)})
    assert not (tmp_path / "one").exists()


def test_a_wrong_checkpointable_is_told(monkeypatch: pytest.MonkeyPatch):
    class Sync:
        def save(self, directory: Any) -> None: ...

        def load(self, directory: Any) -> None: ...

    class Nothing(Writes):
        async def save(self, directory: Any) -> Any:
            return None

    class Endless(Writes):
        async def save(self, directory: Any) -> Any:
            return asyncio.Event().wait()

    assert not is_checkpointable(Sync()) and not is_checkpointable(Vocabulary)
    with pytest.raises(ConfigError, match="async save, load"):
        pack_items({"own": Sync()}, process_index=0)
    with pytest.raises(ConfigError, match="no awaitable"):
        pack_items({"own": Nothing(print)}, process_index=0)
    monkeypatch.setattr(checkpointables, "LONGEST_S", 0.01)
    with pytest.raises(ConfigError, match="did not end"):
        pack_items({"own": Endless(print)}, process_index=0)


def test_in_a_notebook_which_has_a_running_loop(tmp_path: Path):
    async def cell() -> None:
        raystate.save(tmp_path / "one", TREE, items={"words": vocabulary()})
        mine = Vocabulary({})
        raystate.load(tmp_path / "one", items={"words": mine})
        assert mine == vocabulary()

    asyncio.run(cell())


def test_its_damaged_file_is_found(tmp_path: Path):
    raystate.save(tmp_path / "run/1", TREE, items={"words": vocabulary()})
    (tmp_path / "run/1/words/words.json").unlink()
    (tmp_path / "run/1/words/more/deep/_METADATA").unlink()
    (tmp_path / "run/1/words/commit_success.txt").unlink()
    assert [bad.name for bad in verify_step(open_storage(tmp_path / "run"), 1).bad] == ["1/words"]


def test_the_private_folder_is_removed_even_that_of_a_killed_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (left := tmp_path / "raystate-item-left").mkdir()
    (left / "file").touch()
    hour_ago_s = time.time() - 3600
    os.utime(left, (hour_ago_s, hour_ago_s))
    (young := tmp_path / "raystate-item-young").mkdir()
    checkpointables._sweep.cache_clear()
    pack_items({"words": vocabulary()}, process_index=0)
    assert list(tmp_path.iterdir()) == [young]


def test_a_grain_iterator_that_stock_v1_saved_is_set_in_place(tmp_path: Path):
    numbers = grain.MapDataset.range(100).to_iter_dataset()
    saved, iterator, imported = iter(numbers), iter(numbers), iter(numbers)
    read = [next(saved) for _ in range(5)]
    v1.save_checkpointables(str(tmp_path / "steps/3"), {"state": TREE, "data": saved})
    raystate.load(tmp_path / "steps/3", items={"data": iterator})
    import_steps(tmp_path / "run", open_source(str(tmp_path / "steps")))
    raystate.Reader(tmp_path / "run").restore(items={"data": imported})
    assert read == [0, 1, 2, 3, 4] and next(iterator) == next(imported) == 5


def test_a_checkpoint_that_was_saved_in_parts(tmp_path: Path):
    v1.partial.save(str(tmp_path / "3"), TREE)
    v1.partial.save(str(tmp_path / "3"), {"v": np.ones(2)})
    v1.partial.finalize(str(tmp_path / "3"))
    assert raystate.metadata(tmp_path / "3").kinds == {"state": "arrays"}
    state = raystate.Reader(tmp_path).restore().state
    assert state["w"].tolist() == TREE["w"].tolist() and state["v"].tolist() == [1.0, 1.0]
