"""On an object store: one checkpoint in the place of another one, which comes back if that fails.

A store replaces nothing, so a name is free for a moment. Small files, or a single object, are
deleted before the new checkpoint is complete, and held in memory until then. Large objects have
unique names, and are deleted at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from raystate.core.formats.errors import StorageError
from raystate.storage.attempts import tell_also
from raystate.storage.base import Listing, ObjectChangedError, ObjectExistsError, ObjectMissingError, Storage
from raystate.storage.checkpoint_files import says_what_is_there
from raystate.storage.names import MARKER, METADATA, marker_last

logger = logging.getLogger("raystate")


class FixedNames:
    """The files with fixed names that one save creates in its folder of an object store, beside data that have its id in their names.

    Another save that overwrites, of a signal's handler or of another process, may take the folder in the midst of this one, and then has
    files of the same names. Whose they are `METADATA` tells, which is created first: its bytes have the time of their save in them.

    Attributes:
        save: the id.
    """

    def __init__(self, storage: Storage, folder: str, save: str):
        self.storage = storage
        self.save = save
        self.folder = folder
        self._created: dict[str, bytes] = {}

    def create(self, name: str, data: bytes) -> None:
        """`name`: relative to the folder. Raises ObjectExistsError: another save has created it."""
        full = f"{self.folder}/{name}"
        self._created[full] = data  # before: one whose answer is lost may be there
        try:
            self.storage.create_or_same(full, data)
        except ObjectExistsError:
            del self._created[full]
            raise

    def are_mine(self) -> bool:
        """Whether no other save has taken the folder since they were created."""
        metadata = f"{self.folder}/{METADATA}"
        return metadata in self._created and self.storage.find(metadata) == self._created[metadata]

    def check(self) -> None:
        """Raises ObjectExistsError: another save has taken the folder."""
        if not self.are_mine():
            raise ObjectExistsError(f"{self.folder}/{METADATA} is not this save's any more", operation="save", path=self.folder)

    def discard(self, *, alone: bool = True) -> None:
        """Remove what this save has written, and nothing of another one.

        Args:
            alone: False: another save is at work there, and a file of the same bytes may be its own.
        """
        found = self.storage.list(self.folder)
        mine = self.are_mine() and alone  # after the list: so all that it has was of this save
        going = [
            info for info in found if self.save in info.name or (info.name in self._created and (mine or self._made(info.name)))
        ]
        marker = f"{self.folder}/{MARKER}"
        self.storage.delete_all([info for info in going if info.name == marker])
        self.storage.delete_all([info for info in going if info.name != marker])

    def _made(self, name: str) -> bool:
        """Whether a file tells by its bytes that it is this save's: they have the save or the time in them."""
        data = self._created[name]
        tells = self.save.encode() in data or name == f"{self.folder}/{METADATA}"
        return tells and self.storage.find(name) == data


def replace_with_files(fixed: FixedNames, files: Mapping[str, bytes], old: Listing | None = None) -> None:
    """Create the files of a checkpoint, what makes it complete last, in the place of another one of any form.

    Args:
        fixed: of the checkpoint's folder; its data lie there already, under names that have the save in them.
        files: name in that folder -> bytes, `MARKER` and `METADATA` among them.
        old: what goes; None: all that is there now.

    Raises:
        StorageError: storage failed; the old files are there again, or the error says that they are
            not. Or another program saves there.
    """

    def create() -> None:
        for file in sorted(files, key=lambda name: (name != METADATA, marker_last(name))):  # METADATA says whose the others are
            if file == MARKER:
                fixed.check()
            fixed.create(file, files[file])
        fixed.check()

    replacing = _Replacing(fixed.storage, fixed.folder, fixed)
    replacing.run(create, {f"{fixed.folder}/{file}" for file in files}, old)


def replace_with_object(storage: Storage, name: str, data: bytes) -> None:
    """The same with a single object."""
    _Replacing(storage, name, None).run(lambda: storage.create_or_same(name, data), {name}, None)


