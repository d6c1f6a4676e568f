"""The complete checkpoints at a URL, and how each is opened: steps of a run, of what Orbax alone wrote, or one checkpoint."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Set
from pathlib import Path
from typing import TypeVar

from raystate.core.formats.entries import LogEntry
from raystate.core.formats.errors import ConfigError, CorruptCheckpointError, RaystateError, StepNotFoundError, StorageError
from raystate.core.formats.log import published_steps
from raystate.core.formats.names import told_newest
from raystate.core.formats.texts import counted
from raystate.legacy.directory import LegacyCheckpoint, legacy_checkpoint
from raystate.orbax.step_reader import StepReader
from raystate.storage import (
    LogReader,
    Storage,
    StorageUrl,
    describe_foreign,
    find_package,
    foreign_checkpoints,
    is_missing,
    marked_save,
    number_in,
    open_storage,
    step_folders,
    why_empty,
)
from raystate.storage.attempts import in_the_way
from raystate.storage.foreign import is_early, is_marked, runs_in
from raystate.storage.names import MARKER, METADATA, STATE, TREE_METADATA, step_of
from raystate.waits import AGAIN_S

logger = logging.getLogger("raystate")

T = TypeVar("T")

# Of a step that is replaced again and again while it is read; of newest steps that are retired, one after the other.
MOST_READS = 100


def open_step(storage: Storage, step: int, folder: str | None = None) -> StepReader:
    """A step in storage, to be read as its package says where it has one. `folder`: where it lies; None: where a run has it."""
    try:
        package = find_package(storage, step) if folder in (None, str(step)) else None
    except CorruptCheckpointError as error:
        # Its data are protected by checksums of their own; only the small files can't be checked without it.
        logger.warning("step %d is read without its package: %s", step, error.message)
        package = None
    return StepReader(storage, folder or str(step), step=step, package=package)


class Checkpoints:
    """Steps of a run, of a directory that Orbax alone wrote, or one checkpoint: the folder of a step, of a tree or of an item.

    Args:
        url: gs://…, s3://…, file://…, a directory or a PathLike. Nothing needs to be there yet.

    Raises:
        ConfigError: it is no usable URL, or a file that is no checkpoint, or lies below one.
    """

    def __init__(self, url: StorageUrl):
        self.storage = open_storage(url)
        self._single: SingleCheckpoint | LegacyCheckpoint | None = None
        self._is_known = False
        path = self.storage.local_path("") if self.storage.is_directory else None
        if path is not None and not os.path.isdir(path) and (why := self._why_none(path)):
            raise ConfigError(f"storage: {self.storage.url} {why}", field="storage", got=self.storage.url)
        self._folders: dict[int, str] = {}

    def _why_none(self, path: Path) -> str:
        """Why there can be no checkpoint at a path with no folder at it; "" if there can."""
        if not os.path.exists(path):
            why = in_the_way(str(path))
            return f"can be no folder: {why}" if why else ""
        if self.single is not None:
            return ""
        what = "a file, and none that flax wrote" if path.is_file() else "neither a directory nor the file of a checkpoint"
        way = "`raystate import` makes a run of .safetensors and .npz files"
        return f"is {what}; expected the directory of a run, of a step or of one checkpoint; {way}"

    @property
    def single(self) -> SingleCheckpoint | LegacyCheckpoint | None:
        """The one checkpoint whose folder or file this is; None: it is a run's, or nothing is there yet."""
        if not self._is_known:
            inside = {info.name for info in self.storage.list(recursive=False)}  # all that a run's reader pays for this question
            self._single = self._single_of(inside)
            # A folder that is missing, or being written or copied, may become one or the other.
            self._is_known = self._single is not None or f"{STATE}/" in inside or self._has_a_step(inside)
        return self._single

    def _has_a_step(self, inside: Set[str]) -> bool:
        folders = (name.rstrip("/") for name in inside if name.endswith("/"))
        return any(number_in(name) is not None and is_marked(self.storage, name) for name in folders)

    def _single_of(self, inside: Set[str]) -> SingleCheckpoint | LegacyCheckpoint | None:
        if (legacy := legacy_checkpoint(self.storage, inside)) is not None:
            return legacy
        for name in (TREE_METADATA, METADATA):  # a bare tree may have both
            if name in inside:
                return SingleCheckpoint(self.storage, name)
        named = number_in(self.storage.url.rpartition("/")[2]) is not None
        return SingleCheckpoint(self.storage, "") if named and f"{STATE}/" not in inside and is_early(self.storage, "") else None

    def steps(self) -> list[int]:
        """Complete, visible steps, ascending. Of a single checkpoint: its folder's number, 0 if that is none."""
        if self.single is not None:
            return [self.single.step] if self.single.is_there() else []
        self._folders = step_folders(self.storage)
        return sorted(self._folders)

    def check_there(self) -> None:
        """Raises StepNotFoundError if there is nothing at all: that is a mistyped path rather than a run that has yet to save."""
        if is_missing(self.storage):
            raise StepNotFoundError(self._without_steps(), path=self.storage.url)

    def folder(self, step: int) -> str:
        """Where a step lies below the storage; "" for a single checkpoint."""
        return "" if self.single is not None else self._folders.get(step, str(step))

    def home(self, step: int) -> tuple[Storage, str]:
        """(storage, folder below it) of a step; of a single checkpoint that is a run's step, as the run has it."""
        if self.single is not None and self.single.above is not None:
            return open_storage(self.single.above), str(step)
        return self.storage, self.folder(step)

    def open(self, step: int) -> StepReader:
        """Look at one of `steps`."""
        return open_step(self.storage, step, self.folder(step)) if self.single is None else self.single.open()

    def save_of(self, step: int) -> str | None:
        """What tells a step of a run from another one that is saved under its number later; None if Orbax alone wrote it."""
        own = self.single is None and self.folder(step) == str(step)
        return marked_save(self.storage, step) if own else None

    def existing(self, step: int | None) -> int:
        """The step itself, or (None) the newest.

        Raises:
            StepNotFoundError: there is none; says what there is instead.
        """
        steps = self.steps()
        if step is None:
            if not steps:
                raise StepNotFoundError(self._without_steps(), path=self.storage.url)
            return steps[-1]
        if step not in steps:
            message = f"{self.storage.url} has no step {step}; it has {told_newest(steps)}"
            if self.storage.list(str(step), recursive=False):
                message += (
                    f"; there is a folder {step}/, but no {MARKER} in it: an unfinished save, or a copy that has lost its marker"
                )
            elif not steps:
                message = self._without_steps()
            raise StepNotFoundError(message, step=step, path=self.storage.url)
        return step

    def read(self, step: int | None, read: Callable[[int, StepReader], T], *, alone: bool = True) -> T:
        """Read exactly this step; or, None, the newest, also if it is retired under our hands and another one is the newest then.

        Args:
            alone: nothing else is read in `read`, so that damage is this step's.

        Raises:
            StepNotFoundError: there is none, or it was retired meanwhile. Errors of `read` pass.
        """
        for tries in range(1, MOST_READS + 1):
            chosen = self.existing(step)
            try:
                return self.read_existing(chosen, functools.partial(read, chosen))
            except StepNotFoundError as error:
                if error.of_caller or step is not None or self.steps()[-1:] in ([], [chosen]):
                    raise
                if tries == MOST_READS:
                    error.add(f"so were the {tries - 1} newest ones before it: let the run keep more steps (keep_last)")
                    raise
            except CorruptCheckpointError as error:
                if not error.of_caller and alone and (others := [one for one in self.steps() if one != chosen]):
                    error.details["other_steps"] = tuple(others)
                    named = f"step {others[0]}" if len(others) == 1 else f"{len(others):,} other steps, the newest is {others[-1]}"
                    error.add(f"{self.storage.url} also has {named}; raystate verify tells what is whole")
                raise
        raise AssertionError("each try returns or raises")

    def read_existing(self, step: int, read: Callable[[StepReader], T]) -> T:
        """Read a step, and tell damage from one that somebody else has retired, or saved anew, while it was read.

        `verify` and `ls`, which also look at what is damaged, ask for themselves.

        Raises:
            StepNotFoundError: it is gone.
            CorruptCheckpointError, StorageError: as `read`; the step is there. Or it was replaced each time that it was read.
        """
        for tries in range(1, MOST_READS + 1):
            reader: StepReader | None = None
            try:
                reader = self.open(step)
                got = read(reader)
                # Without a package a small file that goes looks as if it had never been there.
                if reader.save is not None or step in self.steps():
                    return got
                raise StepNotFoundError("its files went one after the other")
            except (CorruptCheckpointError, StorageError, StepNotFoundError) as error:
                if error.of_caller:
                    raise
                if step not in self.steps():
                    raise self.retired(step) from error
                if reader is None or (self.open(step).save == reader.save and not reader.is_replaced()):
                    raise
                if tries == MOST_READS:
                    error.add(f"in each of {tries} tries another checkpoint had taken its place")
                    raise
            time.sleep(AGAIN_S)
        raise AssertionError("each try returns or raises")

    def retired(self, step: int) -> StepNotFoundError:
        """The error for a step that went while it was read."""
        url = self.storage.url
        return StepNotFoundError(f"step {step} of {url} was retired while it was read", step=step, path=url)

    def _without_steps(self) -> str:
        url = self.storage.url
        if self.single is not None:
            return f"{url} has no step: it is the folder of one checkpoint, and has no {MARKER}: unfinished, or a copy that has lost it"
        if empty := why_empty(self.storage):
            return f"{url} has no step: {empty}"
        if runs := runs_in(self.storage):
            return f"{url} has no step: it holds {counted(len(runs), 'run')}, which raystate ls lists; the first is {url}/{runs[0]}"
        if found := foreign_checkpoints(self.storage):
            return f"{url} has no step: {describe_foreign(url, found)}; raystate.load(…) reads one by its own path"
        if (claimed := self._claimed()) is not None:
            live = published_steps(claimed)
            if not live:
                return f"{url} has no step: none of run {claimed.run!r} is durable yet"
            if self.steps():
                return f"{url} had no step a moment ago: the first one of run {claimed.run!r} has come since, look again"
            return (
                f"{url} has no step, but the log of run {claimed.run!r} has {told_newest(live)}: their folders or markers are lost"
            )
        there = [info.name for info in self.storage.list(recursive=False)]
        more = f" and {len(there) - 3} more" if len(there) > 3 else ""
        shown = ", ".join(map(repr, there[:3]))
        return f"{url} has no step: expected folders of steps, such as 1200/, with a checkpoint in each; there is {shown}{more}"

    def _claimed(self) -> LogEntry | None:
        """The newest entry of the run's log; None: there is none, or it can't be read."""
        try:
            return LogReader(self.storage).tail()
        except RaystateError:
            return None


class SingleCheckpoint:
    """The folder of one checkpoint, or of one item: a tree that Orbax wrote without items lies like one.

    Args:
        storage: its folder.
        metadata: the file of it that says which of both it is; "": early Orbax's step, which has none.
    """

    def __init__(self, storage: Storage, metadata: str):
        self._storage = storage
        self._metadata = metadata
        above, _, self._name = storage.url.rpartition("/")
        self.step = number_in(self._name) or 0
        numbered = metadata in (METADATA, "") and step_of(self._name) is not None and not above.endswith("/")
        self.above = above if numbered else None  # URL of what has it among its steps

    def is_there(self) -> bool:
        if not self._metadata:
            return is_early(self._storage, "")
        markers = [self._metadata]
        if not self._storage.is_directory:
            markers.append(MARKER)
        return all(self._storage.exists(name) for name in markers)

    def open(self) -> StepReader:
        if self.above is not None:
            return open_step(open_storage(self.above), self.step)
        number = number_in(self._name)
        return StepReader(self._storage, "", step=self._name if number is None else number)
