"""On an object store: one checkpoint of flax's in the place of another one, which comes back if that fails.

A store replaces nothing, so a name is free for a moment. Small files, or a single object, are
deleted before the new checkpoint is complete, and held in memory until then. Large objects have
unique names, and are deleted at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from raystate.core.formats.errors import StorageError
from raystate.storage import ObjectChangedError, ObjectExistsError, ObjectInfo, ObjectMissingError, Storage
from raystate.storage.attempts import tell_also
from raystate.storage.names import METADATA, marker_last
from raystate.storage.placing import FixedNames

logger = logging.getLogger("raystate")


def replace_with_tree(fixed: FixedNames, files: Mapping[str, bytes]) -> None:
    """Create the files of a tree, what makes it complete last, in the place of a checkpoint of any
    form.

    Args:
        fixed: of the checkpoint's folder; the tree's data lie there already, under names that have the save in them.
        files: name in that folder -> bytes.

    Raises:
        StorageError: storage failed; the old files are there again, or the error says that they are
            not. Or another program saves there.
    """

    def create() -> None:
        for file in sorted(files, key=marker_last):  # METADATA is the first: it says whose the others are
            fixed.create(file, files[file])

    _Replacing(fixed.storage, fixed.folder, fixed).run(create, {f"{fixed.folder}/{file}" for file in files})


def replace_with_object(storage: Storage, name: str, data: bytes) -> None:
    """The same with a single object."""
    _Replacing(storage, name, None).run(lambda: storage.create_or_same(name, data), {name})


class _Replacing:
    """One replacement.

    Args:
        fixed: of a tree; None: a single object, which is complete as soon as it is there.
    """

    def __init__(self, storage: Storage, name: str, fixed: FixedNames | None):
        self._storage = storage
        self._name = name
        self._fixed = fixed
        self._held: dict[str, bytes] = {}  # what goes before the new one is there
        self._deleted: list[str] = []

    def run(self, create: Callable[[], object], new: set[str]) -> None:
        """Delete what is in the way, create, and remove the rest of what was there. `new`: the names that are created."""
        storage, name = self._storage, self._name
        try:
            old = self._listed()
            going = [info for info in old if info.name in new or _is_fixed(info.name, name)]
            # The marker first: then no reader takes the files that go.
            going.sort(key=lambda info: marker_last(info.name), reverse=True)
            self._held = {info.name: storage.read(info.name) for info in going}
            for info in going:
                self._deleted.append(info.name)  # before: one whose answer is lost may be gone
                storage.delete(info.name, info.generation or None)
            create()
        except BaseException as error:
            self._put_back(error)
            if isinstance(error, ObjectChangedError | ObjectExistsError):
                url = f"{storage.url}/{name}"
                text = f"can't save to {url}: somebody else saves there at this moment"
                raise StorageError(text, operation="save", path=url) from error
            raise
        try:  # the new one is complete: a failure is but a warning
            storage.delete_all([info for info in old if info.name not in self._held])
        except StorageError as error:
            logger.warning(
                "the replaced files take up space in %s/%s, until the next save there: %s", storage.url, name, error.message
            )

    def _listed(self) -> list[ObjectInfo]:
        """What is there, but for the data of the new one."""
        storage = self._storage
        found = [info for info in storage.list(self._name) if self._fixed is None or self._fixed.save not in info.name]
        try:
            return [*found, storage.stat(self._name)]
        except ObjectMissingError:
            return found

    def _put_back(self, error: BaseException) -> None:
        """Nothing, if somebody else has saved there meanwhile: a signal's handler, before it raised, or another process."""
        storage = self._storage
        try:
            if self._fixed is not None:
                self._fixed.discard()
            if not self._is_taken():
                for full in sorted(self._deleted, key=marker_last):
                    storage.create_or_same(full, self._held[full])
        except ObjectExistsError:  # somebody else is about to
            return
        except StorageError as failed:
            if not self._deleted:  # nothing was there before
                logger.warning("left-overs of an unfinished save stay in %s/%s: %s", storage.url, self._name, failed.message)
                return
            what = f"the checkpoint {storage.url}/{self._name} was being replaced, and it could not be put back: save again"
            tell_also(error, failed, what)

    def _is_taken(self) -> bool:
        """Whether what makes a checkpoint another one, or this one, is there."""
        tells = (f"{self._name}/{METADATA}", self._name)
        return any(self._storage.find(full) not in (None, self._held.get(full)) for full in tells)


def _is_fixed(full: str, name: str) -> bool:
    """Whether an object's name says nothing of who wrote it: a reader must not find it beside the files of the new one."""
    below = full.removeprefix(f"{name}/")
    return "/" not in below or below.startswith("array_metadatas/")
