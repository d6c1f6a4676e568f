"""`flax.training.checkpoints` on raystate: change the import line, keep the calls.

    from raystate.compat import flax_checkpoints as checkpoints

Arguments, defaults, returned paths and exceptions are those of flax 0.12.8, and flax and raystate read what the other wrote. A
checkpoint is whole and durable or not there at all, and each chunk of its arrays carries a checksum. No run, no Ray.
"""

from __future__ import annotations

import numbers
import os
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, cast

import jax

try:
    from flax import config
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ModuleNotFoundError("raystate.compat.flax_checkpoints needs flax: pip install 'raystate[flax]'", name="flax") from None
from jax import monitoring

from raystate.arrays.monitoring import since_last_save
from raystate.compat.flax_directory import FlaxDirectory
from raystate.compat.flax_errors import CheckpointNotFoundError, OutdatedCheckpointError, TargetError, TargetMismatchError
from raystate.compat.flax_reading import read, read_transformed
from raystate.compat.flax_several import Meeting
from raystate.compat.flax_turns import directory_turn, go_on_in_background
from raystate.compat.flax_writing import prepare
from raystate.core.formats.errors import ConfigError
from raystate.core.formats.names import told_newest
from raystate.legacy.names import natural_sort, safe_normpath
from raystate.legacy.reader import STRUCTURE
from raystate.storage import StorageUrl, open_storage, owner_of, put_back
from raystate.storage.names import MANIFEST, METADATA, TREE_METADATA
from raystate.storage.placing import new_save

__all__ = [
    "AsyncManager",
    "CheckpointNotFoundError",
    "OutdatedCheckpointError",
    "TargetError",
    "TargetMismatchError",
    "available_steps",
    "convert_pre_linen",
    "latest_checkpoint",
    "natural_sort",
    "restore_checkpoint",
    "safe_normpath",
    "save_checkpoint",
    "save_checkpoint_multiprocess",
]

# flax's names, for scripts that look at its files.
MP_ARRAY_POSTFIX = "_gda"
MP_ARRAY_PH = "//GDAPlaceholder:"
COMMIT_SUCCESS_FILE = "commit_success.txt"
ORBAX_CKPT_FILENAME = STRUCTURE
ORBAX_MANIFEST_OCDBT = MANIFEST
ORBAX_METADATA_FILENAME = TREE_METADATA

_FILES_OF_ONE = (STRUCTURE, TREE_METADATA, MANIFEST, METADATA)
_WRITTEN = "/jax/checkpoint/write/durations_sec"
_READ = "/jax/checkpoint/read/durations_sec"


class AsyncManager:
    """Runs saves one after the other beside the training.

    Args:
        max_workers: threads. Saves never overlap, so one is enough.

    Attributes:
        executor: what runs them.
        save_future: of the newest save; None before the first.
    """

    def __init__(self, max_workers: int = 1):
        self.executor = ThreadPoolExecutor(max_workers=max_workers, thread_name_prefix="raystate-flax-save")
        self.save_future: Future[Any] | None = None
        self._told = True  # whether the newest save's outcome was asked for

    def wait_previous_save(self) -> None:
        """Wait for the newest save. What it raised is raised here, once; flax loses the error of a save that ended before it asked."""
        if self.save_future is not None and not self._told:
            self._told = True
            self.save_future.result()

    def save_async(self, task: Callable[[], Any]) -> None:
        """Run a task in the background, after the one before; `save_future` is its future."""
        self.wait_previous_save()
        self.save_future = self.executor.submit(task)
        self._told = False


