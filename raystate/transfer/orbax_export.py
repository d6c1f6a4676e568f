"""A tree as a plain Orbax checkpoint, as v0's CheckpointManager lays it out: the item is called `default`."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

from raystate.core.formats.tree import TreeSpec
from raystate.inspection.boxes import total_bytes
from raystate.orbax.array_reads import Request
from raystate.orbax.merge import build_files
from raystate.orbax.step_reader import StepReader
from raystate.storage import ObjectExistsError, Storage, open_storage
from raystate.storage.names import MARKER, marker_last
from raystate.storage.placing import FixedNames
from raystate.transfer.description import check_tree
from raystate.transfer.orbax_tree import check_written, with_our_chunks, write_tree
from raystate.transfer.picking import Picked
from raystate.transfer.places import PART_BYTES, LocalPlace, WrittenFile, open_place
from raystate.transfer.progress import Progress, Tally
from raystate.transfer.urls import refuse_existing, storage_errors

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
    if dst.startswith("gs://"):
        return _on_gcs(open_storage(dst), dst, step, tree, source, verify, tally)
    with open_place(dst, [str(step)]) as place:
        if isinstance(place, LocalPlace):
            storage = open_storage(place.staging)
            _write(_fixed_names(storage, step), step, tree, source, verify, tally)
            place.files += _files(storage, step)
            place.complete(verify=False, on_bytes=tally.verifying)  # that was done array by array
        else:
            with tempfile.TemporaryDirectory(prefix="raystate-export-") as scratch:
                storage = open_storage(scratch)
                _write(_fixed_names(storage, step), step, tree, source, False, tally)
                for name in sorted((file.name for file in _files(storage, step)), key=marker_last):
                    place.write(name, _chunks(Path(scratch) / name))
                place.complete(verify=verify, on_bytes=tally.verifying)
    return place.files


def _on_gcs(storage: Storage, dst: str, step: int, tree: TreeSpec, source: Picked, verify: bool, tally: Tally) -> list[WrittenFile]:
    if storage.list(str(step)):
        raise refuse_existing(dst, str(step))
    files = _fixed_names(storage, step)
    try:
        _write(files, step, tree, source, verify, tally)
    except BaseException as error:
        with contextlib.suppress(Exception):  # the first error is the one to tell
            files.discard()  # another export to the same place may be complete by now
        if isinstance(error, ObjectExistsError):  # it was faster
            raise refuse_existing(dst, str(step)) from error
        raise
    return _files(storage, step)


def _fixed_names(storage: Storage, step: int) -> FixedNames:
    return FixedNames(storage, str(step), f"a0k{secrets.token_hex(4)}")


def _write(fixed: FixedNames, step: int, tree: TreeSpec, source: Picked, verify: bool, tally: Tally) -> None:
    storage, save = fixed.storage, fixed.save
    writers: list[str] = []
    sums: list[tuple[list[Request], list[int]]] = []
    for writer, requests, crcs in write_tree(storage, str(step), save, tree, source.read, on_bytes=tally.writing):
        writers.append(writer)
        sums.append((requests, crcs))
    files = build_files(step, save, [tree], [tree.values], {ITEM: writers}, lambda item: storage.kvstore(f"{step}/{item}"))
    for name in sorted((name for name in files if name != MARKER), key=marker_last):
        fixed.create(name, files[name])
    if verify:
        reader = StepReader(storage, str(step))
        check_written(reader, tree, sums, what=f"{storage.url}/{step}", on_bytes=tally.verifying)
    if MARKER in files:
        fixed.create(MARKER, files[MARKER])
    storage.fsync_tree(str(step))


def _files(storage: Storage, step: int) -> list[WrittenFile]:
    return [WrittenFile(name=info.name, size=info.size, crc32c=info.crc32c or 0) for info in storage.list(str(step))]


def _chunks(path: Path) -> Iterator[bytes]:
    with storage_errors("read", str(path)), path.open("rb") as file:
        while part := file.read(PART_BYTES):
            yield part
