"""Reading without Ray: claims nothing, writes nothing; safe beside a running training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from raystate.core.errors import CorruptCheckpointError, StepNotFoundError, StorageError
from raystate.core.tree import TreeSpec
from raystate.orbax.step_reader import StepReader
from raystate.restored import ReadOptions, Restored, content_from_storage, open_step
from raystate.storage import StorageUrl, open_storage, visible_steps
from raystate.storage.names import MARKER

FOLLOW_POLL_S = 1.0


@dataclass(frozen=True, kw_only=True)
class StepMetadata:
    """What a step holds, without its bytes."""

    step: int
    trees: Mapping[str, TreeSpec]
    items: tuple[str, ...]
    metrics: Mapping[str, float]
    custom: Any


class Reader:
    """Steps of a run, or of a directory that Orbax alone wrote.

    Args:
        storage: gs://…, file://…, a directory or a PathLike.
    """

    def __init__(self, storage: StorageUrl):
        self._storage = open_storage(storage)
        self.bytes_read: int = 0  # array bytes that restores have read from storage

    def all_steps(self) -> list[int]:
        """Complete, visible steps, ascending."""
        return sorted(visible_steps(self._storage))

    def latest_step(self) -> int | None:
        steps = self.all_steps()
        return steps[-1] if steps else None

    def best_step(self, metric: str | None = None, mode: Literal["min", "max"] = "min") -> int | None:
        """The step with the best value of `metric` (None: the only metric that was saved). None if no step has it."""
        best: tuple[float, int] | None = None
        for step in self.all_steps():
            metrics = self._step_reader(step).metrics()
            name = metric if metric is not None else (next(iter(metrics)) if len(metrics) == 1 else None)
            if name is None or name not in metrics:
                continue
            value = metrics[name] if mode == "min" else -metrics[name]
            if best is None or value <= best[0]:
                best = (value, step)
        return best[1] if best is not None else None

    def metadata(self, step: int | None = None) -> StepMetadata:
        step = self._existing(step)
        content = content_from_storage(self._step_reader(step), step)
        names = sorted({*content.json_items, *content.iterators, *content.trees})
        return StepMetadata(
            step=step, trees=content.trees, items=tuple(names), metrics=dict(content.metrics), custom=content.custom
        )

    def restore(
        self,
        reference: object = None,
        step: int | None = None,
        items: Mapping[str, object] | None = None,
        partial: bool = False,
        cast: bool = False,
        shapes: Literal["match", "checkpoint"] = "match",
        transforms: Callable[[Any], object] | None = None,
    ) -> Restored:
        """The newest step, or exactly `step`, placed as `reference` says (None: a raw tree of numpy arrays).

        Local: in a multi-process program each process reads its own share.

        Raises:
            StepNotFoundError: also when retention takes the step while it is read. ReferenceMismatchError, CorruptCheckpointError,
            StorageError.
        """
        options = ReadOptions(partial=partial, cast=cast, shapes=shapes, transforms=transforms)
        if step is not None:
            return self._restore(self._existing(step), reference, items, options)
        while True:
            newest = self._existing(None)
            try:
                return self._restore(newest, reference, items, options)
            except StepNotFoundError:
                if self.latest_step() in (None, newest):
                    raise
                # Retired under our hands, so a newer one has been committed.

    def _restore(self, step: int, reference: object, items: Mapping[str, object] | None, options: ReadOptions) -> Restored:
        import jax

        reader = self._step_reader(step)
        try:
            content = content_from_storage(reader, step)
            return content.restore(reference, items, options, world=jax.process_count(), process_index=jax.process_index())
        except (CorruptCheckpointError, StorageError) as error:
            if step in self.all_steps():
                raise
            raise StepNotFoundError(
                f"step {step} of {self._storage.url} was retired while it was read", step=step, path=self._storage.url
            ) from error
        finally:
            self.bytes_read += reader.bytes_read

    def follow(
        self,
        reference: object = None,
        after: int | None = None,
        timeout_s: float | None = None,
        *,
        items: Mapping[str, object] | None = None,
        partial: bool = False,
        cast: bool = False,
        shapes: Literal["match", "checkpoint"] = "match",
        transforms: Callable[[Any], object] | None = None,
    ) -> Iterator[Restored]:
        """Each new step as it becomes durable, or the newest if behind. Ends after `timeout_s` without a new step (None: never).

        Args:
            reference: see `restore`; so are the options.
            after: only steps newer than this one.
            timeout_s: seconds.
        """
        last = after if after is not None else -1
        deadline_s = time.monotonic() + timeout_s if timeout_s is not None else None
        while True:
            newest = self.latest_step()
            if newest is not None and newest > last:
                try:
                    restored = self.restore(reference, newest, items, partial, cast, shapes, transforms)
                except StepNotFoundError:
                    continue  # retired between the listing and the read: a newer one is there
                last = newest
                yield restored
                deadline_s = time.monotonic() + timeout_s if timeout_s is not None else None
                continue
            if deadline_s is not None and time.monotonic() > deadline_s:
                return
            time.sleep(FOLLOW_POLL_S if deadline_s is None else max(0.0, min(FOLLOW_POLL_S, deadline_s - time.monotonic())))

    def _existing(self, step: int | None) -> int:
        steps = self.all_steps()
        if step is None:
            if not steps:
                raise StepNotFoundError(f"{self._storage.url} has no step", path=self._storage.url)
            return steps[-1]
        if step not in steps:
            why = ""
            if self._storage.list(str(step), recursive=False):
                why = f"; there is a folder {step}/, but no {MARKER} in it: an unfinished save, or a copy that has lost its marker"
            raise StepNotFoundError(
                f"{self._storage.url} has no step {step}; it has {steps[-10:]}{why}", step=step, path=self._storage.url
            )
        return step

    def _step_reader(self, step: int) -> StepReader:
        return open_step(self._storage, step)


def save(path: StorageUrl, tree: object) -> None:
    """Write one pytree as a plain Orbax checkpoint at `path`, which must not exist yet. No run, no step, no Ray."""
    from orbax.checkpoint import v1 as ocp

    ocp.save(_plain_path(path), tree)


def load(path_or_run: StorageUrl, reference: object = None) -> Any:
    """The tree of one checkpoint, or of a run's newest step, placed as `reference` says (None: numpy arrays)."""
    reader, step = _open(path_or_run)
    content = content_from_storage(reader, step)
    return content.restore(reference, None, ReadOptions(), world=1, process_index=0).state


def metadata(path: StorageUrl) -> StepMetadata:
    """What the checkpoint at `path` (or a run's newest step) holds."""
    reader, step = _open(path)
    content = content_from_storage(reader, step)
    names = sorted({*content.json_items, *content.iterators, *content.trees})
    return StepMetadata(step=step, trees=content.trees, items=tuple(names), metrics=dict(content.metrics), custom=content.custom)


def _plain_path(path: StorageUrl) -> str:
    url = open_storage(path).url
    return url.removeprefix("file://")


def _open(path: StorageUrl) -> tuple[StepReader, int]:
    """A checkpoint's own folder, else the newest step of the run at `path`."""
    parent, _, name = open_storage(path).url.rpartition("/")
    storage = open_storage(parent)
    if storage.exists(f"{name}/_CHECKPOINT_METADATA"):
        return StepReader(storage, name), int(name) if name.isdigit() else 0
    run = Reader(path)
    newest = run.latest_step()
    if newest is None:
        raise StepNotFoundError(f"{path} is neither a checkpoint nor a run with a step", path=str(path))
    return open_step(open_storage(path), newest), newest
