"""What lies at SRC, and its steps one after the other.

Formats are told by what is there, never by trying to load it. Another format is one more function that gives `IncomingStep`s:
`IncomingStep.from_reader` makes one of any `StepReader`, `IncomingStep.from_tree(step, tree)` of a tree in memory.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from raystate.core.formats.errors import ConfigError, CorruptCheckpointError
from raystate.inspection import Checkpoints
from raystate.legacy import LegacyDirectory
from raystate.legacy.directory import LegacyStep
from raystate.orbax.array_reads import Request
from raystate.restored import STATE
from raystate.storage import OBJECT_SCHEMES, describe_foreign, foreign_checkpoints, number_in
from raystate.transfer import npz_format
from raystate.transfer.flat_source import is_tensor_name, npz_step, safetensors_step
from raystate.transfer.incoming import IncomingStep
from raystate.transfer.picking import pick
from raystate.transfer.safetensors_format import INDEX_SUFFIX, is_shard
from raystate.transfer.urls import CHAIN, local_path, missing, names_in, open_files, split, storage_errors, text_of

_KNOWN = "a safetensors file, folder or index, an .npz file, or a checkpoint or directory of checkpoints that Orbax or flax wrote"


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """How SRC is to be understood.

    Attributes:
        step: of a directory of steps only this one; of a single checkpoint the number that it gets. None: all; its own.
        item: the item of arrays that becomes the state; None: the state, or the only one.
        prefix: of a directory that flax wrote: what its checkpoints' names begin with; None: the only prefix that is there.
        flat: names of safetensors and npz are keys of one dict, dots and all.
        match, dtype: of the state, see `picking.pick`.
    """

    step: int | None = None
    item: str | None = None
    prefix: str | None = None
    flat: bool = False
    match: str | None = None
    dtype: str | None = None


def open_source(src: str | os.PathLike[str], options: SourceOptions | None = None) -> Iterator[IncomingStep]:
    """The steps at SRC, ascending; each is opened when it is asked for.

    Raises (also while iterating):
        ConfigError: there is nothing, or nothing that can be read; or an option is lacking. StepNotFoundError: no such step.
        CorruptCheckpointError, StorageError.
    """
    options = options or SourceOptions()
    return (_picked(step, options) for step in _found(src, options))


def _picked(step: IncomingStep, options: SourceOptions) -> IncomingStep:
    if options.match is None and options.dtype is None:
        return step
    part = pick(step.trees[STATE], lambda requests: step.read(STATE, requests), match=options.match, dtype=options.dtype)

    def read(item: str, requests: Sequence[Request]) -> list[np.ndarray]:
        return part.read(requests) if item == STATE else step.read(item, requests)

    return dataclasses.replace(step, trees={**step.trees, STATE: part.tree}, read=read)


def _found(src: str | os.PathLike[str], options: SourceOptions) -> Iterator[IncomingStep]:
    url = text_of(src, "src").rstrip("/")
    path = local_path(url)
    if path is not None and not path.exists():
        raise missing(url, "src")
    what = url.rpartition("/")[2] or url
    first = url.partition(CHAIN)[0]
    if first.endswith(npz_format.SUFFIX):
        fs, inner = open_files(url, field="src")
        _must_exist(fs, inner, url)
        return iter([npz_step(fs, inner, step=options.step, flat=options.flat, what=what)])
    if is_tensor_name(first):
        folder, name = split(url)
        fs, inner = open_files(folder, field="src")
        _must_exist(fs, f"{inner.rstrip('/')}/{name}" if inner else name, url)
        names = [name]
    elif path is not None and path.is_file():
        return _orbax_steps(url, options)
    else:
        fs, inner = open_files(url, field="src")
        names = _tensor_files(fs, inner, url)
    if names:
        return iter([safetensors_step(fs, inner.rstrip("/"), names, step=options.step, flat=options.flat, what=what)])
    if path is None and url.partition("://")[0] not in OBJECT_SCHEMES:
        text = f"src: {url} holds no safetensors file; Orbax checkpoints are read from directories, gs:// and s3:// only"
        raise ConfigError(text, field="src")
    return _orbax_steps(url, options)


def _tensor_files(fs: object, folder: str, url: str) -> list[str]:
    """The index of a folder, else all of its safetensors files; empty if there are none."""
    names = names_in(fs, folder, url)
    if names is None:
        raise missing(url, "src")
    tensors = [name for name in names if is_tensor_name(name)]
    indices = [name for name in tensors if name.endswith(INDEX_SUFFIX)]
    if len(indices) > 1:
        raise ConfigError(f"src: {url} has several indices, name one of them: {', '.join(indices)}", field="src", got=indices)
    if not indices and (shards := [name for name in tensors if is_shard(name)]):
        raise CorruptCheckpointError(
            f"{url} has shards such as {shards[0]} and no index: an unfinished export, or half a copy", path=url
        )
    return indices or tensors


def _must_exist(fs: object, path: str, url: str) -> None:
    with storage_errors("look for", url):
        there = fs.exists(path)  # pyright: ignore[reportAttributeAccessIssue]
    if not there:
        raise missing(url, "src")


# ---------------------------------------------------------------- Orbax


def _orbax_steps(url: str, options: SourceOptions) -> Iterator[IncomingStep]:
    try:
        there = Checkpoints(url)
    except ConfigError:  # a file that flax did not write
        raise ConfigError(f"src: {url} is no file that can be imported; that is {_KNOWN}", field="src", got=url) from None
    if there.single is not None:
        there.existing(None)  # it is complete
        number = options.step if options.step is not None else number_in(there.storage.url.rpartition("/")[2])
        if number is None:
            raise ConfigError(f"{there.storage.url} doesn't say which step it is; --step N gives it a number", field="step")
        return iter([IncomingStep.from_reader(there.open(number), number, options.item)])
    if (steps_of_flax := _flax_steps(url, options, more_than=len(there.steps()))) is not None:
        return steps_of_flax
    if not there.steps():
        found = foreign_checkpoints(there.storage)
        why = (
            f"{describe_foreign(there.storage.url, found)}; import them one by one, with --step" if found else f"expected {_KNOWN}"
        )
        raise ConfigError(f"src: {there.storage.url} has no step: {why}", field="src", got=url)
    steps = there.steps() if options.step is None else [there.existing(options.step)]
    return (IncomingStep.from_reader(there.open(step), step, options.item) for step in steps)


def _flax_steps(url: str, options: SourceOptions, *, more_than: int) -> Iterator[IncomingStep] | None:
    """Those of a directory of checkpoints `<prefix><number>`; None: it is no such directory.

    Args:
        more_than: how many steps Orbax's readers find there. They know folders of such names, but no files.
    """
    try:
        directory = LegacyDirectory(url, options.prefix)
    except ConfigError as error:
        if not more_than and error.details.get("found"):  # several prefixes, of which one must be named
            raise ConfigError(f"src: {error.message}", **error.details) from None
        return None
    if options.prefix is None and len(directory.steps) <= more_than:
        return None
    steps = directory.steps if options.step is None else tuple(one for one in directory.steps if one.step == options.step)
    if not steps and (options.prefix is not None or directory.steps):
        there = ", ".join(str(one.step) for one in directory.steps) or "none"
        what = f"step {options.step}" if options.step is not None else f"complete checkpoint {options.prefix}<step>"
        raise ConfigError(f"src: {url} has no {what}; its steps: {there}", field="step", got=options.step)
    return (_flax_step(one, options) for one in steps) if steps else None


def _flax_step(one: LegacyStep, options: SourceOptions) -> IncomingStep:
    step = IncomingStep.from_reader(Checkpoints(one.url).open(one.step), one.step, options.item)
    return step if one.number == one.step else dataclasses.replace(step, custom={"flax_step": one.number})
