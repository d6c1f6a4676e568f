"""A tree as named arrays in safetensors files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from raystate.core.formats.errors import ConfigError
from raystate.core.formats.tree import TreeSpec
from raystate.inspection.boxes import total_bytes
from raystate.orbax.array_reads import Request
from raystate.transfer import safetensors_format
from raystate.transfer.boxes import batches, raw, read_ahead
from raystate.transfer.description import KEY, KeptAs, describe_tree, leaf_name, scalar_array, stored_as, with_scalars
from raystate.transfer.picking import Picked
from raystate.transfer.places import WrittenFile, open_place
from raystate.transfer.progress import Progress, Tally
from raystate.transfer.urls import CHAIN, names_in, open_files, refuse_existing

_FORMAT = {"format": "pt"}  # without it Hugging Face's tools refuse a file; the bytes are the same for every framework


@dataclass(frozen=True, kw_only=True)
class _Flat:
    """A tree as named arrays; numbers are arrays of shape ()."""

    source: Picked
    tree: TreeSpec
    leaves: Mapping[str, int]  # name -> index of its leaf
    stored: Mapping[str, KeptAs]

    def parts(self, names: Sequence[str], tally: Tally) -> Iterator[tuple[str, np.ndarray]]:
        """(name, bytes of a part of it, as uint8) in the order of the names, read ahead. Each name comes at least once."""
        for requests, boxes in read_ahead(self._read, batches(self.tree, [self.leaves[name] for name in names])):
            for (leaf, _, _), box in zip(requests, boxes, strict=True):
                yield leaf_name(self.tree.leaves[leaf]), raw(box)
                tally.writing(box.nbytes)

    def _read(self, requests: Sequence[Request]) -> list[np.ndarray]:
        leaves = [self.source.tree.leaves[leaf] for leaf, _, _ in requests]
        arrays = iter(self.source.read([one for one, leaf in zip(requests, leaves, strict=True) if leaf.array is not None]))
        return [next(arrays) if leaf.array is not None else scalar_array(leaf.value) for leaf in leaves]


def _flat(source: Picked) -> _Flat:
    tree = with_scalars(source.tree)
    leaves: dict[str, int] = {}
    stored: dict[str, KeptAs] = {}
    for index, leaf in enumerate(tree.leaves):
        if leaf.array is None:
            continue
        name = leaf_name(leaf)
        if name in leaves:
            raise ConfigError(f"two leaves are both called {name!r} once their keys are joined by dots", field="item", path=name)
        leaves[name], stored[name] = index, stored_as(leaf.array, safetensors_format.DTYPES)
    return _Flat(source=source, tree=tree, leaves=leaves, stored=stored)


def export_safetensors(
    folder: str, stem: str, step: int, source: Picked, shard_bytes: int, *, verify: bool, progress: Progress
) -> list[WrittenFile]:
    """Write one safetensors file, or several and their index, which is last. Raises as `export_step`."""
    flat = _flat(source)
    description = describe_tree(source.tree, step)
    shards = safetensors_format.shards(flat.stored, shard_bytes)
    files = dict(zip(safetensors_format.shard_names(stem, len(shards)), shards, strict=True))
    # Wrong names and sizes are refused before anything is written.
    own = {**_FORMAT, KEY: description} if len(files) == 1 else _FORMAT
    headers = {file: safetensors_format.header_bytes(names, flat.stored, own) for file, names in files.items()}
    index = f"{stem}{safetensors_format.INDEX_SUFFIX}"
    _refuse_mixed(folder, stem)
    tally = Tally(progress, total_bytes(flat.tree))
    with open_place(folder, [*files, index] if len(files) > 1 else files) as place:
        for file, names in files.items():
            place.write(file, _file(headers[file], flat, names, tally))
        if len(files) > 1:
            total = sum(one.nbytes for one in flat.stored.values())
            place.write(index, [safetensors_format.index_bytes(files, total, description)])
        place.complete(verify=verify, on_bytes=tally.verifying)
    return place.files


def _refuse_mixed(folder: str, stem: str) -> None:
    """Another export of that name may have other files: a reader of the folder would take one of
    both."""
    if CHAIN in folder:
        return  # a new archive
    fs, inner = open_files(folder, field="dst")
    for name in names_in(fs, inner, folder) or ():
        if safetensors_format.is_of_export(name, stem):
            raise refuse_existing(folder, name)


def _file(header: bytes, flat: _Flat, names: Sequence[str], tally: Tally) -> Iterator[bytes | np.ndarray]:
    yield header
    for _, part in flat.parts(names, tally):
        yield part
