"""What a storage holds that is no run: checkpoints under other names, or one checkpoint itself. A run must not begin beside them unseen."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from raystate.core.formats.errors import ConfigError
from raystate.storage.base import ObjectInfo, Storage
from raystate.storage.names import MANIFEST, MARKER, METADATA, ORBAX_TEMPORARY, STATE, TREE_METADATA, log_name, step_of
from raystate.storage.owner import owner_of

SHOWN = 3  # names in an error

# What lies in the folder of a checkpoint, or of one of its items: Orbax's files of each of its formats.
_OF_A_CHECKPOINT = frozenset({METADATA, MARKER, TREE_METADATA, "_sharding", MANIFEST, "checkpoint"})
_NUMBERED = re.compile(r".*\d")  # 00001200, step_1200, checkpoint_7, epoch-3
_FILE = re.compile(
    r"(checkpoint|ckpt|step|model|state)[_\-.]?\d+(\.\w+)?", re.IGNORECASE
)  # as flax.training.checkpoints names them

_LOOKED_INTO = 16  # folders of a bucket: each costs a request, and where one run lies the others do


def is_marked(storage: Storage, folder: str) -> bool:
    """Whether a folder has the mark of a complete step, as stock Orbax knows it.

    A directory's may also be Orbax's own `_CHECKPOINT_METADATA`, or a bare tree's `_METADATA`, beside which early Orbax wrote nothing:
    there it is the rename that publishes.
    """
    markers = (MARKER, METADATA, TREE_METADATA) if storage.is_directory else (MARKER,)
    return any(storage.exists(f"{folder}/{marker}") for marker in markers)


def is_early(storage: Storage, folder: str) -> bool:
    """Whether a folder may be a step as Orbax wrote it until 2024, without any file of its own: nothing tells that it is whole.

    Stock Orbax reads it, for in a directory it is the rename that publishes.
    """
    return storage.is_directory and any(_has_trees(storage, storage.list(folder, recursive=False)))


def is_run(storage: Storage, folder: str = "") -> bool:
    """Whether a run has begun in the storage, or in a folder of it; a folder's name ends in "/"."""
    return storage.exists(f"{folder}{log_name(1)}")


def runs_in(storage: Storage) -> tuple[str, ...]:
    """The names of folders in which a run has begun, as of a sweep."""
    return tuple(info.name.rstrip("/") for info in storage.list(recursive=False) if info.is_folder and is_run(storage, info.name))


def foreign_checkpoints(storage: Storage) -> tuple[str, ...]:
    """The names of checkpoints that neither raystate nor Orbax's default naming wrote, at most a few; a folder's ends in "/".

    "./" means that the storage is itself the folder of one checkpoint.
    """
    return _foreign(storage, storage.list(recursive=False))


def _foreign(storage: Storage, found: Sequence[ObjectInfo]) -> tuple[str, ...]:
    if any(info.name in _OF_A_CHECKPOINT for info in found):
        return ("./",)
    return tuple(itertools.islice((info.name for info in found if _is_checkpoint(storage, info)), SHOWN + 1))


def refuse_foreign(storage: Storage) -> None:
    """Check that a run which begins in this storage begins in no other's place. A run whose log has begun is not asked again.

    Raises:
        ConfigError: names the checkpoints that are there, and says what to do.
        StorageError: storage failed.
    """
    if is_run(storage):
        return
    found = storage.list(recursive=False)
    # Where this run's steps of these numbers would be published.
    steps = [info.name for info in found if info.is_folder and step_of(info.name.rstrip("/")) is not None]
    for name in steps if storage.is_directory else steps[:_LOOKED_INTO]:
        if is_run(storage, name):
            text = f"storage: {storage.url} holds runs, such as {name}. Give this run a folder of its own, beside them"
            raise ConfigError(text, field="storage", got=storage.url, found=(name,))
    names = _foreign(storage, found)
    if names:
        raise ConfigError(
            f"{describe_foreign(storage.url, names)}. {_advice(names)}", field="storage", got=storage.url, found=names
        )


def refuse_place(storage: Storage) -> None:
    """Check that a run which begins in this storage has a folder of its own. A run whose log has begun is not asked again.

    A run below another one would lie where that one writes and removes; one at a bucket's root would own the whole bucket.

    Raises:
        ConfigError: it has none; says whose it is, and what to do.
        StorageError: storage failed.
    """
    if is_run(storage):
        return
    url = storage.url
    above = url.rpartition("/")[0]
    if above.endswith("/"):  # a bucket, or a folder of the file system's root
        if not storage.is_directory:
            text = f"storage: {url} is a whole bucket, where nothing else could be saved then: give it a folder, such as {url}/run"
            raise ConfigError(text, field="storage", got=url)
        return
    if owner := owner_of(above):
        text = f"storage: no run can begin in {url}: {owner}. Give it a folder beside that one"
        raise ConfigError(text, field="storage", got=url)


def describe_foreign(url: str, names: tuple[str, ...]) -> str:
    """One clause for an error: what there is instead of steps."""
    if names == ("./",):
        return f"{url} is the folder of one checkpoint, not of a run"
    more = " and more" if len(names) > SHOWN else ""
    shown = ", ".join(repr(name) for name in names[:SHOWN])
    if _are_numbered(names):
        return (
            f"{url} has folders of steps that lack the files which make a step whole: {shown}{more} (unfinished or half removed, or an "
            f"early Orbax's; the arrays lie in such a folder or in one below it, like {names[0]}state)"
        )
    return f"{url} holds checkpoints under names that are no plain step numbers: {shown}{more}"


def _are_numbered(names: tuple[str, ...]) -> bool:
    return all(step_of(name.rstrip("/")) is not None for name in names)


def _advice(names: tuple[str, ...]) -> str:
    if names == ("./",):
        return "Give the run the folder above it, or an empty storage and start from this one: restore_or_init(source=…)"
    if _are_numbered(names):
        return (
            "A run that begins here would begin at step 0 beside them. Move them away, or give the run an empty storage and start from "
            "such a folder of arrays: restore_or_init(source=…)"
        )
    return (
        "A run that begins here would begin at step 0 beside them. Rename their folders to plain numbers, such as 1200/, or give "
        "the run an empty storage and start from one of them: restore_or_init(source=…)"
    )


def _is_checkpoint(storage: Storage, info: ObjectInfo) -> bool:
    name = info.name.rstrip("/")
    if not info.is_folder:
        return _FILE.fullmatch(name) is not None
    if name == STATE or ORBAX_TEMPORARY in name or not _NUMBERED.fullmatch(name):
        return False
    if step_of(name) is None:
        return any(_looks_so(storage, name))
    # A step, if it is whole. In a directory also one that has no file of its own but its items', as early Orbax wrote them, was renamed.
    return storage.is_directory and not is_marked(storage, name) and any(_looks_so(storage, name))


def _looks_so(storage: Storage, folder: str) -> Iterator[bool]:
    inside = storage.list(folder, recursive=False)
    yield any(info.name.rpartition("/")[2] in _OF_A_CHECKPOINT for info in inside)
    yield from _has_trees(storage, inside)  # early Orbax wrote nothing beside the items' folders


def _has_trees(storage: Storage, inside: Sequence[ObjectInfo]) -> Iterator[bool]:
    for info in inside[:SHOWN]:
        if info.is_folder and step_of(info.name.rstrip("/").rpartition("/")[2]) is None:
            yield storage.exists(info.name + TREE_METADATA)
