"""A step of a run, written to another place and in another format."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, cast, get_args

from raystate.core.formats.errors import ConfigError
from raystate.inspection import Checkpoints
from raystate.legacy.directory import LegacyCheckpoint
from raystate.orbax.item_kinds import STATE_ITEMS
from raystate.orbax.step_reader import StepReader
from raystate.storage import canonical_url
from raystate.transfer import safetensors_format
from raystate.transfer.copying import copy_step
from raystate.transfer.flat_export import export_safetensors
from raystate.transfer.orbax_export import export_orbax
from raystate.transfer.picking import Picked, pick
from raystate.transfer.places import WrittenFile
from raystate.transfer.progress import Progress, ignore
from raystate.transfer.urls import CHAIN, local_path, refuse_owned, split, text_of

Format = Literal["safetensors", "orbax", "copy"]
SHARD_BYTES = 5_000_000_000  # as Hugging Face's tools cut
MODEL = "model"  # the stem of the files in a folder, which those tools look for


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """The outcome of an export.

    Attributes:
        format: see `export_step`.
        url: of the folder in which the files are.
        files: with names relative to it.
        step: which step.
        arrays: how many; 0 of a copy, which doesn't look into them.
        nbytes: of all files.
        verified: whether everything was read back.
    """

    format: Format
    url: str
    files: tuple[WrittenFile, ...]
    step: int
    arrays: int
    nbytes: int
    verified: bool


def export_step(
    storage: str | os.PathLike[str],
    step: int | None,
    dst: str | os.PathLike[str],
    *,
    format: Format | None = None,
    item: str | None = None,
    match: str | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    verify: bool = True,
    progress: Progress = ignore,
) -> ExportReport:
    """Write a step somewhere else, all or nothing as far as the destination allows.

    Args:
        storage: of a run; or one checkpoint's folder.
        step: number of completed steps; None: the newest.
        dst: any URL that fsspec knows. "….safetensors" is a file; anything else is a folder, in which "orbax" and "copy"
            make the folder `<step>` and "safetensors" makes `model.safetensors`. Not in a run's storage, nor in a checkpoint.
        format: None: what `dst` ends with, else "copy".
        item: an item of arrays; None: the state. Not with "copy".
        match: only leaves whose dotted name this regular expression matches anywhere. Not with "copy".
        dtype: cast floating-point arrays to it. Not with "copy".
        shard_bytes: safetensors files have at most so many bytes of arrays each, unless one array alone has more.
        verify: read everything back and compare.
        progress: is told how far it is.

    Raises:
        ConfigError: an argument is wrong, or something is at the destination already. StepNotFoundError.
        CorruptCheckpointError: the step is damaged. StorageError: a place could not be read or written.
    """
    url = text_of(dst, "dst")
    chosen = _format(url, format)
    if chosen == "copy" and (item is not None or match is not None or dtype is not None):
        raise ConfigError("item, match and dtype are for the other formats: a copy is the whole step as it is", field="format")
    if shard_bytes < 1:
        raise ConfigError(f"shard_bytes must be at least 1, not {shard_bytes}", field="shard_bytes")
    single = url.partition(CHAIN)[0].endswith(safetensors_format.SUFFIX)
    if not single and local_path(url) is not None:
        canonical_url(url)  # what is written there is to be read as a checkpoint
    refuse_owned(split(url)[0] if single else url)
    there = Checkpoints(storage)
    number = there.existing(step)
    if chosen == "copy" and isinstance(there.single, LegacyCheckpoint):
        raise ConfigError(
            f"format: {there.storage.url} is in an older form of flax's, which is no step to copy; export it as 'orbax' or "
            "'safetensors'",
            field="format", got="copy",
        )  # fmt: skip
    arrays = 0
    if chosen == "copy":
        place, files = url, copy_step(there.storage, number, there.folder(number), url, verify=verify, progress=progress)
    else:
        source = _read_item(there.open(number), number, item)
        picked = pick(source.tree, source.read, match=match, dtype=dtype)
        arrays = sum(leaf.array is not None for leaf in picked.tree.leaves)
        if chosen == "orbax":
            place, files = url, export_orbax(url, number, picked, verify=verify, progress=progress)
        else:
            place, name = split(url) if single else (url, MODEL)
            stem = name.removesuffix(safetensors_format.SUFFIX)
            files = export_safetensors(place, stem, number, picked, shard_bytes, verify=verify, progress=progress)
    return ExportReport(
        format=chosen,
        url=place,
        files=tuple(files),
        step=number,
        arrays=arrays,
        nbytes=sum(file.size for file in files),
        verified=verify,
    )


# ---------------------------------------------------------------- what is exported


def _read_item(reader: StepReader, step: int, item: str | None) -> Picked:
    arrays = [name for name, kind in reader.items().items() if kind == "arrays"]
    if item is None or (item in STATE_ITEMS and item not in arrays):
        name = reader.state_item()
    elif item in arrays:
        name = item
    else:
        have = ", ".join(map(repr, arrays)) or "none"
        raise ConfigError(f"item: step {step} has no item {item!r} of arrays; it has {have}", field="item", got=item)
    return Picked(tree=reader.tree(name), read=lambda requests: reader.read(name, requests))


def _format(url: str, asked: Format | None) -> Format:
    ending: Format | None = "safetensors" if url.partition(CHAIN)[0].endswith(safetensors_format.SUFFIX) else None
    if asked is not None and asked not in get_args(Format):
        raise ConfigError(f"format: {asked!r} is none of {', '.join(get_args(Format))}", field="format", got=asked)
    chosen = cast(Format, asked or ending or "copy")
    if ending is not None and chosen != ending:
        raise ConfigError(f"dst: {url!r} ends like a {ending} file, and the format is {chosen}", field="dst", got=url)
    return chosen
