"""A tree as a plain Orbax checkpoint, as v0's CheckpointManager lays it out: the item is called `default`."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from raystate.core.formats.tree import Package, TreeSpec
from raystate.inspection.boxes import total_bytes
from raystate.orbax.array_reads import Request
from raystate.orbax.merge import build_files
from raystate.orbax.step_reader import StepReader
from raystate.storage import Storage, new_folder, open_storage
from raystate.storage.names import marker_last
from raystate.transfer.boxes import Read
from raystate.transfer.description import check_tree
from raystate.transfer.orbax_tree import check_written, with_our_chunks, write_tree
from raystate.transfer.picking import Picked
from raystate.transfer.places import PART_BYTES, WrittenFile, open_place
from raystate.transfer.progress import Progress, Tally
from raystate.transfer.urls import local_path, refuse_existing, storage_errors

ITEM = "default"  # what v0's managers look for


def export_orbax(dst: str, step: int, source: Picked, *, verify: bool, progress: Progress) -> list[WrittenFile]:
    """Write the folder `<step>` of `dst`.

    TensorStore writes to directories and to gs://. For any other place the step is made in a temporary directory of this machine, which
    needs room for it, and copied.

    Raises: as `export_step`.
    """
    tree = dataclasses.replace(with_our_chunks(source.tree), item=ITEM)
    check_tree(tree)
    tally = Tally(progress, total_bytes(tree))
    path = local_path(dst)
    if path is not None or dst.startswith("gs://"):
        return write_step(open_storage(path or dst), step, tree, source.read, verify=verify, tally=tally)
    with open_place(dst, [str(step)]) as place, tempfile.TemporaryDirectory(prefix="raystate-export-") as scratch:
        made = write_step(open_storage(scratch), step, tree, source.read, verify=False, tally=tally)
        for name in sorted((file.name for file in made), key=marker_last):
            place.write(name, _chunks(Path(scratch) / name))
        place.complete(verify=verify, on_bytes=tally.verifying)
    return place.files


def write_step(storage: Storage, step: int, tree: TreeSpec, read: Read, *, verify: bool, tally: Tally) -> list[WrittenFile]:
    """Write the folder `<step>` of a storage. Raises as `export_step`."""
    folder = str(step)
    if os.path.lexists(storage.local_path(folder)) if storage.is_directory else storage.list(folder):
        raise refuse_existing(storage.url, folder)
    with new_folder(storage, folder) as place:
        writers: list[str] = []
        sums: list[tuple[list[Request], list[int]]] = []
        for writer, requests, crcs in write_tree(storage, place.prefix, place.save, tree, read, on_bytes=tally.writing):
            writers.append(writer)
            sums.append((requests, crcs))
        base = f"{place.prefix}/{ITEM}"
        files = build_files(step, place.save, [tree], [tree.values], {ITEM: writers}, lambda _: storage.kvstore(base))
        if verify:
            package = Package(step=step, save=place.save, run="", files=files, objects=())
            reader = StepReader(storage, place.prefix, package=package)
            check_written(reader, tree, sums, what=f"{storage.url}/{folder}", on_bytes=tally.verifying)
        place.publish(files)
    return [WrittenFile(name=info.name, size=info.size, crc32c=info.crc32c or 0) for info in storage.list(folder)]


def _chunks(path: Path) -> Iterator[bytes]:
    with storage_errors("read", str(path)), path.open("rb") as file:
        while part := file.read(PART_BYTES):
            yield part
