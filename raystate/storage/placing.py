"""A folder that appears whole or not at all: for what is no step of a run, and so has no log that commits it.

A directory assembles it beside its place and renames it. An object store has the data in place under unique names, then creates the
fixed-name files one by one, the marker last.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from raystate.core.formats.errors import StorageError
from raystate.storage import posix
from raystate.storage.attempts import storage_error
from raystate.storage.base import Listing, ObjectExistsError, Storage
from raystate.storage.checkpoint_files import is_unfinished, items_of, not_of_one
from raystate.storage.names import MARKER, METADATA, ORBAX_TEMPORARY, STATE, TREE_METADATA
from raystate.storage.owner import owner_of
from raystate.storage.replacing import OLD, put_back, replace_tree
from raystate.storage.replacing_objects import FixedNames, replace_with_files

logger = logging.getLogger("raystate")

TEMPORARY = f".{ORBAX_TEMPORARY}-"
_LOCK_TRIES = 5


def new_save() -> str:
    """An id: unlike those of a run's saves, so that no garbage collection takes it for one."""
    return f"s{secrets.token_hex(8)}"


def new_folder(storage: Storage, folder: str, *, overwrite: bool = False) -> NewFolder:
    """A context manager: write below its `prefix`, then `publish`. Left without that, nothing remains of it.

    Args:
        storage: of the folder above.
        folder: its name there, one component.
        overwrite: replace a checkpoint of that name, if nothing else lies in its folder. In a
            directory whose file system can exchange two names (ext4, xfs, btrfs, tmpfs) a reader
            always finds the old one or the new one. On others, such as NFS, and on an object store,
            there is a moment with none. A reader in the midst of the old one has to begin anew;
            `StepReader` notices.
    """
    kind = _RenamedFolder if storage.is_directory else _MarkedFolder
    return kind(storage, folder, overwrite=overwrite)


class NewFolder(abc.ABC):
    """See `new_folder`.

    Attributes:
        save: unique, letters and digits: part of the name of each data object that is written below `prefix`.
        prefix: the folder to write data to.
    """

    prefix: str

    def __init__(self, storage: Storage, folder: str, *, overwrite: bool):
        self.storage = storage
        self.folder = folder
        self.overwrite = overwrite
        self.save = new_save()
        self.found: Listing = []  # what is to be replaced

    def __enter__(self) -> Self:
        """Raises StorageError: the name is taken, by something else than a checkpoint, or without `overwrite`; or the place is a run's."""
        if self.storage.is_directory:
            put_back(self.storage, self.folder)
        self.found = self._check_free()
        self._begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._end()
            return
        try:
            self._discard()
        except StorageError as failed:  # the failure that is already on its way says more
            logger.warning("left-overs of an unfinished save stay in %s/%s: %s", self.storage.url, self.prefix, failed.message)
        finally:
            self._end()

    @abc.abstractmethod
    def publish(self, files: Mapping[str, bytes]) -> None:
        """Make the folder visible, with these files beside the data: name relative to the folder -> bytes, `MARKER` included.

        Raises:
            StorageError: storage failed, or somebody else was faster.
        """

    @abc.abstractmethod
    def _begin(self) -> None: ...

    @abc.abstractmethod
    def _discard(self) -> None:
        """Remove what was written."""

    @abc.abstractmethod
    def _end(self) -> None:
        """At the end, also after a failure."""

    def _check_free(self) -> Listing:
        if owner := owner_of(self.storage.url if self.folder != STATE else f"{self.storage.url}/{STATE}"):
            raise self._refused(f"{owner}: save elsewhere")
        if self.storage.is_directory and self.storage.exists(self.folder):
            raise self._refused("there is a file of that name: save elsewhere, or remove it first")
        top = [info.name.removeprefix(f"{self.folder}/") for info in self.storage.list(self.folder, recursive=False)]
        if not top:
            # The folder that takes its place has neither its mode nor its group, and a shell in it
            # would be in a removed folder.
            if not self.overwrite and self.storage.is_directory and os.path.isdir(self.storage.local_path(self.folder)):
                raise self._refused("an empty folder is there: save to a new name in it, or replace it with overwrite=True")
            return []
        if not self.overwrite:
            unfinished = not self.storage.is_directory and MARKER not in top
            what = f"something without {MARKER} is there already, perhaps an unfinished save" if unfinished else "it exists already"
            raise self._refused(f"{what}: save elsewhere, or replace it with overwrite=True")
        if f"{STATE}/" in top:
            raise self._refused("it is the storage of a run: overwrite=True replaces one checkpoint, never a run")
        found = self.storage.list(self.folder)
        names = [info.name.removeprefix(f"{self.folder}/") for info in found]
        unfinished = not self.storage.is_directory and is_unfinished(names)
        # Never by what lies deeper: a folder of many checkpoints is none.
        if not unfinished and METADATA not in top and TREE_METADATA not in top:
            raise self._refused(f"overwrite=True replaces a checkpoint, and this is none: it holds {_shown(top)}")
        if METADATA in top:
            items = items_of(self.storage.read(f"{self.folder}/{METADATA}"))
        else:
            items = None if unfinished else frozenset[str]()
        if others := not_of_one(names, items):
            raise self._refused(
                f"overwrite=True replaces only a checkpoint, and here is more: {_shown(others)}. Save elsewhere, or move that away"
            )
        return found

    def _refused(self, why: str) -> StorageError:
        path = f"{self.storage.url}/{self.folder}"
        return StorageError(f"can't save to {path}: {why}", operation="save", path=path)


