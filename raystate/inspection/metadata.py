"""What a step holds, without its bytes: a tree with an object for each array, which can tell how and where it is stored."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

import ml_dtypes  # noqa: F401 - gives numpy the names "bfloat16", "int4", "float8_…"
import numpy as np

from raystate.core.formats.errors import ConfigError, CorruptCheckpointError, StepNotFoundError, StorageError
from raystate.core.formats.tree import LeafSpec, PathKey, TreeSpec, nest
from raystate.inspection.places import Checkpoints
from raystate.inspection.run_metadata import read_run_metadata
from raystate.orbax.item_kinds import STATE_ITEMS
from raystate.orbax.json_checks import parse_json
from raystate.orbax.step_reader import ItemKind, StepReader
from raystate.orbax.stored import StoredValue
from raystate.storage import ObjectInfo

T = TypeVar("T")

STATE, _DEFAULT = STATE_ITEMS

_WRITER = re.compile(r"ocdbt\.process_([^/]+)/")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArray:
    """How one array lies in storage.

    Attributes:
        keys: key of the item's OCDBT database, or file below the item's folder -> where its bytes
            are. They are the array's own metadata, and one value for each chunk that was written.
        writers: which processes wrote it, as their folders are called (`ocdbt.process_<writer>`).
            Empty if that isn't known: small values lie in the database's nodes, and plain files do
            not tell.
    """

    keys: Mapping[str, StoredValue]
    writers: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values in storage. A database compresses many small ones together: their file is smaller than their sum."""
        return sum(value.nbytes for value in self.keys.values())


