"""Two who overwrite one checkpoint of a bucket at a time, each held up once, at any two of their operations."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from raystate.core.formats.errors import StorageError
from raystate.storage import Storage, StorageWrapper, new_folder, open_storage
from raystate.storage.names import MARKER
from tests.storage.test_placing import tree

LONGEST_S = 60.0


class HeldUp(StorageWrapper):
    """Before the nth operation it waits for `goes_on`."""

    def __init__(self, inner: Storage, nth: int):
        super().__init__(inner)
        self.left = nth
        self.waits = threading.Event()  # or has ended
        self.goes_on = threading.Event()

    def before(self, operation: str, name: str) -> None:
        self.left -= 1
        if self.left == -1:
            self.waits.set()
            assert self.goes_on.wait(LONGEST_S)


class Writer(threading.Thread):
    """Overwrites `one`. `save`: its id, once it was told that its checkpoint is there."""

    def __init__(self, storage: HeldUp, alike: bool):
        super().__init__(daemon=True)
        self.storage = storage
        self._alike = alike
        self.save: str | None = None

    def run(self) -> None:
        try:
            self.save = write(self.storage, self._alike)
        except StorageError:
            pass
        finally:
            self.storage.waits.set()


def write(storage: Storage, alike: bool) -> str:
    """As real ones: of two saves of one model the trees' descriptions are equal, and nothing else."""
    with new_folder(storage, "one", overwrite=True) as place:
        said = place.save.encode()
        storage.create(f"{place.prefix}/state/ocdbt.process_{place.save}h0/d/data", said)
        own = ("_CHECKPOINT_METADATA", "state/manifest.ocdbt", f"state/{MARKER}", MARKER)
        place.publish({"state/_METADATA": b"tree" if alike else said, **dict.fromkeys(own, said)})
    return place.save


def visible(storage: Storage, alike: bool) -> str | None:
    """Whose checkpoint readers find; None: none."""
    found = tree(storage)
    if f"one/{MARKER}" not in found:
        return None
    save = found[f"one/{MARKER}"].decode()
    own = ("_CHECKPOINT_METADATA", "state/manifest.ocdbt", f"state/{MARKER}", f"state/ocdbt.process_{save}h0/d/data")
    whole = all(found.get(f"one/{name}") == save.encode() for name in own)
    return save if whole and found.get("one/state/_METADATA") == (b"tree" if alike else save.encode()) else "a part"


@dataclass
class End:
    told: list[str]  # the saves that were told that they are there
    found: str | None
    before: str
    held_up: tuple[bool, bool]


def play(storage: Storage, alike: bool, nth: int, other: int) -> End:
    before = write(storage, alike)
    first, second = Writer(HeldUp(storage, nth), alike), Writer(HeldUp(storage, other), alike)
    for writer in (first, second):
        writer.start()
        assert writer.storage.waits.wait(LONGEST_S)
    for writer in (first, second):
        writer.storage.goes_on.set()
        writer.join(LONGEST_S)
    told = [writer.save for writer in (first, second) if writer.save is not None]
    return End(told, visible(storage, alike), before, (first.storage.left < 0, second.storage.left < 0))


@pytest.mark.long
@pytest.mark.parametrize("alike", [True, False], ids=["one model", "two models"])
def test_who_was_told_so_has_it_there_and_nothing_is_there_in_part(alike: bool, tmp_path: Path):
    ends = Counter[int]()
    nth, came = 0, True
    while came:
        other, other_came = 0, True
        while other_came:
            end = play(open_storage(f"memory://{tmp_path.name}/{alike}/{nth}/{other}"), alike, nth, other)
            assert end.found in (end.told or [end.before, None]), (nth, other, end)
            came, other_came = end.held_up
            ends[len(end.told)] += 1
            other += 1
        nth += 1
    assert ends[1] > ends[2] > 50
