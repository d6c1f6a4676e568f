"""Why a storage is empty: a path that was mistyped should not look like a run without steps."""

from __future__ import annotations

import difflib

from raystate.core.errors import StorageError
from raystate.storage.base import Storage
from raystate.storage.url import open_storage


def why_empty(storage: Storage) -> str:
    """One clause that begins with the URL: that there is nothing there, and what may have been meant; "" if something is there.

    Raises:
        StorageError: storage failed.
    """
    if storage.is_directory:
        root = storage.local_path("")
        if root.is_file():
            return f"{storage.url} is a file, not a directory"
        if root.is_dir():
            return "" if storage.list(recursive=False) else f"{storage.url} is an empty directory"
    elif storage.list(recursive=False):
        return ""
    close = _close(storage)
    return f"there is nothing at {storage.url}" + (f"; did you mean {close}?" if close else "")


def _close(storage: Storage) -> str:
    """The URL of something whose name is close to the missing one's, or to that of a missing folder above it; "" if there is none."""
    name, tail, above = storage.url, "", ""
    while "/" in name.partition("://")[2].strip("/"):
        above, _, missing = name.rpartition("/")
        try:
            beside = [info.name.rstrip("/") for info in open_storage(above).list(recursive=False) if info.is_folder]
        except StorageError:  # a folder that this user may not list
            return ""
        if beside:
            close = difflib.get_close_matches(missing, beside, n=1)
            if not close:
                return ""
            found = f"{above}/{close[0]}"
            return found + tail if tail and open_storage(found + tail).list(recursive=False) else found
        name, tail = above, f"/{missing}{tail}"
    return ""