def save_checkpoint(
    ckpt_dir: StorageUrl,
    target: Any,
    step: int | float | jax.Array,
    prefix: str = "checkpoint_",
    keep: int = 1,
    overwrite: bool = False,
    keep_every_n_steps: int | None = None,
    async_manager: AsyncManager | None = None,
    orbax_checkpointer: Any = None,
) -> str:
    """Save a checkpoint of the state as `ckpt_dir/prefix+step`, and remove what is not kept.

    It is a folder with one Orbax tree, as flax's default backend writes it, with a crc32c in each chunk. A single array or number, and
    everything while flax's option `flax_use_orbax_checkpointing` is off, becomes a msgpack file, which has no checksums.

    Saves of one process to a directory happen in the order of their calls: one waits for those under way, for an hour at most.

    Args:
        ckpt_dir: a directory, gs://…, file://… or a PathLike.
        target: a pytree of arrays, numbers and strings, or a single one.
        step: any number: of a step, or a metric.
        prefix: what the name begins with.
        keep: so many of the newest checkpoints are kept; 0: all.
        overwrite: replace the checkpoint of this step, and remove those of later ones.
        keep_every_n_steps: of the older ones, those that are so far apart are kept, too.
        async_manager: write in the background. jax arrays may be donated and numpy arrays changed as soon as this returns.
        orbax_checkpointer: not used; a warning says so.

    Returns:
        The path, as flax spells it.

    Raises:
        OutdatedCheckpointError: (an InvalidCheckpointError of flax's, and a ValueError) the step exists and `overwrite` is False; or
            the checkpoint would be removed at once, being older than those that are kept; or, with flax's option off, it is older.
        TargetError: (a ValueError) there is nothing to save, or a leaf can't be saved.
        ConfigError: also for the storage of a run, or the folder of a checkpoint.
        StorageError: storage failed, or an earlier save to the directory does not end.
    """
    began_s = time.time()
    monitoring.record_event("/jax/flax/checkpoint/save")
    _not_used(orbax_checkpointer=orbax_checkpointer)
    _finish(async_manager, orbax_checkpointer)
    keep = _whole(keep)
    directory = _to_save_in(ckpt_dir, prefix)
    name = directory.name(step)
    as_msgpack = not bool(config.flax_use_orbax_checkpointing)
    # As in flax: a file is what the process has that calls this.
    meeting = Meeting(f"{directory.storage.url}/{name}") if jax.process_count() > 1 and not as_msgpack else None
    with directory_turn(directory.storage.url) as turn:
        with nullcontext() if meeting is None else meeting.preparing():
            content = prepare(target, as_msgpack=as_msgpack, copy=async_manager is not None, meeting=meeting)
        there: list[str] = []

        def decide() -> str:
            # A save that this one interrupts may have moved files aside: they are not left over.
            if directory.storage.is_directory and not turn.is_nested:
                put_back(directory.storage)
            there.extend(
                directory.check_order(
                    name, overwrite=overwrite, strict=as_msgpack, keep=keep, keep_every_n_steps=keep_every_n_steps
                )
            )
            return new_save()

        save = decide() if meeting is None else meeting.begin(content.layout_hash, decide)

        def write() -> None:
            if as_msgpack:
                monitoring.record_event("/jax/flax/checkpoint/save_main_ckpt_task")
            with nullcontext() if meeting is None else meeting.ending():
                content.write(directory.storage, name, save)
                if meeting is None or meeting.rank == 0:
                    directory.clean(name, there, overwrite=overwrite, keep=keep, keep_every_n_steps=keep_every_n_steps)
            since_last_save(began_s)

        if async_manager is None or turn.is_nested:  # beside the save that it interrupted it would be out of order
            write()
        else:
            go_on_in_background(turn, async_manager, write)
    monitoring.record_event_duration_secs(_WRITTEN, time.time() - began_s)
    return directory.path_of(name)


def save_checkpoint_multiprocess(
    ckpt_dir: StorageUrl,
    target: Any,
    step: int | float | jax.Array,
    prefix: str = "checkpoint_",
    keep: int = 1,
    overwrite: bool = False,
    keep_every_n_steps: int | None = None,
    async_manager: AsyncManager | None = None,
    gda_manager: Any = None,
    orbax_checkpointer: Any = None,
) -> str:
    """Like `save_checkpoint`, which every process of a program of several calls.

    Args:
        gda_manager: needed, as in flax, while its option `flax_use_orbax_checkpointing` is off and arrays are spread over processes:
            flax itself writes a msgpack file then, and the arrays into a folder `_gda` beside it. Otherwise not used; a warning says so.

    Raises:
        BarrierTimeoutError: processes did not call this, or did not write; names them.
    """
    if jax.process_count() > 1 and not config.flax_use_orbax_checkpointing:
        from flax.training import checkpoints as flax_checkpoints  # only here: it warns that TensorFlow is missing

        directory = _to_save_in(ckpt_dir, prefix)
        path = f"{directory.storage.url}/{directory.name(step)}"
        if not directory.storage.is_directory:
            text = f"{path}: flax itself writes files of several processes, and only into directories: turn flax_use_orbax_checkpointing on"
            raise ConfigError(text, field="ckpt_dir", got=directory.storage.url)
        Meeting(path).begin("", str)  # flax would wait for those that are missing without end
        above = directory.storage.url.removeprefix("file://")
        flax_checkpoints.save_checkpoint_multiprocess(
            above, target, cast(Any, step), directory.prefix, _whole(keep), overwrite, keep_every_n_steps,
            cast(Any, async_manager), gda_manager,
        )  # fmt: skip
        return directory.path_of(directory.name(step))
    _not_used(gda_manager=gda_manager)
    return save_checkpoint(
        ckpt_dir, target, step, prefix, keep, overwrite, keep_every_n_steps, async_manager, orbax_checkpointer
    )  # fmt: skip


def latest_checkpoint(ckpt_dir: StorageUrl, prefix: str = "checkpoint_") -> str | None:
    """The path of the checkpoint with the highest number; None if there is none."""
    directory = FlaxDirectory(ckpt_dir, prefix)
    names = directory.names()
    return directory.path_of(names[-1]) if names else None


def available_steps(ckpt_dir: StorageUrl, prefix: str = "checkpoint_", step_type: type = int) -> list[int | float]:
    """The numbers of the checkpoints in a directory, ascending.

    Args:
        step_type: int or float.

    Raises:
        ValueError: a name's rest is no such number.
    """
    directory = FlaxDirectory(ckpt_dir, prefix)
    return [step_type(name.removeprefix(directory.prefix)) for name in directory.names()]