def _shown(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names[:3]) + (", …" if len(names) > 3 else "")


class _RenamedFolder(NewFolder):
    """On a directory. The folder in the making is locked for as long as its writer lives, so that the next one can tell what a dead
    one has left."""

    def __init__(self, storage: Storage, folder: str, *, overwrite: bool):
        super().__init__(storage, folder, overwrite=overwrite)
        self.prefix = f"{folder}{TEMPORARY}{self.save}"
        self._path = str(storage.local_path(self.prefix))
        self._made: list[str] = []  # folders above it, the innermost first
        self._lock: int | None = None

    def publish(self, files: Mapping[str, bytes]) -> None:
        for name, data in files.items():
            self.storage.create(f"{self.prefix}/{name}", data)
        self.storage.fsync_tree(self.prefix)
        if self.found:
            replace_tree(self.storage, self.prefix, self.folder)
            return
        try:
            self.storage.rename_tree(self.prefix, self.folder)
        except ObjectExistsError as error:
            raise self._refused("somebody else has saved there meanwhile") from error

    def _begin(self) -> None:
        try:
            self._made = posix.absent_folders(os.path.dirname(self._path))
            self._make()
            self._remove_dead()
        except OSError as error:
            raise storage_error("create", self._path, error) from error

    def _make(self) -> None:
        for _ in range(_LOCK_TRIES):  # another save of this name may take it for a dead one's before it is locked
            os.makedirs(self._path, exist_ok=True)
            try:
                self._lock = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            # On a mount without locks no save removes what others have left.
            with contextlib.suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_SH)
            if os.path.isdir(self._path):
                return
            self._end()
        raise FileNotFoundError(errno.ENOENT, "it is removed again and again", self._path)

    def _remove_dead(self) -> None:
        above, name = os.path.split(self._path)
        # Never stock Orbax's own, whose writer holds no lock and may live.
        ours = re.compile(rf"{re.escape(name.removesuffix(self.save))}s[0-9a-f]{{16}}({OLD})?")
        with os.scandir(above) as entries:
            others = [entry.path for entry in entries if ours.fullmatch(entry.name) and entry.name != name]
        if others:
            try:
                posix.fsync(above)  # what has taken the place of one of them must stay there without it
            except OSError:  # the save that begins will say so
                return
        for path in others:
            if path.endswith(OLD) and not os.path.lexists(self.storage.local_path(self.folder)):
                continue  # it is all that there is, and could not be put back
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                posix.remove_tree(path)
            except OSError:  # its writer lives, or there are no locks that would tell
                pass
            finally:
                os.close(descriptor)

    def _discard(self) -> None:
        if self._is_mine():
            self.storage.delete_tree(self.prefix)
        for folder in self._made:
            try:
                os.rmdir(folder)
            except OSError:  # somebody else uses it by now
                break

    def _is_mine(self) -> bool:
        """Whether the folder in the making is still that: once names were exchanged it is what was replaced."""
        try:
            return self._lock is not None and os.path.samestat(os.fstat(self._lock), os.stat(self._path))
        except OSError:  # it has its name
            return False

    def _end(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class _MarkedFolder(NewFolder):
    """On an object store. Of two who save to one name the first to create `METADATA` goes on, until one who overwrites deletes it."""

    def __init__(self, storage: Storage, folder: str, *, overwrite: bool):
        super().__init__(storage, folder, overwrite=overwrite)
        self.prefix = folder
        self._fixed = FixedNames(storage, folder, self.save)

    def publish(self, files: Mapping[str, bytes]) -> None:
        if self.found and not {*self.found} <= {*self.storage.list(self.folder)}:
            raise self._refused("somebody else has saved there meanwhile")
        replace_with_files(self._fixed, files, self.found)

    def _begin(self) -> None:
        pass

    def _discard(self) -> None:
        self._fixed.discard()

    def _end(self) -> None:
        pass
