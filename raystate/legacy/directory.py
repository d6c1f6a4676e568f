"""Where a path of a checkpoint in an older form leads."""

from __future__ import annotations

from collections.abc import Collection

from raystate.core.formats.errors import CorruptCheckpointError
from raystate.legacy.byte_file import ByteFile
from raystate.legacy.msgpack_tree import begins_as_tree
from raystate.legacy.names import GDA, is_temporary, split_name
from raystate.legacy.reader import STRUCTURE, LegacyReader
from raystate.orbax.step_reader import StepReader
from raystate.storage import Storage, open_storage
from raystate.storage.names import MANIFEST, MARKER, METADATA, ORBAX_TEMPORARY, TREE_METADATA


class LegacyCheckpoint:
    """One checkpoint in an older form of flax's or Orbax's: a file, or a folder with a file `checkpoint`.

    Args:
        folder: what it lies in.
        name: its name there.
    """

    def __init__(self, folder: Storage, name: str):
        self._folder = folder
        self.above: str | None = None  # it is no step of a run
        self._name = name
        found = split_name(name)
        self.step = int(found[1]) if found and found[1] >= 0 and found[1].is_integer() else 0

    def is_there(self) -> bool:
        """True: whether it is complete is said by `open`, which names what is wrong."""
        return True

    def open(self) -> StepReader:
        """A reader of it.

        Raises:
            CorruptCheckpointError: it was never finished, or is damaged. StorageError.
        """
        where = f"{self._folder.url}/{self._name}"
        if self._name.endswith(GDA):
            text = f"{where} has only the arrays of a checkpoint: load {where.removesuffix(GDA)}"
            raise CorruptCheckpointError(text, path=where)
        if why := _unfinished(self._folder, self._name):
            raise CorruptCheckpointError(f"{where} was never finished: {why}. Load an older one", path=where)
        return self._opened(where)

    def _opened(self, where: str) -> LegacyReader:
        if not any(self._folder.exists(name) for name in (self._name, f"{self._name}/{STRUCTURE}")):
            text = f"{where} has a {MANIFEST}, but neither {TREE_METADATA} nor {STRUCTURE!r}, which says what its arrays are"
            raise CorruptCheckpointError(text, path=where)
        reader = LegacyReader(self._folder, self._name)
        gda = f"{self._name}{GDA}"
        if reader.is_file and reader.paths_beside:
            if not self._folder.list(gda, recursive=False):
                raise CorruptCheckpointError(f"{where} lacks the folder {gda}/ with the arrays that it names", path=where)
            if not self._folder.is_directory and not self._folder.exists(f"{gda}/{MARKER}"):
                text = f"{where} was never finished: there is no {gda}/{MARKER}. Load an older one"
                raise CorruptCheckpointError(text, path=where)
        return reader


def legacy_checkpoint(storage: Storage, names: Collection[str]) -> LegacyCheckpoint | None:
    """The checkpoint in an older form that a storage's URL is the path of; None: it is something else.

    Args:
        storage: which may be a file.
        names: of what lies in it, not recursively.
    """
    above, _, name = storage.url.rpartition("/")
    if above.endswith("/"):  # a bucket, or a folder of the root
        return None
    folder = open_storage(above)
    if not names:
        is_one = folder.exists(name) and (split_name(name) is not None or begins_as_tree(ByteFile(folder, name)))
    elif ORBAX_TEMPORARY in name or STRUCTURE in names:
        is_one = True
    elif name.endswith(GDA):
        is_one = folder.exists(name.removesuffix(GDA))
    else:
        is_one = MANIFEST in names and TREE_METADATA not in names
        if not (is_one or folder.is_directory or {MARKER, METADATA, TREE_METADATA} & set(names)) and split_name(name) is not None:
            is_one = folder.exists(name)  # what it has replaced has left something below its name
    return LegacyCheckpoint(folder, name) if is_one else None


def _files_of(storage: Storage, name: str) -> set[str]:
    """Those of a folder's files that make it a checkpoint."""
    inside = {info.name.removeprefix(f"{name}/") for info in storage.list(name, recursive=False)}
    return inside & {METADATA, TREE_METADATA, STRUCTURE, MANIFEST, MARKER}


def _unfinished(storage: Storage, name: str) -> str:
    """Why a file or folder of such a name is no complete checkpoint; "" if nothing speaks against it."""
    if is_temporary(name):
        return "it has the name of a temporary checkpoint"
    if storage.exists(name):
        return ""
    files = _files_of(storage, name)
    if not files - {MARKER}:
        return "nothing of a checkpoint is in the folder"
    if not storage.is_directory and MARKER not in files:
        return f"there is no {MARKER} in it"
    return ""
