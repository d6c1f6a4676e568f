"""Why a storage is empty: a path that was mistyped should not look like a run without steps."""

from __future__ import annotations

import difflib
import os

from raystate.core.formats.errors import StorageError
from raystate.storage.attempts import in_the_way, storage_error
from raystate.storage.base import Storage
from raystate.storage.foreign import foreign_checkpoints, is_run
from raystate.storage.steps import top_folders, visible_steps
from raystate.storage.url import open_storage

_CLOSE = 3  # names that are looked into: each may cost requests


def is_missing(storage: Storage) -> bool:
    """Whether there is nothing at all at the URL. Raises StorageError."""
    if storage.is_directory:
        path = storage.local_path("")
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError as error:
            raise storage_error("look for", str(path), error) from error
        return False
    return not storage.list(recursive=False)


def why_empty(storage: Storage) -> str:
    """One clause without a subject's name: that there is nothing at the URL, and what may have been meant; "" if something is there.

    Raises:
        StorageError: storage failed.
    """
    if is_missing(storage):
        if why := in_the_way(str(storage.local_path(""))) if storage.is_directory else "":
            return f"there is nothing at that path: {why}"
        close = _close(storage)
        return "there is nothing at that path" + (f"; did you mean {close}?" if close else "")
    if storage.is_directory and not storage.local_path("").is_dir():
        return "it is a file, not a directory" if storage.local_path("").is_file() else "it is no directory"
    return "" if storage.list(recursive=False) else "it is an empty directory"


def _close(storage: Storage) -> str:
    """The URL of a run or of a checkpoint whose name is close to the missing one's, or to that of a missing folder above it; "": none."""
    name, tail, above = storage.url, "", ""
    while "/" in name.partition("://")[2].strip("/"):
        above, _, missing = name.rpartition("/")
        try:
            beside = top_folders(open_storage(above))
        except StorageError:  # a folder that this user may not list
            return ""
        if beside:
            close = difflib.get_close_matches(missing, beside, n=_CLOSE, cutoff=0.5)
            places = (place for name in close for place in dict.fromkeys((f"{above}/{name}{tail}", f"{above}/{name}")))
            return next((place for place in places if _can_be_read(place)), "")
        name, tail = above, f"/{missing}{tail}"
    return ""


def _can_be_read(url: str) -> bool:
    """Whether a reader finds something there: a run, steps, or one checkpoint."""
    storage = open_storage(url)
    try:
        return is_run(storage) or bool(visible_steps(storage)) or bool(foreign_checkpoints(storage))
    except StorageError:
        return False
