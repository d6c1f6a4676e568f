"""On a directory: a folder, or a file, in the place of another one, also if a call fails or this
process dies meanwhile.

Where two names can be exchanged, that is one operation. Elsewhere the old one is renamed first, to
`<new>-old`. If one lies there while nothing has its name, a save has died between two renames. It
gets its name back before the next save does anything else.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re

from raystate.core.formats.errors import StorageError
from raystate.storage import posix
from raystate.storage.attempts import describe, storage_error, tell_also
from raystate.storage.base import Storage
from raystate.storage.names import ORBAX_TEMPORARY

logger = logging.getLogger("raystate")

OLD = "-old"  # ends the name of what is being replaced, where names can't be exchanged
_REPLACED = re.compile(rf"(.+)\.{ORBAX_TEMPORARY}-s[0-9a-f]{{16}}{OLD}")
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EXDEV)


def replace_tree(storage: Storage, new: str, name: str) -> None:
    """Give a folder, or a file, the name of another one, which goes. See `placing.new_folder` for what a reader finds meanwhile.

    Args:
        new: beside `name`, whole and durable: `<name>.orbax-checkpoint-tmp-s…`.
        name: is there.

    Raises:
        StorageError: storage failed; the old one is there again. Or the new one is in its place,
            but storage did not say that it stays there: then `new`, or `<new>-old`, is what was
            replaced, for the next save to remove.
    """
    path, place = str(storage.local_path(new)), str(storage.local_path(name))
    replaced = posix.identity(place)
    try:
        posix.exchange(path, place)
    except OSError as error:
        if error.errno not in _NO_EXCHANGE:
            if posix.identity(place) != replaced:  # it took place
                raise _unsure(storage, name, new, describe(error)) from error
            raise storage_error("rename", f"{path} -> {place}", error) from error
        old = f"{new}{OLD}"
        _rename_both(storage, new, name, old)
    else:
        old = new
        try:
            posix.fsync(os.path.dirname(place))
        except OSError as error:
            raise _unsure(storage, name, old, describe(error)) from error
    try:
        storage.delete_tree(old)
    except StorageError as error:
        logger.warning(
            "the old checkpoint could not be removed and takes up space in %s/%s; the next save removes it: %s",
            storage.url, old, error.message,
        )  # fmt: skip


def put_back(storage: Storage, name: str | None = None) -> None:
    """Give their names back to what saves have left without one, that died between two renames. What fails is logged.

    Args:
        storage: a directory.
        name: only of this one.
    """
    try:
        with os.scandir(storage.local_path("")) as entries:
            found = [(entry, match[1]) for entry in entries if (match := _REPLACED.fullmatch(entry.name))]
        found = [one for one in found if name in (None, one[1])]
        found.sort(key=lambda one: one[0].stat(follow_symlinks=False).st_ctime_ns, reverse=True)  # renamed last, first
    except OSError:  # nothing is there, or the save that begins will say why
        return
    for entry, place in found:
        if _is_there(storage, place) or _is_held(entry.path.removesuffix(OLD)):
            continue
        try:
            storage.rename_tree(entry.name, place)
        except StorageError as error:
            logger.warning("%s/%s is what was in %s, and could not be put back: %s", storage.url, entry.name, place, error.message)
        else:
            logger.warning("%s/%s is there again: a save died while it was replacing it", storage.url, place)


def _rename_both(storage: Storage, new: str, name: str, old: str) -> None:
    try:
        storage.rename_tree(name, old)
        storage.rename_tree(new, name)
    except BaseException as error:  # an operation that failed may have taken place: what is where tells
        if not _is_there(storage, name):
            _put_back_one(storage, name, old, error)
        elif not _is_there(storage, new) and isinstance(error, StorageError):
            raise _unsure(storage, name, old, error.message) from error
        raise


def _put_back_one(storage: Storage, name: str, old: str, error: BaseException) -> None:
    try:
        storage.rename_tree(old, name)
    except StorageError as failed:
        if _is_there(storage, name):  # only its fsync failed
            return
        tell_also(
            error, failed, f"what was in {storage.url}/{name} is {storage.url}/{old} now, for the next save there to put back"
        )


def _unsure(storage: Storage, name: str, old: str, why: str) -> StorageError:
    path = f"{storage.url}/{name}"
    text = f"the new checkpoint is in its place, {path}, but may not survive a power cut: {why}. The old one is {storage.url}/{old}"
    return StorageError(f"{text}, which the next save removes: save again", operation="fsync", path=path)


def _is_there(storage: Storage, name: str) -> bool:
    return os.path.lexists(storage.local_path(name))


def _is_held(path: str) -> bool:
    """Whether the writer of a folder in the making lives; False if no lock tells."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(descriptor)
    return False
