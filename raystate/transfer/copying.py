"""A step as it is, file by file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from raystate.core.formats.errors import CorruptCheckpointError
from raystate.core.formats.tree import DataObject, Package
from raystate.machine.checksum import crc32c
from raystate.storage import Storage, find_package
from raystate.storage.names import MARKER, TREE_METADATA, marker_last
from raystate.transfer.description import is_plain_name
from raystate.transfer.places import PART_BYTES, RemotePlace, WrittenFile, open_place
from raystate.transfer.progress import Progress, Tally
from raystate.transfer.urls import open_files, storage_errors


def copy_step(storage: Storage, step: int, folder: str, dst: str, *, verify: bool, progress: Progress) -> list[WrittenFile]:
    """Copy a step into the folder `<step>` of `dst`; its marker is last.

    Of a step with a package exactly what the package names, and each object is compared with it while it is read.

    Args:
        storage: of the run; or the folder of one checkpoint.
        step: number of completed steps.
        folder: where the step lies in it; "" if it is the checkpoint itself.
        dst: URL of a folder.

    Raises: as `export_step`.
    """
    package = find_package(storage, step) if folder == str(step) else None
    prefix = f"{folder}/" if folder else ""
    sizes = _package_sizes(package) if package is not None else _listed_sizes(storage, folder)
    for name in sizes:
        if not is_plain_name(name):
            raise CorruptCheckpointError(f"step {step}: {name[:200]!r} is no name inside the checkpoint", step=step, path=name)
    objects = {obj.name: obj for obj in package.objects} if package is not None else {}
    fs, root = open_files(storage.url, field="storage")
    tally = Tally(progress, sum(sizes.values()))
    with open_place(dst, [str(step)]) as place:
        for name in sorted(sizes, key=marker_last):
            if package is not None and name in package.files:
                chunks = iter([package.files[name]])
            else:
                chunks = _read(fs, f"{root.rstrip('/')}/{prefix}{name}", objects.get(name), step, tally)
            place.write(f"{step}/{name}", chunks)
        if isinstance(place, RemotePlace):  # early Orbax wrote none in a directory, and an object store's step is nothing without
            for name in sorted(_markers(sizes) - set(sizes), key=marker_last):
                place.write(f"{step}/{name}", iter([b""]))
        place.complete(verify=verify, on_bytes=tally.verifying)
    return place.files


def _markers(names: Iterable[str]) -> set[str]:
    """Of a step and of its items."""
    above = (name.rpartition("/")[0] for name in names if name.rpartition("/")[2] == TREE_METADATA)
    return {MARKER, *(f"{item}/{MARKER}" for item in above if item)}


def _package_sizes(package: Package) -> dict[str, int]:
    return {name: len(data) for name, data in package.files.items()} | {obj.name: obj.size for obj in package.objects}


def _listed_sizes(storage: Storage, folder: str) -> dict[str, int]:
    cut = len(folder) + 1 if folder else 0
    return {info.name[cut:]: info.size for info in storage.list(folder)}


def _read(fs: Any, path: str, expected: DataObject | None, step: int, tally: Tally) -> Iterator[bytes]:
    crc = size = 0
    with storage_errors("read", path), fs.open(path, "rb") as file:
        while part := file.read(PART_BYTES):
            yield part
            crc, size = crc32c(part, crc), size + len(part)
            tally.writing(len(part))
    if expected is not None and (size, crc) != (expected.size, expected.crc32c):
        what = f"{size} bytes with crc32c {crc:08x} instead of {expected.size} with {expected.crc32c:08x}"
        raise CorruptCheckpointError(f"step {step}: {expected.name} has {what}; nothing was copied", step=step, path=expected.name)