class _Replacing:
    """One replacement.

    Args:
        fixed: of a checkpoint's folder; None: a single object, which is complete as soon as it is there.
    """

    def __init__(self, storage: Storage, name: str, fixed: FixedNames | None):
        self._storage = storage
        self._name = name
        self._fixed = fixed
        self._held: dict[str, bytes] = {}  # what goes before the new one is there
        self._deleted: list[str] = []

    def run(self, create: Callable[[], object], new: set[str], old: Listing | None) -> None:
        """Delete what is in the way, create, and remove the rest of what was there. `new`: the names that are created."""
        storage, name = self._storage, self._name
        try:
            old = self._listed() if old is None else old
            going = [info for info in old if info.name in new or says_what_is_there(info.name.removeprefix(f"{name}/"))]
            # The marker first: then no reader takes the files that go.
            going.sort(key=lambda info: marker_last(info.name), reverse=True)
            self._held = {info.name: storage.read(info.name) for info in going}
            if going and not {*going} <= {*self._listed()}:  # then another save's may be among what is held
                raise ObjectChangedError(f"{storage.url}/{name} is another one by now", operation="save", path=name)
            for info in going:
                self._deleted.append(info.name)  # before: one whose answer is lost may be gone
                storage.delete(info.name, info.generation or None)
            self._refuse_living(new)
            create()
        except BaseException as error:
            alone = not isinstance(error, ObjectChangedError | ObjectExistsError | ObjectMissingError)
            back = self._put_back(error, alone=alone)
            if not alone:
                url = f"{storage.url}/{name}"
                text = f"can't save to {url}: somebody else saves there at this moment; save again if there is no checkpoint then"
                raise StorageError(text, operation="save", path=url) from error
            if back and isinstance(error, StorageError):
                text = f"{error.message}. The old checkpoint is still there, whole: save again"
                raise StorageError(text, **error.details) from error
            raise
        try:  # the new one is complete: a failure is but a warning
            storage.delete_all([info for info in old if info.name not in self._held])
        except StorageError as error:
            logger.warning(
                "the replaced files take up space in %s/%s, until the next save there: %s", storage.url, name, error.message
            )

    def _listed(self) -> Listing:
        """What is there, but for the data of the new one."""
        storage = self._storage
        found = [info for info in storage.list(self._name) if self._fixed is None or self._fixed.save not in info.name]
        try:
            return [*found, storage.stat(self._name)]
        except ObjectMissingError:
            return found

    def _refuse_living(self, new: set[str]) -> None:
        """Raises ObjectExistsError: the unfinished save that goes was no dead one's. It has gone on since it was listed."""
        if self._fixed is None or not self._held or f"{self._name}/{MARKER}" in self._held:
            return
        if came := [info.name for info in self._storage.list(self._name) if info.name in new]:
            raise ObjectExistsError(f"{came[0]} is there by now", operation="save", path=came[0])

    def _put_back(self, error: BaseException, *, alone: bool) -> bool:
        """Whether a whole checkpoint was there before, and is there.

        Nothing is put back if somebody else has saved there meanwhile: a signal's handler, before
        it raised, or another process.
        """
        storage = self._storage
        try:
            if self._fixed is not None:
                self._fixed.discard(alone=alone)
            if self._is_taken():
                return False
            for full in sorted(self._deleted, key=marker_last):
                storage.create_or_same(full, self._held[full])
        except ObjectExistsError:  # somebody else is about to
            return False
        except StorageError as failed:
            if not self._deleted:  # nothing was there before
                logger.warning("left-overs of an unfinished save stay in %s/%s: %s", storage.url, self._name, failed.message)
                return False
            what = f"the checkpoint {storage.url}/{self._name} was being replaced, and it could not be put back: save again"
            tell_also(error, failed, what)
            return False
        return any(full in self._held for full in (f"{self._name}/{MARKER}", self._name))

    def _is_taken(self) -> bool:
        """Whether what makes a checkpoint another one, or this one, is there."""
        tells = (f"{self._name}/{METADATA}", self._name)
        return any(self._storage.find(full) not in (None, self._held.get(full)) for full in tells)
