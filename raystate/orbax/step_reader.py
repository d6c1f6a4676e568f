"""Reads a step: one that raystate wrote, or stock Orbax (v0 or v1, zarr2 or zarr3, OCDBT or not). Loads neither jax nor orbax.

Never fills in for data that is not there: a missing chunk, like a flipped bit, is a CorruptCheckpointError that names step, item
and array.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from raystate.core.formats.errors import CorruptCheckpointError, StepNotFoundError
from raystate.core.formats.own_files import MARKER
from raystate.core.formats.tree import LeafSpec, Package, TreeSpec
from raystate.orbax import kv
from raystate.orbax.array_reads import Request, read_boxes
from raystate.orbax.array_specs import describe_store, open_arrays, plain_spec, read_spec
from raystate.orbax.item_kinds import JSON_FILES, METRICS, ItemKind, choose_state, item_kind, iterator_files, iterator_states
from raystate.orbax.json_checks import parse_json, parse_object
from raystate.orbax.step_files import HasKvstore, StepFiles, of_one_checkpoint
from raystate.orbax.step_metadata import (
    ARRAY_FOLDER,
    ARRAY_HANDLER,
    CUSTOM_KEY,
    CheckpointMetadata,
    TreeMetadata,
    parse_key_impls,
    parse_shardings,
    parse_step,
    parse_strings,
    parse_tree,
)
from raystate.orbax.stored import StoredValue, stored_values

BARE_ITEM = "state"  # what a tree is called that lies in its folder without an item

_OF_A_TREE = ("_sharding", "manifest.ocdbt")  # what an item of arrays has beside its metadata


class StepReader:
    """One step, read lazily; its metadata is kept once it is read. May be used by several threads.
    Holds nothing to close.

    Args:
        storage: where.
        step_prefix: the step's folder, such as "1200": of items, or of one tree that lies in it without an item and is the state.
        step: number of completed steps, or a name, for errors; None: as the folder is called.
        package: of a step that raystate wrote. Its bytes are used instead of the published small files, so that only the array
            data, which carry checksums of their own, are taken from there.

    Attributes:
        is_replaced: whether another checkpoint has taken the place of this one since it was read first.
        bytes_read: bytes of decoded chunks that `read` has fetched so far.
        on_open: called with (arrays and scalars of an item that are open, all of them) while they are opened, which takes seconds
            for thousands.
    """

    def __init__(
        self,
        storage: HasKvstore,
        step_prefix: str,
        *,
        step: int | str | None = None,
        package: Package | None = None,
    ):
        last = step_prefix.strip("/").rpartition("/")[2]
        self._step: int | str = step if step is not None else int(last) if last.isascii() and last.isdigit() else last
        self._package = package
        self._context = kv.context()
        self._files = StepFiles(storage, step_prefix.strip("/"), package=package, step=self._step)
        self._lock = threading.RLock()
        self._metadata: CheckpointMetadata | None = None
        self._items: dict[str, ItemKind] | None = None
        self._bare: bool | None = None
        self._trees: dict[str, TreeMetadata] = {}
        self._specs: dict[str, TreeSpec] = {}
        self._stores: dict[str, dict[str, ts.TensorStore]] = {}
        self.is_replaced = self._files.is_replaced
        self.bytes_read = 0
        self.on_open: Callable[[int, int], None] = lambda _done, _total: None

    # ------------------------------------------------------------ what there is

    @of_one_checkpoint
    def items(self) -> dict[str, ItemKind]:
        """item -> what it is stored as, sorted; metrics are none, arrays called so are. Raises StepNotFoundError if there is no step."""
        with self._lock:
            if self._items is None and self.is_bare():
                self._items = {BARE_ITEM: "arrays"}
            elif self._items is None:
                names = set(self._step_metadata().handlers) or self._listed_items()
                kinds: dict[str, ItemKind] = {name: self._kind(name) for name in sorted(names)}
                self._items = {name: kind for name, kind in kinds.items() if name != METRICS or kind == "arrays"}
            return dict(self._items)

    def is_bare(self) -> bool:
        """Whether a tree lies in this folder without an item, as `PyTreeCheckpointer` writes it."""
        with self._lock:
            if self._bare is None:
                self._bare = self._files.read("_METADATA") is not None
            return self._bare

    def state_item(self) -> str:
        """The item that holds the state. Raises as `item_kinds.choose_state`."""
        return choose_state(
            self._step,
            self.items(),
            has_lost_its_tree=self._has_lost_its_tree,
            has_arrays=lambda item: self._tree_metadata(item).has_arrays,
        )

    @property
    def save(self) -> str | None:
        """The save whose package this is read with; None without a package."""
        return self._package.save if self._package is not None else None

    @of_one_checkpoint
    def tree(self, item: str) -> TreeSpec:
        """An array item's leaves, in Orbax's order, with the values of its scalars and strings."""
        with self._lock:
            if item not in self._specs:
                self._specs[item] = self._read_tree(item)
            return self._specs[item]

    # ------------------------------------------------------------ arrays

    @of_one_checkpoint
    def read(self, item: str, requests: Sequence[Request], into: Sequence[np.ndarray] | None = None) -> list[np.ndarray]:
        """Read boxes of arrays, in parallel, and of each array only the chunks they touch.

        Args:
            item: an array item.
            requests: (leaf index in `tree(item)`, start, shape), in elements of the global array.
            into: see `read_boxes`.

        Returns:
            One array per request, of the leaf's dtype. Equal requests share one array.

        Raises:
            CorruptCheckpointError: a chunk is missing or does not match its checksum.
            StorageError: storage did not answer.
        """
        tree = self.tree(item)
        stores = self._open(item)
        return read_boxes(
            {leaf: (tree.leaves[leaf], stores[tree.leaves[leaf].name]) for leaf in {request[0] for request in requests}},
            requests,
            what=lambda leaf: f"reading array {tree.leaves[leaf].name!r} of item {item!r} of step {self._step}",
            facts=lambda leaf: {"step": self._step, "item": item, "path": tree.leaves[leaf].name},
            on_bytes=self._count,
            into=into,
        )

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.bytes_read += nbytes

    def item_store(self, item: str) -> dict[str, Any]:
        """The TensorStore kvstore spec of the folder in which an item lies."""
        base = self._files.base if self.is_bare() else kv.below(self._files.base, f"{item}/")
        return kv.below(base, ARRAY_FOLDER) if self._is_one_array(item) else base

    def spec_of(self, item: str, name: str) -> dict[str, Any]:
        """The TensorStore spec of an array or scalar, as anybody can open it."""
        return plain_spec(self.item_store(item), name, zarr3=self._tree_metadata(item).zarr3, ocdbt=self._is_ocdbt(item))

    def stored(self, item: str) -> dict[str, StoredValue] | None:
        """Key -> where its value lies, of an array item that is an OCDBT database; None: it is plain files."""
        if not self._is_ocdbt(item):
            return None
        with self._named(f"looking at the database of item {item!r}", item=item):
            specs = self.item_store(item), self._manifest(item) or self.item_store(item)
            base, manifest = (kv.open_store(spec, self._context) for spec in specs)
            return stored_values(base, manifest)

    def has_checksums(self, item: str, name: str) -> bool:
        """Whether the chunks of an array carry checksums, so that `read` refuses a flipped bit."""
        return '"crc32c"' in json.dumps(self._open(item)[name].spec().to_json())

    # ------------------------------------------------------------ everything else

    @of_one_checkpoint
    def json(self, item: str) -> Any:
        """The value of a JSON item."""
        for name in JSON_FILES:
            data = self._files.read(f"{item}/{name}")
            if data is not None:
                return parse_json(data, self._what(f"{item}/{name}"))
        raise CorruptCheckpointError(f"step {self._step} has no JSON item {item!r}", step=self._step, item=item)

    @of_one_checkpoint
    def has_iterator_states(self, item: str) -> bool:
        """Whether an iterator can be set from it: also where Orbax v1 says that an object wrote the files itself."""
        return bool(iterator_files(self._files.names(f"{item}/process_")))

    @of_one_checkpoint
    def iterator_states(self, item: str) -> tuple[dict[int, bytes], int]:
        """(process -> state, process count) of an iterator item; every process is there."""
        return iterator_states(self._files.names(f"{item}/process_"), self._files.read, step=self._step, item=item)

    @of_one_checkpoint
    def own_files(self, item: str) -> dict[str, bytes]:
        """What a user's checkpointable wrote: name relative to the item's folder -> bytes."""
        names = [name.removeprefix(f"{item}/") for name in self._files.names(f"{item}/")]
        for name in names:
            self._check_inside(name, f"file {name!r} of item {item!r}")
        found = {name: self._files.read(f"{item}/{name}") for name in names if name != MARKER}
        return {name: data for name, data in found.items() if data is not None}

    @of_one_checkpoint
    def metrics(self) -> dict[str, Any]:
        """What was given to save; empty if nothing was."""
        if self.is_bare():
            return {}
        for name in (f"{METRICS}/{METRICS}", f"{METRICS}/metadata"):
            data = self._files.read(name)
            if data is not None:
                return parse_object(data, self._what(name))
        return {}

    @of_one_checkpoint
    def custom(self) -> Any:
        """What was given to save; None if nothing was."""
        custom = self._step_metadata().custom
        return custom[CUSTOM_KEY] if set(custom) == {CUSTOM_KEY} else custom or None

    def times(self) -> tuple[float | None, float | None]:
        """(begin of the save, its commit) in wall clock seconds; None where no file says it."""
        metadata = self._step_metadata()
        return metadata.begun_s, metadata.committed_s

    # ------------------------------------------------------------ inside

    def _read_tree(self, item: str) -> TreeSpec:
        metadata = self._tree_metadata(item)
        sharding_data, strings_data = (
            self._files.read(self._within(item, "_sharding")),
            self._files.read(self._within(item, "_strings.json")),
        )
        shardings = parse_shardings(sharding_data, self._what(f"{item}/_sharding")) if sharding_data else {}
        string_of = parse_strings(strings_data or b"{}", self._what(f"{item}/_strings.json"))
        key_impls = self._key_impls(item)
        if self._is_one_array(item):
            shardings, key_impls = (dict(zip([""], of.values(), strict=False)) for of in (shardings, key_impls))
        stores = self._open(item)
        scalars: dict[str, Any] = {}
        reads = {node.name: stores[node.name].read() for node in metadata.nodes if node.kind == "scalar"}
        for name, future in reads.items():
            with self._named(f"reading scalar {name!r} of item {item!r}", item=item, path=name):
                scalars[name] = kv.result(future).item()
        leaves: list[LeafSpec] = []
        for node in metadata.nodes:
            match node.kind:
                case "jax.Array" | "np.ndarray":
                    array = describe_store(stores[node.name], shardings.get(node.name), key_impls.get(node.name), node)
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
        name = self._within(item, "array_metadatas/process_0")
        data = self._files.read(name)
        if data is None:
            for name in self._files.names(self._within(item, "array_metadatas/process_"))[:1]:
                data = self._files.read(name)
        if data is None:
            return {}  # early Orbax wrote none, and none is written for a tree without a jax.Array
        return parse_key_impls(data, self._what(name))

    def _tree_metadata(self, item: str) -> TreeMetadata:
        with self._lock:
            if item not in self._trees:
                data = self._files.read(self._within(item, "_METADATA"))
                if data is None:
                    self._step_metadata()  # says so if it is the step that is missing
                    raise CorruptCheckpointError(f"step {self._step} has no array item {item!r}", step=self._step, item=item)
                tree = parse_tree(data, self._what(f"{item}/_METADATA"))
                if self._is_one_array(item):
                    tree = dataclasses.replace(tree, nodes=tuple(dataclasses.replace(node, path=()) for node in tree.nodes[:1]))
                self._trees[item] = tree
            return self._trees[item]

    def _is_one_array(self, item: str) -> bool:
        said = self._step_metadata()
        return (said.handler if self.is_bare() else said.handlers.get(item, "")).endswith(ARRAY_HANDLER)

    def _open(self, item: str) -> dict[str, ts.TensorStore]:
        """Parameter name -> open array, of all arrays and scalars of an item."""
        with self._lock:
            if item not in self._stores:
                metadata = self._tree_metadata(item)
                base = self.item_store(item)
                ocdbt = self._is_ocdbt(item)
                manifest = self._manifest(item) if ocdbt else None
                if not ocdbt:  # a name is a path then
                    for node in metadata.nodes if not self._is_one_array(item) else ():
                        self._check_inside(node.name, f"array {node.name!r} of item {item!r}")
                self._files.refuse_item(self._within(item, ""), f"step {self._step}: item {item!r}", step=self._step, item=item)
                self._stores[item] = open_arrays(
                    {
                        node.name: read_spec(base, manifest, node.name, zarr3=metadata.zarr3, ocdbt=ocdbt)
                        for node in metadata.nodes
                        if node.kind in ("jax.Array", "np.ndarray", "scalar")
                    },
                    numbers={node.name for node in metadata.nodes if node.kind == "scalar"},
                    named=lambda name: self._named(f"opening array {name!r} of item {item!r}", item=item, path=name),
                    context=self._context,
                    on_open=self.on_open,
                )
            return self._stores[item]

    def _is_ocdbt(self, item: str) -> bool:
        said = self._tree_metadata(item).ocdbt
        return said if said is not None else self._files.read(self._within(item, "manifest.ocdbt")) is not None

    def _manifest(self, item: str) -> dict[str, Any] | None:
        """Where the package's manifest of an item's database can be read: in memory. None: where the step has it."""
        data = self._files.read(self._within(item, "manifest.ocdbt")) if self._package is not None else None
        if data is None:
            return None
        spec = {"driver": "memory", "path": f"{item}/"}
        kv.result(kv.open_store(spec, self._context).write("manifest.ocdbt", data))
        return spec

    def _step_metadata(self) -> CheckpointMetadata:
        with self._lock:
            if self._metadata is None:
                data = self._files.read("_CHECKPOINT_METADATA")
                if data is None and not self._files.names(""):
                    raise StepNotFoundError(
                        f"step {self._step} does not exist in {self._files.base.get('path', '')}", step=self._step
                    )
                # Early Orbax wrote no such file; the items are found by listing then.
                self._metadata = parse_step(data if data is not None else b"{}", self._what("_CHECKPOINT_METADATA"))
                for item in self._metadata.handlers:
                    self._check_inside(item, f"item {item!r}")
            return self._metadata

    def _check_inside(self, name: str, what: str) -> None:
        """What a checkpoint names lies in it: a forged name must not make a reader open other
        files."""
        if name.startswith("/") or "\0" in name or not {"", ".", ".."}.isdisjoint(name.split("/")):
            raise CorruptCheckpointError(f"step {self._step}: {what} is no name inside the checkpoint", step=self._step, path=name)

    def _within(self, item: str, name: str) -> str:
        return name if self.is_bare() else f"{item}/{name}"

    def _has_lost_its_tree(self, item: str) -> bool:
        left = {name.removeprefix(f"{item}/").split("/")[0] for name in self._files.names(f"{item}/")}
        return not left or not left.isdisjoint(_OF_A_TREE)

    def _listed_items(self) -> set[str]:
        return {name.split("/")[0] for name in self._files.names("") if "/" in name}

    def _kind(self, item: str) -> ItemKind:
        return item_kind(
            self._step_metadata().handlers.get(item),
            lambda name: self._files.read(self._within(item, name)) is not None,
            lambda begin: self._files.names(f"{item}/{begin}"),
        )

    def _what(self, name: str) -> str:
        return f"{name} of step {self._step}"

    def _named(self, what: str, **facts: Any):
        return kv.named_errors(f"step {self._step}: {what}", damage=True, step=self._step, **facts)