@dataclass(frozen=True, kw_only=True)
class ArrayMetadata:
    """One array of a step. Nothing of it has been read; `read`, `stored` and `spec` ask storage.

    Attributes:
        item: the item of the step that it belongs to, as raystate calls it.
        name: its name in Orbax's files: the path's keys with dots between them.
        path: the keys and indices from the item's root to it.
        shape: of the whole array, in elements. Typed PRNG keys have their uint32 data's.
        dtype: of its elements.
        chunk: shape of a piece that is stored and read as a whole.
        sharding: as Orbax wrote it down, a JSON object; None: it had none.
        key_impl: implementation of typed PRNG keys; None: it has no keys.
        kind: "jax.Array" or "np.ndarray", which it was when it was saved.
    """

    item: str
    name: str
    path: tuple[PathKey, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk: tuple[int, ...]
    sharding: Mapping[str, Any] | None
    key_impl: str | None
    kind: Literal["jax.Array", "np.ndarray"]
    _asked: AskedStep = field(repr=False, compare=False)
    _leaf: int = field(repr=False, compare=False)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in memory, as numpy holds it."""
        return self.size * self.dtype.itemsize

    def spec(self) -> dict[str, Any]:
        """A TensorStore spec, as JSON: `tensorstore.open(array.spec()).result()` is the array. Raises as `read`."""
        return self._asked.ask(lambda reader: reader.spec_of(self._item(reader), self.name))

    def stored(self) -> StoredArray:
        """Its keys, sizes and writers in storage. Raises as `read`."""
        return self._asked.stored(self.item)[self.name]

    def has_checksums(self) -> bool:
        """Whether its chunks carry checksums, so that a flipped bit is noticed when it is read. Raises as `read`."""
        return self._asked.ask(lambda reader: reader.has_checksums(self._item(reader), self.name))

    def read(self, start: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """Its values, or those of a box of it.

        Args:
            start: where the box begins, in elements; None: at the origin.
            shape: of the box; None: to the end of the array.

        Raises:
            ConfigError: the box is not within the array.
            StepNotFoundError: the step was retired meanwhile. CorruptCheckpointError, StorageError.
        """
        begin = start if start is not None else (0,) * self.ndim
        if len(begin) != self.ndim:
            raise ConfigError(f"start: {begin} does not fit an array of shape {self.shape}", field="start", got=begin)
        lengths = shape if shape is not None else tuple(whole - first for whole, first in zip(self.shape, begin, strict=True))
        return self._asked.ask(lambda reader: reader.read(self._item(reader), [(self._leaf, begin, lengths)]))[0]

    def _item(self, reader: StepReader) -> str:
        return orbax_item(reader, self.item)


@dataclass(frozen=True, kw_only=True)
class StepMetadata:
    """The contents of a step, without its arrays' bytes.

    Attributes:
        step: number of completed steps.
        path: URL of its folder.
        save: the save of a run that wrote it; None: no package of raystate tells, as of a step that Orbax alone wrote.
        began_at: as `_CHECKPOINT_METADATA` says, UTC; None where no file says it. Orbax writes when
            its save began. raystate writes when the arrays were in storage, before the small files.
        committed_at: when it was committed.
        trees: item of arrays -> its tree: dicts and lists with an `ArrayMetadata` for each array; scalars and strings are themselves.
            The state is "state", also where Orbax has another name for it.
        items: the names of all items but the metrics.
        kinds: item -> "arrays", "json", "iterator", "files" (an object wrote them itself), or "other": raystate cannot read it.
        metrics: what was saved with the step.
        custom: what was saved with the step.
        run: what was said of the whole run: `StateConfig(run_metadata=…)`, or Orbax's `CheckpointManager(metadata=…)`; None: nothing.
        leaves: item of arrays -> its leaves in a flat list, in Orbax's order.
    """

    step: int
    path: str
    save: str | None
    began_at: datetime | None
    committed_at: datetime | None
    trees: Mapping[str, Any]
    items: tuple[str, ...]
    kinds: Mapping[str, ItemKind]
    metrics: Mapping[str, float]
    custom: Any
    run: Mapping[str, Any] | None
    leaves: Mapping[str, tuple[LeafSpec, ...]] = field(repr=False, compare=False)
    _arrays: Mapping[str, Mapping[str, ArrayMetadata]] = field(repr=False, compare=False)

    def arrays(self, item: str | None = None) -> Mapping[str, ArrayMetadata]:
        """Name -> array of one item, or of all: then the names of items other than the state begin with the item's and a colon."""
        if item is not None:
            if item not in self._arrays:
                raise ConfigError(
                    f"item: there is no item {item!r} of arrays; there is {sorted(self._arrays)}", field="item", got=item
                )
            return self._arrays[item]
        return {
            name if item == STATE else f"{item}:{name}": array
            for item, found in self._arrays.items()
            for name, array in found.items()
        }


class AskedStep:
    """A step that metadata objects ask later: it is opened again where that is needed, and tells damage from retirement."""

    def __init__(self, checkpoints: Checkpoints, step: int, reader: StepReader | None):
        self._checkpoints = checkpoints
        self._step = step
        self._reader = reader
        self._stored: dict[str, dict[str, StoredArray]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self._checkpoints.storage.url, "step": self._step}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(Checkpoints(state["url"]), state["step"], None)

    def ask(self, question: Callable[[StepReader], T]) -> T:
        """Raises StepNotFoundError if the step was retired meanwhile; else as `question`."""
        try:
            if self._reader is None:
                self._checkpoints.steps()
                self._reader = self._checkpoints.open(self._step)
            return question(self._reader)
        except (CorruptCheckpointError, StorageError) as error:
            if self._step not in self._checkpoints.steps():
                url = self._checkpoints.storage.url
                raise StepNotFoundError(f"step {self._step} of {url} was retired meanwhile", step=self._step, path=url) from error
            raise

    def stored(self, item: str) -> dict[str, StoredArray]:
        """Name -> how it is stored, of all arrays and scalars of an item."""
        if item not in self._stored:
            self._stored[item] = self.ask(lambda reader: stored_arrays(reader, orbax_item(reader, item), self._files(reader, item)))
        return self._stored[item]

    def _files(self, reader: StepReader, item: str) -> Callable[[], list[ObjectInfo]]:
        return lambda: files_of(self._checkpoints, self._step, None if reader.is_bare() else orbax_item(reader, item))


def orbax_item(reader: StepReader, item: str) -> str:
    """What Orbax called the item that raystate calls so: v0's "default" is the state."""
    return _DEFAULT if item == STATE and STATE not in reader.items() else item


def shown_items(reader: StepReader) -> dict[str, ItemKind]:
    """The items by what raystate calls them: the inverse of `orbax_item`."""
    items = reader.items()
    return {STATE if name == _DEFAULT and STATE not in items else name: kind for name, kind in items.items()}


def files_of(checkpoints: Checkpoints, step: int, item: str | None = None) -> list[ObjectInfo]:
    """The objects of a step, or of one item of it, named relative to its folder. Raises StorageError."""
    folder = "/".join(part for part in (checkpoints.folder(step), item) if part)
    begin = f"{folder}/" if folder else ""
    return [
        ObjectInfo(name=info.name.removeprefix(begin), size=info.size) for info in checkpoints.storage.list(folder, recursive=True)
    ]


def bytes_of_items(checkpoints: Checkpoints, step: int, reader: StepReader) -> dict[str, int]:
    """Item -> bytes of all its objects in storage. Raises StorageError."""
    files = files_of(checkpoints, step)
    if reader.is_bare():
        return dict.fromkeys(shown_items(reader), sum(info.size for info in files))
    return {
        item: sum(info.size for info in files if info.name.startswith(f"{orbax_item(reader, item)}/"))
        for item in shown_items(reader)
    }


def stored_arrays(reader: StepReader, item: str, files: Callable[[], list[ObjectInfo]]) -> dict[str, StoredArray]:
    """Name -> how it is stored, of all arrays and scalars of an item. `files`: of its folder, where it is no database."""
    values = reader.stored(item)
    if values is None:
        values = {info.name: StoredValue(nbytes=info.size, file=info.name) for info in files()}
    by_name: dict[str, dict[str, StoredValue]] = {leaf.name: {} for leaf in reader.tree(item).leaves}
    for key, value in values.items():
        if (owner := _owner(key, by_name)) is not None:
            by_name[owner][key] = value
    return {
        name: StoredArray(keys=keys, writers=tuple(sorted({one for value in keys.values() for one in _WRITER.findall(value.file)})))
        for name, keys in by_name.items()
    }


def look(checkpoints: Checkpoints, step: int, reader: StepReader) -> StepMetadata:
    """Look at a step that is open.

    Raises:
        CorruptCheckpointError: what its metadata say is not there. StepNotFoundError, StorageError.
    """
    asked = AskedStep(checkpoints, step, reader)
    kinds = shown_items(reader)
    specs = {name: reader.tree(orbax_item(reader, name)) for name, kind in kinds.items() if kind == "arrays"}
    arrays = {name: dict(_arrays(name, spec, asked)) for name, spec in specs.items()}
    began_s, committed_s = reader.times()
    home, _ = checkpoints.home(step)
    return StepMetadata(
        step=step,
        path="/".join(part for part in (checkpoints.storage.url, checkpoints.folder(step)) if part),
        save=reader.save,
        began_at=moment(began_s),
        committed_at=moment(committed_s),
        trees={
            name: nest(spec.leaves, [arrays[name][leaf.name] if leaf.array is not None else leaf.plain for leaf in spec.leaves])
            for name, spec in specs.items()
        },
        items=tuple(sorted(kinds)),
        kinds=dict(sorted(kinds.items())),
        metrics=reader.metrics(),
        custom=reader.custom(),
        run=read_run_metadata(home) if home.url != checkpoints.storage.url or checkpoints.single is None else None,
        leaves={name: spec.leaves for name, spec in specs.items()},
        _arrays=arrays,
    )


# ---------------------------------------------------------------- inside


def _arrays(item: str, spec: TreeSpec, asked: AskedStep) -> Iterator[tuple[str, ArrayMetadata]]:
    for index, leaf in enumerate(spec.leaves):
        if leaf.array is None:
            continue
        array = leaf.array
        yield (
            leaf.name,
            ArrayMetadata(
                item=item,
                name=leaf.name,
                path=leaf.path,
                shape=array.shape,
                dtype=np.dtype(array.dtype),
                chunk=array.chunk,
                sharding=_sharding(array.sharding),
                key_impl=array.key_impl,
                kind=array.typestr,
                _asked=asked,
                _leaf=index,
            ),
        )


def _sharding(text: str | None) -> Mapping[str, Any] | None:
    try:
        found = parse_json(text.encode(), "a sharding") if text else None
    except (CorruptCheckpointError, UnicodeEncodeError):  # what it says is not needed to read the array
        return {"sharding_type": text}
    return found if isinstance(found, dict) else None


def moment(seconds: float | None) -> datetime | None:
    """Wall clock seconds as UTC; None if they are no time."""
    try:
        return datetime.fromtimestamp(seconds, UTC) if seconds is not None else None
    except (ValueError, OverflowError, OSError):  # a number that is no time
        return None


def _owner(key: str, names: Mapping[str, object]) -> str | None:
    """The array that a key belongs to: its name, which may have slashes in it, and then its own metadata or a chunk."""
    end = len(key)
    while (end := key.rfind("/", 0, end)) >= 0:
        if key[:end] in names:
            return key[:end]
    return "" if "" in names else None
