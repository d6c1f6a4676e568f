"""On an object store: one checkpoint of flax's in the place of another one, which comes back if that fails.

A store replaces nothing, so a name is free for a moment. What is deleted before the new one is complete is small, or a single object,
and is held in memory until then; what is large has unique names, and goes at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from raystate.core.errors import StorageError
from raystate.storage import ObjectChangedError, ObjectExistsError, ObjectInfo, ObjectMissingError, Storage
from raystate.storage.attempts import tell_also
from raystate.storage.names import marker_last

logger = logging.getLogger("raystate")


def replace_marked(storage: Storage, name: str, new: Mapping[str, bytes], save: str | None = None) -> list[ObjectInfo]:
    """Create a checkpoint's files, what makes it complete last, in the place of whatever form of a checkpoint is there.

    Args:
        storage: an object store.
        name: of the checkpoint.
        new: full name -> bytes, of `name` itself or of what lies below it.
        save: what has it in its name is the new one's data, and stays.

    Returns:
        What of the old one is left: for `remove_replaced`.

    Raises:
        StorageError: storage failed; what was there is there again, or the error says that it is not. Or somebody else saves there.
    """
    old = [info for info in storage.list(name) if save is None or save not in info.name]
    try:
        old.append(storage.stat(name))
    except ObjectMissingError:
        pass
    going = [info for info in old if info.name in new or _is_fixed(info.name, name)]
    going.sort(key=lambda info: marker_last(info.name), reverse=True)  # the marker first: what is going is not read any more
    held = {info.name: storage.read(info.name) for info in going}
    deleted: list[str] = []
    created: list[str] = []
    try:
        for info in going:
            deleted.append(info.name)  # before: one whose answer is lost may be gone
            storage.delete(info.name, info.generation or None)
        for full in sorted(new, key=marker_last):
            created.append(full)
            storage.create_or_same(full, new[full])
    except (ObjectChangedError, ObjectExistsError) as error:  # what is there now is its: an interrupt's handler may save, too
        url = f"{storage.url}/{name}"
        raise StorageError(f"can't save to {url}: somebody else saves there at this moment", operation="save", path=url) from error
    except BaseException as error:
        _put_back(storage, name, created, {full: held[full] for full in deleted}, error)
        raise
    return [info for info in old if info.name not in held]


def remove_replaced(storage: Storage, name: str, left: list[ObjectInfo]) -> None:
    """Remove what is left of the old checkpoint. The new one is complete: a failure is but a warning."""
    try:
        storage.delete_all(left)
    except StorageError as error:
        logger.warning(
            "what was replaced takes up space in %s/%s, until it is replaced again: %s", storage.url, name, error.message
        )


def _put_back(storage: Storage, name: str, created: list[str], deleted: Mapping[str, bytes], error: BaseException) -> None:
    try:
        for full in reversed(created):
            storage.delete(full)
        for full in sorted(deleted, key=marker_last):
            storage.create_or_same(full, deleted[full])
    except StorageError as failed:
        if not deleted:  # nothing was there before
            logger.warning("left-overs of an unfinished save stay in %s/%s: %s", storage.url, name, failed.message)
            return
        what = f"the checkpoint {storage.url}/{name} was being replaced, and it could not be put back: save again"
        tell_also(error, failed, what)


def _is_fixed(full: str, name: str) -> bool:
    """Whether an object's name says nothing of who wrote it: a reader must not find it beside the files of the new one."""
    below = full.removeprefix(f"{name}/")
    return "/" not in below or below.startswith("array_metadatas/")
