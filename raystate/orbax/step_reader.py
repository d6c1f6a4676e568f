"""Reads a step: one that raystate wrote, or stock Orbax (v0 or v1, zarr2 or zarr3, OCDBT or not). Loads neither jax nor orbax.

Never fills in for data that is not there: a missing chunk, like a flipped bit, is a CorruptCheckpointError that names step, item
and array.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import tensorstore as ts

from raystate.core.errors import CorruptCheckpointError, ReferenceMismatchError, StepNotFoundError
from raystate.core.tree import ArraySpec, LeafSpec, Package, TreeSpec
from raystate.orbax import kv
from raystate.orbax.array_reads import Request, read_boxes
from raystate.orbax.step_metadata import (
    CUSTOM_KEY,
    CheckpointMetadata,
    MetadataNode,
    TreeMetadata,
    parse_key_impls,
    parse_shardings,
    parse_step,
    parse_strings,
    parse_tree,
)

ItemKind = Literal["arrays", "json", "iterator", "other"]

STATE_ITEMS = ("state", "default")  # raystate's and Orbax v1's name, Orbax v0's

_METRICS = "metrics"
_ITERATOR_FILE = re.compile(r"process_(\d+)-of-(\d+)\.json")
_JSON_FILES = ("metadata", "data.json")  # Orbax v0's and v1's names


class HasKvstore(Protocol):
    """The part of a Storage that is needed: the TensorStore kvstore spec of a folder, its path ending in "/"."""

    def kvstore(self, prefix: str) -> dict[str, Any]: ...


class StepReader:
    """One step, read lazily; what was read of its metadata is kept. May be used by several threads. Holds nothing to close.

    Args:
        storage: where; or a callable prefix -> kvstore spec.
        step_prefix: the step's folder, such as "1200".
        package: of a step that raystate wrote. Its bytes are used instead of the published small files, so that only the array
            data, which carry checksums of their own, are taken from there.
        item: look at nothing but this item of arrays, which is the state then.
        bytes_in_flight: at most so many bytes of arrays are being read at a time (one request may be larger).
        io_concurrency: requests to storage at a time.
        timeout_s: for each wait on storage.

    Attributes:
        bytes_read: bytes of decoded chunks that `read` has fetched so far.
    """

    def __init__(
        self,
        storage: HasKvstore | Callable[[str], dict[str, Any]],
        step_prefix: str,
        *,
        package: Package | None = None,
        item: str | None = None,
        bytes_in_flight: int = 1 << 30,
        io_concurrency: int = 32,
        timeout_s: float = 600.0,
    ):
        spec_of = storage if callable(storage) else storage.kvstore
        self._base = spec_of(step_prefix.strip("/"))
        last = step_prefix.strip("/").rpartition("/")[2]
        self._step: int | str = int(last) if last.isdigit() else last
        self._package = package
        self._bytes_in_flight = bytes_in_flight
        self._timeout_s = timeout_s
        self._context = kv.context(io_concurrency=io_concurrency)
        self._lock = threading.RLock()
        self._metadata: CheckpointMetadata | None = None
        self._items: dict[str, ItemKind] | None = None if item is None else {item: "arrays"}
        self._only = item
        self._trees: dict[str, TreeMetadata] = {}
        self._specs: dict[str, TreeSpec] = {}
        self._stores: dict[str, dict[str, ts.TensorStore]] = {}
        self.bytes_read = 0

    # ------------------------------------------------------------ what there is

    def items(self) -> dict[str, ItemKind]:
        """item -> what it is stored as, sorted; metrics are no item. Raises StepNotFoundError if there is no such step."""
        with self._lock:
            if self._items is None:
                names = set(self._step_metadata().handlers) or self._listed_items()
                self._items = {name: self._kind(name) for name in sorted(names - {_METRICS})}
            return dict(self._items)

    def state_item(self) -> str:
        """The item that holds the state: "state" (raystate, Orbax v1), or "default" (Orbax v0).

        Raises:
            ReferenceMismatchError: the step was written with other items; says which. Nothing is wrong with it.
            CorruptCheckpointError: its metadata names an item of which nothing is there, or a state that is no tree of arrays.
        """
        items = self.items()
        for name in STATE_ITEMS if self._only is None else (self._only,):
            if items.get(name) == "arrays":
                return name
        lost = [item for item, kind in items.items() if kind == "other" and (item in STATE_ITEMS or not self._names(f"{item}/"))]
        if lost:
            message = f"step {self._step} has lost the metadata of its item {lost[0]!r}, of {list(items)}"
            raise CorruptCheckpointError(message, step=self._step, item=lost[0])
        arrays = [item for item, kind in items.items() if kind == "arrays"]
        message = f"step {self._step} has no item 'state' or 'default'"
        if arrays:
            named = ", ".join(repr(item) for item in arrays)
            message += f": its arrays are in {named}. raystate.load(…, item={arrays[0]!r}) reads one item"
        else:
            kinds = ", ".join(f"{item!r} ({kind})" for item, kind in items.items() if "/" not in item)
            message += f" and no other item of arrays; there is {kinds or 'no item at all'}"
        raise ReferenceMismatchError(message, step=self._step, expected=STATE_ITEMS, got=arrays)

    @property
    def save(self) -> str | None:
        """The save whose package this is read with; None without a package."""
        return self._package.save if self._package is not None else None

    def tree(self, item: str) -> TreeSpec:
        """An array item's leaves, in Orbax's order, with the values of its scalars and strings."""
        with self._lock:
            if item not in self._specs:
                self._specs[item] = self._read_tree(item)
            return self._specs[item]

    # ------------------------------------------------------------ arrays

    def read(self, item: str, requests: Sequence[Request]) -> list[np.ndarray]:
        """Read boxes of arrays, in parallel, and of each array only the chunks they touch.

        Args:
            item: an array item.
            requests: (leaf index in `tree(item)`, start, shape), in elements of the global array.

        Returns:
            One array per request, of the leaf's dtype. Equal requests share one array.

        Raises:
            CorruptCheckpointError: a chunk is missing or does not match its checksum.
            StorageError: storage did not answer.
        """
        tree = self.tree(item)
        stores = self._open(item)
        parts, fetched = read_boxes(
            {leaf: (tree.leaves[leaf], stores[tree.leaves[leaf].name]) for leaf in {request[0] for request in requests}},
            requests,
            what=lambda leaf: f"reading array {tree.leaves[leaf].name!r} of item {item!r} of step {self._step}",
            facts=lambda leaf: {"step": self._step, "item": item, "path": tree.leaves[leaf].name},
            bytes_in_flight=self._bytes_in_flight,
            timeout_s=self._timeout_s,
        )
        with self._lock:
            self.bytes_read += fetched
        return parts

    def has_checksums(self, item: str, name: str) -> bool:
        """Whether the chunks of an array carry checksums, so that `read` refuses a flipped bit."""
        return '"crc32c"' in json.dumps(self._open(item)[name].spec().to_json())

    # ------------------------------------------------------------ everything else

    def json(self, item: str) -> Any:
        """The value of a JSON item."""
        for name in _JSON_FILES:
            data = self._file(f"{item}/{name}")
            if data is not None:
                return self._parsed(f"{item}/{name}", data)
        raise CorruptCheckpointError(f"step {self._step} has no JSON item {item!r}", step=self._step, item=item)

    def iterator_states(self, item: str) -> tuple[dict[int, bytes], int]:
        """(process -> state, process count) of an iterator item; every process is there."""
        found = {
            name: match for name in self._names(f"{item}/process_") if (match := _ITERATOR_FILE.fullmatch(name.split("/")[-1]))
        }
        counts = {int(match[2]) for match in found.values()}
        if len(counts) != 1:
            raise CorruptCheckpointError(
                f"item {item!r} of step {self._step} has iterator states of {sorted(counts) or 'no'} processes",
                step=self._step,
                item=item,
            )
        states = {int(match[1]): self._file(name) for name, match in found.items()}
        world = counts.pop()
        if lacking := [process for process in range(world) if states.get(process) is None]:
            message = f"item {item!r} of step {self._step} lacks the iterator states of processes {lacking} of {world}"
            raise CorruptCheckpointError(message, step=self._step, item=item)
        return {process: data for process, data in sorted(states.items()) if data is not None}, world

    def metrics(self) -> dict[str, Any]:
        """What was given to save; empty if nothing was."""
        if self._only is not None:
            return {}
        for name in (f"{_METRICS}/{_METRICS}", f"{_METRICS}/metadata"):
            data = self._file(name)
            if data is not None:
                return self._parsed(name, data)
        return {}

    def custom(self) -> Any:
        """What was given to save; None if nothing was."""
        custom = self._step_metadata().custom
        return custom[CUSTOM_KEY] if set(custom) == {CUSTOM_KEY} else custom or None

    # ------------------------------------------------------------ inside

    def _read_tree(self, item: str) -> TreeSpec:
        metadata = self._tree_metadata(item)
        sharding_data, strings_data = self._file(f"{item}/_sharding"), self._file(f"{item}/_strings.json")
        shardings = parse_shardings(sharding_data, self._what(f"{item}/_sharding")) if sharding_data else {}
        string_of = parse_strings(strings_data or b"{}", self._what(f"{item}/_strings.json"))
        key_impls = self._key_impls(item)
        stores = self._open(item)
        scalars: dict[str, Any] = {}
        reads = {node.name: stores[node.name].read() for node in metadata.nodes if node.kind == "scalar"}
        for name, future in reads.items():
            with self._named(f"reading scalar {name!r} of item {item!r}", item=item, path=name):
                scalars[name] = future.result(timeout=self._timeout_s).item()
        leaves: list[LeafSpec] = []
        for node in metadata.nodes:
            match node.kind:
                case "jax.Array" | "np.ndarray":
                    array = _array_spec(stores[node.name], shardings.get(node.name), key_impls.get(node.name), node)
                    leaves.append(LeafSpec(path=node.path, kind="array", array=array))
                case "scalar":
                    leaves.append(LeafSpec(path=node.path, kind="scalar", value=scalars[node.name]))
                case "string":
                    if (text := string_of(node.name)) is None:
                        message = f"string {node.name!r} of item {item!r} of step {self._step} is missing"
                        raise CorruptCheckpointError(message, step=self._step, item=item, path=node.name)
                    leaves.append(LeafSpec(path=node.path, kind="string", value=text))
                case _:
                    leaves.append(LeafSpec(path=node.path, kind=node.kind))
        return TreeSpec(item=item, leaves=tuple(leaves))

    def _key_impls(self, item: str) -> dict[str, str]:
        """Parameter name -> implementation of its typed PRNG keys. Every process of a save writes the same; the first will do."""
        name = f"{item}/array_metadatas/process_0"
        data = self._file(name)
        if data is None:
            for name in self._names(f"{item}/array_metadatas/process_")[:1]:
                data = self._file(name)
        if data is None:
            return {}  # early Orbax wrote none, and none is written for a tree without a jax.Array
        return parse_key_impls(data, self._what(name))

    def _tree_metadata(self, item: str) -> TreeMetadata:
        with self._lock:
            if item not in self._trees:
                data = self._file(f"{item}/_METADATA")
                if data is None:
                    self._step_metadata()  # says so if it is the step that is missing
                    raise CorruptCheckpointError(f"step {self._step} has no array item {item!r}", step=self._step, item=item)
                self._trees[item] = parse_tree(data, self._what(f"{item}/_METADATA"))
            return self._trees[item]

    def _open(self, item: str) -> dict[str, ts.TensorStore]:
        """Parameter name -> open array, of all arrays and scalars of an item."""
        with self._lock:
            if item not in self._stores:
                metadata = self._tree_metadata(item)
                base = kv.below(self._base, f"{item}/")
                ocdbt = metadata.ocdbt
                if ocdbt is None:
                    ocdbt = self._file(f"{item}/manifest.ocdbt") is not None
                manifest = self._manifest(item) if ocdbt else None
                if not ocdbt:  # a name is a path then
                    for node in metadata.nodes:
                        self._check_inside(node.name, f"array {node.name!r} of item {item!r}")
                opening = {
                    node.name: ts.open(
                        ts.Spec(_read_spec(base, manifest, node.name, zarr3=metadata.zarr3, ocdbt=ocdbt)), context=self._context
                    )
                    for node in metadata.nodes
                    if node.kind in ("jax.Array", "np.ndarray", "scalar")
                }
                stores: dict[str, ts.TensorStore] = {}
                for name, future in opening.items():
                    with self._named(f"opening array {name!r} of item {item!r}", item=item, path=name):
                        stores[name] = future.result(timeout=self._timeout_s)
                self._stores[item] = stores
            return self._stores[item]

    def _manifest(self, item: str) -> dict[str, Any] | None:
        """Where the package's manifest of an item's database can be read: in memory. None: where the step has it."""
        data = self._file(f"{item}/manifest.ocdbt") if self._package is not None else None
        if data is None:
            return None
        spec = {"driver": "memory", "path": f"{item}/"}
        kv.open_store(spec, timeout_s=self._timeout_s, ctx=self._context).write("manifest.ocdbt", data).result(self._timeout_s)
        return spec

    def _step_metadata(self) -> CheckpointMetadata:
        with self._lock:
            if self._only is not None:
                return CheckpointMetadata(handlers={}, custom={})
            if self._metadata is None:
                data = self._file("_CHECKPOINT_METADATA")
                if data is None and not self._names(""):
                    raise StepNotFoundError(f"step {self._step} does not exist in {self._base.get('path', '')}", step=self._step)
                # Early Orbax wrote no such file; the items are found by listing then.
                self._metadata = parse_step(data if data is not None else b"{}", self._what("_CHECKPOINT_METADATA"))
                for item in self._metadata.handlers:
                    self._check_inside(item, f"item {item!r}")
            return self._metadata

    def _check_inside(self, name: str, what: str) -> None:
        """What a checkpoint names lies in it: nobody reads other files by a name that was made for it."""
        if name.startswith("/") or "\0" in name or not {"", ".", ".."}.isdisjoint(name.split("/")):
            raise CorruptCheckpointError(f"step {self._step}: {what} is no name inside the checkpoint", step=self._step, path=name)

    def _listed_items(self) -> set[str]:
        return {name.split("/")[0] for name in self._names("") if "/" in name}

    def _kind(self, item: str) -> ItemKind:
        if self._file(f"{item}/_METADATA") is not None:
            return "arrays"
        if any(self._file(f"{item}/{name}") is not None for name in _JSON_FILES):
            return "json"
        return "iterator" if any(_ITERATOR_FILE.fullmatch(n.split("/")[-1]) for n in self._names(f"{item}/process_")) else "other"

    def _file(self, name: str) -> bytes | None:
        if self._package is not None:
            return self._package.files.get(name)
        with self._named(f"reading {name}"):
            return kv.read_key(self._store(), name, timeout_s=self._timeout_s)

    def _names(self, prefix: str) -> list[str]:
        if self._package is not None:
            return sorted(name for name in self._package.files if name.startswith(prefix))
        with self._named(f"listing {prefix}"):
            return kv.list_keys(self._store(), prefix, timeout_s=self._timeout_s)

    def _store(self) -> ts.KvStore:
        return kv.open_store(self._base, timeout_s=self._timeout_s, ctx=self._context)

    def _parsed(self, name: str, data: bytes) -> Any:
        try:
            return json.loads(data)
        except ValueError as error:
            raise CorruptCheckpointError(f"{self._what(name)} is not JSON: {error}", step=self._step) from error

    def _what(self, name: str) -> str:
        return f"{name} of step {self._step}"

    def _named(self, what: str, **facts: Any):
        return kv.named_errors(f"step {self._step}: {what}", damage=True, step=self._step, **facts)


def _read_spec(base: dict[str, Any], manifest: dict[str, Any] | None, name: str, *, zarr3: bool, ocdbt: bool) -> dict[str, Any]:
    return {
        "driver": "zarr3" if zarr3 else "zarr",
        "kvstore": kv.ocdbt(base, kv.array_path(name), manifest=manifest) if ocdbt else kv.below(base, kv.array_path(name)),
        "fill_missing_data_reads": False,  # a missing chunk is an error, not zeros
        "open": True,
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
    }


def _array_spec(store: ts.TensorStore, sharding: str | None, key_impl: str | None, node: MetadataNode) -> ArraySpec:
    # A dimension of size 0 may have a chunk of 0 in zarr2.
    chunk = tuple(max(1, size or 1) for size in store.chunk_layout.read_chunk.shape or ())
    return ArraySpec(
        shape=tuple(store.shape),
        dtype=store.dtype.name,
        chunk=chunk,
        sharding=sharding,
        typestr="np.ndarray" if node.kind == "np.ndarray" else "jax.Array",
        key_impl=key_impl,
    )
