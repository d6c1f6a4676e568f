"""Whose folder a place lies in: a run's or a checkpoint's. No other save or export may write
there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from raystate.core.formats.errors import StorageError
from raystate.machine.threads import map_in_threads
from raystate.storage.names import METADATA, STATE, TREE_METADATA, log_name
from raystate.storage.url import open_storage

_LOG = log_name(1)  # is never deleted
ASKED_AT_A_TIME = 8


def owner_of(url: str) -> str:
    """Whose a folder is, as a clause for an error; "" if it may hold something new.

    In a directory nothing but looking at the folders above it; in a bucket two small requests for each of them, all at once.

    Args:
        url: canonical; nothing needs to be there.

    Raises:
        StorageError: the folder itself can't be asked about. Those above it may be closed to this account.
    """
    if STATE in url.split("/"):
        return f"{url} is part of the storage of a run, whose StateManager alone writes there"
    found = _found(url)
    runs = [above for above, name in found if name == _LOG]
    if runs:
        return f"{runs[-1]} is the storage of a run, whose StateManager alone writes there"
    return f"{found[-1][0]} is a checkpoint" if found else ""


def _found(url: str) -> list[tuple[str, str]]:
    """(folder, name of what it has that only a run or only a checkpoint has), the innermost folder first."""
    if url.startswith("file://"):
        names = (_LOG, METADATA, TREE_METADATA)
        asked = [(above, name) for above in _upwards(url) for name in names]
        return [(above, name) for above, name in asked if os.path.lexists(f"{above.removeprefix('file://')}/{name}")]
    asked = [(above, name) for above in _upwards(url) for name in (_LOG, METADATA)]

    def is_there(one: tuple[str, str]) -> bool:
        above, name = one
        with contextlib.nullcontext() if above == url else contextlib.suppress(StorageError):
            return open_storage(above).exists(name)
        return False

    found = map_in_threads(is_there, asked, threads=ASKED_AT_A_TIME, name="raystate-owner")
    return [one for one, there in zip(asked, found, strict=True) if there]


def _upwards(url: str) -> Iterator[str]:
    """A folder and those above it, up to the bucket or the directory below the root."""
    scheme, _, path = url.partition("://")
    while path:
        yield f"{scheme}://{path}"
        path = path.rpartition("/")[0]
