"""Which checkpoints lie in a directory that flax wrote, and where a path leads."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from raystate.core.formats.errors import ConfigError, CorruptCheckpointError
from raystate.legacy.byte_file import ByteFile
from raystate.legacy.msgpack_tree import begins_as_tree
from raystate.legacy.names import GDA, is_temporary, number_after, split_name
from raystate.legacy.reader import STRUCTURE, LegacyReader
from raystate.orbax.step_reader import StepReader
from raystate.storage import ObjectInfo, Storage, StorageUrl, open_storage
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LegacyStep:
    """One complete checkpoint of a directory.

    Attributes:
        step: its number as a step of a run, see `LegacyDirectory`.
        number: what flax called it: a step or another number, such as a loss.
        name: its file or folder.
        url: where it lies; `raystate.Reader(url)` and `raystate.load(url)` read it.
    """

    step: int
    number: float
    name: str
    url: str


class LegacyDirectory:
    """The checkpoints `<prefix><number>` of a directory that flax wrote.

    flax numbers checkpoints with any numbers; a run has whole steps from 0. If all numbers are whole, not negative and different, they
    are the steps. Otherwise the steps are 0, 1, 2, … in the order of the numbers.

    Args:
        url: gs://…, file://…, a directory or a PathLike.
        prefix: what the names begin with; None: the only prefix that is there.

    Raises:
        ConfigError: no prefix is named, and there are several or none; says what there is.
        StorageError: storage failed.
    """

    def __init__(self, url: StorageUrl, prefix: str | None = None):
        self._storage = open_storage(url)
        entries = {info.name.rstrip("/"): info for info in self._storage.list(recursive=False)}
        self._entries = {name: info for name, info in entries.items() if not name.startswith(".") and not name.endswith(GDA)}
        self.prefix = self._only_prefix() if prefix is None else prefix

    @functools.cached_property
    def unfinished(self) -> tuple[str, ...]:
        """Names of what was never finished, or is still being written."""
        mine = [name for name in self._entries if name.startswith(self.prefix)]
        return tuple(name for name in mine if is_temporary(name) or (name in self._numbers and _unfinished(self._storage, name)))

    @functools.cached_property
    def steps(self) -> tuple[LegacyStep, ...]:
        """The complete ones, in the order of their numbers."""
        found = sorted((number, name) for name, number in self._numbers.items() if name not in self.unfinished)
        return tuple(
            LegacyStep(step=step, number=number, name=name, url=f"{self._storage.url}/{name}")
            for step, (number, name) in zip(steps_of([number for number, _ in found]), found, strict=True)
        )

    def __iter__(self) -> Iterator[LegacyStep]:
        return iter(self.steps)

    @functools.cached_property
    def _numbers(self) -> dict[str, float]:
        found = {name: number_after(name, self.prefix) for name in self._entries if not is_temporary(name)}
        return {name: number for name, number in found.items() if number is not None}

    def _only_prefix(self) -> str:
        numbered = {name: found[0] for name in self._entries if (found := split_name(name)) and not is_temporary(name)}
        prefixes = sorted({prefix for name, prefix in numbered.items() if self._looks_so(self._entries[name])})
        if len(prefixes) == 1:
            return prefixes[0]
        shown = ", ".join(map(repr, prefixes[:5]))
        found = f"checkpoints with the prefixes {shown}: name one with prefix=" if prefixes else "no checkpoint <prefix><step>"
        raise ConfigError(f"{self._storage.url} holds {found}", field="prefix", got=self._storage.url, found=prefixes)

    def _looks_so(self, info: ObjectInfo) -> bool:
        return not info.is_folder or bool(_files_of(self._storage, info.name.rstrip("/")))


def steps_of(numbers: Sequence[float]) -> list[int]:
    """The steps that ascending numbers of flax become, see `LegacyDirectory`."""
    whole = all(number >= 0 and number.is_integer() for number in numbers)
    if whole and all(low < high for low, high in itertools.pairwise(numbers)):
        return [int(number) for number in numbers]
    return list(range(len(numbers)))


def _files_of(storage: Storage, name: str) -> set[str]:
    """Those of a folder's files that make it a checkpoint."""
    inside = {info.name.removeprefix(f"{name}/") for info in storage.list(name, recursive=False)}
    return inside & {METADATA, TREE_METADATA, STRUCTURE, MANIFEST, MARKER}


def _unfinished(storage: Storage, name: str) -> str:
    """Why a file or folder of such a name is no complete checkpoint; "" if nothing speaks against it."""
    if is_temporary(name):
        return "its name is that of a temporary one"
    if storage.exists(name):
        return ""
    files = _files_of(storage, name)
    if not files - {MARKER}:
        return "nothing of a checkpoint is in the folder"
    if not storage.is_directory and MARKER not in files:
        return f"there is no {MARKER} in it"
    return ""
