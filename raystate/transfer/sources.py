"""What lies at SRC, and its steps one after the other.

Formats are told by what is there, never by trying to load it. Another format is one more function that gives `IncomingStep`s:
`IncomingStep.from_reader` makes one of any `StepReader`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from raystate.core.formats.errors import ConfigError, CorruptCheckpointError
from raystate.inspection import Checkpoints
from raystate.storage import OBJECT_SCHEMES, describe_foreign, foreign_checkpoints, number_in
from raystate.transfer.flat_source import is_tensor_name, safetensors_step
from raystate.transfer.incoming import IncomingStep
from raystate.transfer.safetensors_format import INDEX_SUFFIX, is_shard
from raystate.transfer.urls import CHAIN, local_path, missing, names_in, open_files, split, storage_errors, text_of

_KNOWN = "a safetensors file, folder or index, or a checkpoint or directory of checkpoints that Orbax wrote"


def open_source(src: str | os.PathLike[str], *, step: int | None = None, flat: bool = False) -> Iterator[IncomingStep]:
    """The steps at SRC, ascending; each is opened when it is asked for.

    Args:
        src: a path, or a URL that fsspec knows.
        step: of a directory of steps only this one; of safetensors the number that it gets. None: all; its own.
        flat: names of safetensors are keys of one dict, dots and all.

    Raises (also while iterating):
        ConfigError: there is nothing, or nothing that can be read; or a number is lacking. StepNotFoundError: no such step.
        CorruptCheckpointError, StorageError.
    """
    url = text_of(src, "src").rstrip("/")
    path = local_path(url)
    if path is not None and not path.exists():
        raise missing(url, "src")
    what = url.rpartition("/")[2] or url
    if is_tensor_name(url.partition(CHAIN)[0]):
        folder, name = split(url)
        fs, inner = open_files(folder, field="src")
        _must_exist(fs, f"{inner.rstrip('/')}/{name}" if inner else name, url)
        names = [name]
    elif path is not None and path.is_file():
        return _orbax_steps(url, step)
    else:
        fs, inner = open_files(url, field="src")
        names = _tensor_files(fs, inner, url)
    if names:
        return iter([safetensors_step(fs, inner.rstrip("/"), names, step=step, flat=flat, what=what)])
    if path is None and url.partition("://")[0] not in OBJECT_SCHEMES:
        text = f"src: {url} holds no safetensors file; Orbax checkpoints are read from directories, gs:// and s3:// only"
        raise ConfigError(text, field="src")
    return _orbax_steps(url, step)


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


def _orbax_steps(url: str, step: int | None) -> Iterator[IncomingStep]:
    try:
        there = Checkpoints(url)
    except ConfigError:  # a file that flax did not write
        raise ConfigError(f"src: {url} is no file that can be imported; that is {_KNOWN}", field="src", got=url) from None
    url = there.storage.url
    if there.single is not None:
        there.existing(None)  # it is complete
        number = number_in(url.rpartition("/")[2])
        if number is None or step not in (None, number):
            which = "doesn't say which step it is" if number is None else f"is step {number}"
            text = f"{url} {which}: a run begins with it, at step 0, by restore_or_init(…, source={url!r})"
            raise ConfigError(text, field="step", got=step)
        return iter([IncomingStep.from_reader(there.open(number), number)])
    if not there.steps():
        found = foreign_checkpoints(there.storage)
        why = (
            f"{describe_foreign(url, found)}; a run begins with one of them by restore_or_init(…, source=…)"
            if found
            else f"expected {_KNOWN}"
        )
        raise ConfigError(f"src: {url} has no step: {why}", field="src", got=url)
    steps = there.steps() if step is None else [there.existing(step)]
    return (IncomingStep.from_reader(there.open(one), one) for one in steps)
