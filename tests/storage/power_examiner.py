"""Plays what comes after a power cut, and says what is wrong then."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raystate.core.formats.entries import LogEntry, WrittenEntry
from raystate.core.formats.errors import RaystateError
from raystate.core.formats.log import claim_entry, live_steps
from raystate.machine.checksum import crc32c
from raystate.orbax.step_reader import StepReader
from raystate.storage import RunLog, StepFolder, Storage, collect_garbage, foreign_steps, open_storage, visible_steps
from raystate.storage.base import TEMPORARY_PREFIX
from raystate.storage.names import ASIDE, BASES, GUARD, LOG, STATE, WORK, log_name, split_saved
from tests.orbax.state_example import array
from tests.power.recorder import Replay, Tree
from tests.storage.power_scenario import RUN


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What whoever comes next finds in a tree, before and after it took over."""

    problem: str = ""
    entries: int = 0  # in the log, before
    visible: tuple[int, ...] = ()  # before
    aside: tuple[int, ...] = ()  # before
    live: tuple[int, ...] = ()  # after


class Examiner:
    """Looks at replays. Trees that differ only in what nobody reads are looked at once.

    Args:
        folder: for the trees; empty.
        place: of the storage, relative to the recorded directory.
        restores: whether the steps hold real arrays, which are then read.

    Attributes:
        replays: so many were looked at.
        restored: so many steps were read back.
    """

    def __init__(self, folder: Path, place: str, *, restores: bool):
        self._folder = folder
        self._place = place
        self._restores = restores
        self._known: dict[frozenset[tuple[str, bytes | None]], Seen] = {}
        self.replays = 0
        self.restored = 0

    @property
    def trees(self) -> int:
        """Different ones."""
        return len(self._known)

    def problem(self, replay: Replay) -> str:
        """What is wrong after this power cut; "" if nothing is."""
        self.replays += 1
        key = frozenset(read_part(replay.tree).items())
        if key not in self._known:
            folder = self._folder / str(len(self._known))
            replay.write_to(folder)
            try:
                self._known[key] = self._play(open_storage(folder / self._place))
            except (AssertionError, RaystateError, KeyError) as error:
                self._known[key] = Seen(problem=f"{type(error).__name__}: {error}")
            shutil.rmtree(folder)
        seen = self._known[key]
        wrong = seen.problem or "; ".join(broken_promises(replay.marks, seen))
        return wrong and f"{wrong}\n{replay}"

    def _play(self, storage: Storage) -> Seen:
        entries = log_entries(storage)
        assert not entries or storage.exists(GUARD), "stock Orbax's cleanup would delete the log"
        saves = {one.step: one.save for entry in entries for one in entry.live}
        visible = visible_steps(storage)
        for step in visible:
            check_complete(storage, str(step), step, saves[step])
        aside = aside_steps(storage)
        entry = take_over(storage)
        assert visible_steps(storage) == live_steps(entry), "live steps are published, others are not"
        collect_garbage(storage)
        for step in live_steps(entry):
            check_complete(storage, str(step), step, saves[step])
            if self._restores:
                check_restored(storage, step)
                self.restored += 1
        return Seen(entries=len(entries), visible=visible, aside=aside, live=live_steps(entry))


def read_part(tree: Tree) -> Tree:
    """The tree without what nobody reads: work folders of saves that are not in the log, and unfinished files beside steps."""
    log = b"".join(data or b"" for name, data in tree.items() if f"{LOG}/" in name or f"{BASES}/" in name)
    part: Tree = {}
    for name, data in tree.items():
        work = name.partition(f"{WORK}/")[2].partition("/")[0]
        is_read = f'"{work.partition(".")[2]}"'.encode() in log if work else not (STATE in name and TEMPORARY_PREFIX in name)
        if is_read:
            part[name] = data
    return part


def log_entries(storage: Storage) -> list[WrittenEntry]:
    """All entries. Each parses, and none is missing before the last, which can be read with its base."""
    log = RunLog(storage)
    names = [info.name for info in storage.list(LOG)]
    assert names == [log_name(seq) for seq in range(1, len(names) + 1)], f"the log has a gap: {names}"
    entries = [log.read_header(seq) for seq in range(1, len(names) + 1)]
    assert log.tail() == (log.read(entries[-1].seq) if entries else None)
    return entries


def take_over(storage: Storage) -> LogEntry:
    """What the next Coordinator does before anything else: claim, then finish every open intent."""
    entry = RunLog(storage).claim(lambda tail: claim_entry(tail, "next", RUN, foreign_steps(storage, live_steps(tail))))
    for intent in entry.intents:
        folder = StepFolder(storage, intent.step, intent.save)
        if intent.kind == "commit":
            folder.publish(folder.read_package())
        else:
            folder.retire(aside=intent.aside)
    return entry


def aside_steps(storage: Storage) -> tuple[int, ...]:
    """Steps whose data are kept below aside/, complete."""
    steps: list[int] = []
    for info in storage.list(ASIDE, recursive=False):
        folder = info.name.rstrip("/")
        found = split_saved(folder.rpartition("/")[2])
        assert found is not None, folder
        check_complete(storage, folder, *found)
        steps.append(found[0])
    return tuple(steps)


def check_complete(storage: Storage, folder: str, step: int, save: str | None) -> None:
    """The folder holds what the step's package says, byte for byte, and nothing unfinished."""
    package = StepFolder(storage, step, save).read_package()
    assert not list(storage.local_path(folder).rglob(f"{TEMPORARY_PREFIX}*")), f"{folder} has unfinished files"
    for name, data in package.files.items():
        assert storage.read(f"{folder}/{name}") == data, f"{folder}/{name} is not what its package says"
    for obj in package.objects:
        data = storage.read(f"{folder}/{obj.name}")
        assert (len(data), crc32c(data)) == (obj.size, obj.crc32c), f"{folder}/{obj.name} is damaged"


def check_restored(storage: Storage, step: int) -> None:
    """The arrays that a reader gets are those that were saved, bit for bit."""
    reader = StepReader(storage, str(step))
    arrays = [(index, leaf.name, leaf.array) for index, leaf in enumerate(reader.tree("state").leaves) if leaf.array is not None]
    assert len(arrays) > 5
    got = reader.read("state", [(index, (0,) * len(spec.shape), spec.shape) for index, _, spec in arrays])
    for (_, name, _), data in zip(arrays, got, strict=True):
        expected = array(name, scale=step)
        assert (data.dtype, data.shape, np.asarray(data).tobytes()) == (expected.dtype, expected.shape, expected.tobytes()), name


def broken_promises(marks: tuple[str, ...], seen: Seen) -> Iterator[str]:
    """What the run had acknowledged when the power failed, and what is not so."""
    known = set(marks)
    for mark in marks:
        word, _, number = mark.partition(" ")
        is_leaving = f"retires {number}" in known
        match word:
            case "appended" if seen.entries < int(number):
                yield f"entry {number} was appended and is gone"
            case "committed" if int(number) not in seen.live and not is_leaving:
                yield f"step {number} was committed and is not live"
            case "published" if int(number) not in seen.visible and not is_leaving:
                yield f"step {number} was published and is not visible"
            case "retired" | "set-aside" if int(number) in seen.visible:
                yield f"step {number} was retired and is visible"
            case "set-aside" if int(number) not in seen.aside:
                yield f"step {number} was set aside and is gone"
            case _:
                pass