def restore_checkpoint(
    ckpt_dir: StorageUrl,
    target: Any,
    step: int | float | jax.Array | None = None,
    prefix: str = "checkpoint_",
    parallel: bool = True,
    gda_manager: Any = None,
    allow_partial_mpa_restoration: bool = False,
    orbax_checkpointer: Any = None,
    orbax_transforms: Mapping[str, Any] | None = None,
) -> Any:
    """Restore the newest checkpoint, or one step, written by raystate or by any version of flax.

    Args:
        ckpt_dir: a directory of checkpoints, or one checkpoint.
        target: what the answer looks like; None: a state dict, nested dicts of arrays and values. Of a folder: what only the target has
            stays as it is, leaves that only the checkpoint has are not read; an array is placed as
            the target's, with the checkpoint's shape.
        step: exactly this one.
        prefix: what the names begin with.
        parallel, gda_manager, allow_partial_mpa_restoration, orbax_checkpointer: not used; a warning says so.
        orbax_transforms: Orbax reads then, and applies them.

    Returns:
        The restored target; the target itself if nothing is there and no `step` is given.

    Raises:
        CheckpointNotFoundError: (a ValueError) there is no checkpoint of `step`.
        TargetMismatchError, ValueError: the target does not fit.
        CorruptCheckpointError: it is damaged or was never finished. StorageError.
    """
    began_s = time.time()
    monitoring.record_event("/jax/flax/checkpoint/restore")
    _not_used(
        parallel=None if parallel else "False",
        gda_manager=gda_manager,
        allow_partial_mpa_restoration=allow_partial_mpa_restoration or None,
        orbax_checkpointer=orbax_checkpointer,
    )
    _finish(None, orbax_checkpointer, gda_manager)
    path = _found(ckpt_dir, step, prefix)
    if path is None:
        return target
    if target is None or orbax_transforms is None:
        restored = read(path, target)
    else:
        restored = read_transformed(path, target, orbax_transforms)
    monitoring.record_event_duration_secs(_READ, time.time() - began_s)
    return restored


def convert_pre_linen(params: Any) -> Any:
    """Parameters from before linen, with linen's names: submodules are counted per class, not all together.

    Args:
        params: nested dicts, as `restore_checkpoint` gives them. Those with linen's names already come back as they are.
    """
    if not isinstance(params, Mapping):
        return params
    counts: dict[str, int] = {}
    renamed: dict[str, Any] = {}
    for name in natural_sort(params):
        module, _, number = name.rpartition("_")
        if "_" in name and number.isdecimal():
            count = counts.get(module, 0)
            counts[module] = count + 1
            renamed[f"{module}_{count}"] = convert_pre_linen(params[name])
        else:
            renamed[name] = convert_pre_linen(params[name])
    return renamed if isinstance(params, dict) else type(params)(renamed)  # pyright: ignore[reportCallIssue]


def _whole(keep: Any) -> int:
    """`keep` as flax takes it: also a number of numpy's, or a float."""
    if not isinstance(keep, numbers.Real) or isinstance(keep, bool) or keep < 0 or keep % 1 != 0:
        raise ConfigError(f"keep must be a number of checkpoints, 0 or more, not {keep!r}", field="keep", got=keep)
    return int(float(keep))


def _to_save_in(ckpt_dir: StorageUrl, prefix: str) -> FlaxDirectory:
    directory = FlaxDirectory(ckpt_dir, prefix)
    if owner := owner_of(directory.storage.url):  # `keep` could remove its steps
        raise ConfigError(f"ckpt_dir: {owner}: save elsewhere", field="ckpt_dir", got=directory.storage.url)
    return directory


def _found(ckpt_dir: StorageUrl, step: int | float | jax.Array | None, prefix: str) -> str | None:
    """The path of the checkpoint that is meant; None if nothing is there."""
    directory = FlaxDirectory(ckpt_dir, prefix)
    if step is not None:
        name = directory.name(step)
        if not _is_there(path := directory.path_of(name)):
            names = directory.names()
            text = f"Matching checkpoint not found: {path}; there {f'are {told_newest(names)}' if names else 'is none'}"
            raise CheckpointNotFoundError(text, step=step, path=path)
        return path
    path = safe_normpath(os.fspath(ckpt_dir))
    storage = open_storage(path)
    inside = {info.name for info in storage.list(recursive=False)}
    if not inside:
        return path if _is_there(path) else None
    return path if inside & {*_FILES_OF_ONE} else latest_checkpoint(ckpt_dir, prefix)


def _is_there(path: str) -> bool:
    """Whether there is a file or a folder with something in it."""
    above, name = os.path.split(path)
    return open_storage(above or ".").exists(name) or bool(open_storage(path).list(recursive=False))


def _finish(async_manager: AsyncManager | None, *others: Any) -> None:
    if async_manager is not None:
        async_manager.wait_previous_save()
    for other in others:
        if hasattr(other, "wait_until_finished"):
            other.wait_until_finished()


def _not_used(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            warnings.warn(f"{name} is not used: raystate reads and writes the checkpoint itself", UserWarning, stacklevel=3)
