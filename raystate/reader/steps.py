"""Steps of a run, or of what Orbax alone wrote."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from raystate.core.errors import ConfigError, CorruptCheckpointError, StepNotFoundError, StorageError
from raystate.core.tree import TreeSpec
from raystate.orbax.step_reader import STATE_ITEMS, StepReader
from raystate.reader.alone import SingleCheckpoint, single_checkpoint
from raystate.restored import STATE, ReadOptions, Restored, content_from_storage, open_step
from raystate.storage import StorageUrl, describe_foreign, foreign_checkpoints, open_storage, visible_steps
from raystate.storage.names import MARKER

T = TypeVar("T")

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
    """Steps of a run, of a directory that Orbax alone wrote, or one checkpoint.

    Args:
        storage: gs://…, file://…, a directory or a PathLike: of a run, or the folder of one step, of one plain Orbax checkpoint or
            of one of its items.
    """

    def __init__(self, storage: StorageUrl):
        self._storage = open_storage(storage)
        self.bytes_read: int = 0  # array bytes that restores have read from storage

    def all_steps(self) -> list[int]:
        """Complete, visible steps, ascending. Of a single checkpoint: its folder's number, 0 if that is none."""
        if self._alone is None:
            return sorted(visible_steps(self._storage))
        return [self._alone.step] if self._alone.is_there() else []

    def latest_step(self) -> int | None:
        """The newest of `all_steps`, None if there is none."""
        steps = self.all_steps()
        return steps[-1] if steps else None

    def best_step(self, metric: str | None = None, mode: Literal["min", "max"] = "min") -> int | None:
        """The step with the best value of a metric; of equal ones the newest, as retention keeps them. NaN is never the best.

        Args:
            metric: its name; None: the only one that was saved.
            mode: whether small or large values are good.

        Returns:
            None if no step has a metric, or all of them are NaN.

        Raises:
            ConfigError: no such metric was saved, or several and none is named; lists the names. Or `mode` is neither of the two.
        """
        if mode not in ("min", "max"):
            raise ConfigError(f"mode: expected 'min' or 'max', not {mode!r}", field="mode", got=mode)
        by_step: dict[int, dict[str, Any]] = {}
        while True:
            steps = self.all_steps()
            by_step = {step: by_step[step] for step in steps if step in by_step}
            try:
                for step in steps:
                    if step not in by_step:
                        by_step[step] = self._read_step(step, lambda reader: reader.metrics())
                break
            except StepNotFoundError:
                continue  # retired since they were listed
        names = sorted({name for metrics in by_step.values() for name in metrics})
        if metric is None and len(names) > 1:
            raise ConfigError(f"metric: which one? The steps have {names}", field="metric", expected=names)
        if metric is not None and names and metric not in names:
            raise ConfigError(f"metric: no step has {metric!r}; the steps have {names}", field="metric", expected=names, got=metric)
        sign = 1 if mode == "min" else -1
        scored = [(sign * value, -step) for step, metrics in by_step.items() for value in _number(metrics, metric or names)]
        return -min(scored)[1] if scored else None

    def metadata(self, step: int | None = None) -> StepMetadata:
        """What a step (None: the newest) holds.

        Raises:
            StepNotFoundError: also when retention takes the step meanwhile. CorruptCheckpointError, StorageError.
        """

        def look(chosen: int, reader: StepReader) -> StepMetadata:
            content = content_from_storage(reader, chosen)
            names = sorted({*content.json_items, *content.iterators, *content.trees})
            return StepMetadata(
                step=chosen, trees=content.trees, items=tuple(names), metrics=dict(content.metrics), custom=content.custom
            )

        return self._read(step, look)

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
        import jax

        from raystate.arrays.monitoring import reading

        options = ReadOptions(partial=partial, cast=cast, shapes=shapes, transforms=transforms)
        world, process_index = jax.process_count(), jax.process_index()

        def place(chosen: int, reader: StepReader) -> Restored:
            try:
                content = content_from_storage(reader, chosen)
                return content.restore(reference, items, options, world=world, process_index=process_index)
            finally:
                self.bytes_read += reader.bytes_read

        with reading(self._storage.url) as events:
            before = self.bytes_read
            restored = self._read(step, place)
            events.nbytes = self.bytes_read - before
            return restored

    def load_tree(self, reference: object, *, step: int | None, item: str | None, options: ReadOptions) -> Any:
        """One tree: the state, or an item of arrays. See `raystate.load`."""

        from raystate.arrays.monitoring import reading

        def place(chosen: int, reader: StepReader) -> Any:
            content = content_from_storage(reader, chosen)
            wanted = STATE if item is None or (item in STATE_ITEMS and item not in content.trees) else item
            tree = content.tree(wanted, reference, options)
            events.nbytes = reader.bytes_read
            return tree

        with reading(self._storage.url) as events:
            return self._read(step, place)

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

    # ------------------------------------------------------------ inside

    def _read(self, step: int | None, read: Callable[[int, StepReader], T]) -> T:
        """Read exactly this step; or, None, the newest, also if it is retired under our hands and another one is the newest then."""
        while True:
            chosen = self._existing(step)
            try:
                return self._read_step(chosen, functools.partial(read, chosen))
            except StepNotFoundError:
                if step is not None or self.latest_step() in (None, chosen):
                    raise

    def _read_step(self, step: int, read: Callable[[StepReader], T]) -> T:
        """The one place that tells damage from a step that somebody else has retired, or saved anew, while it was read.

        Raises:
            StepNotFoundError: it is gone.
            CorruptCheckpointError, StorageError: as `read`; the step is there.
        """
        while True:
            reader: StepReader | None = None
            try:
                reader = self._open(step)
                got = read(reader)
                # Without a package a small file that goes looks as if it had never been there.
                if reader.save is not None or step in self.all_steps():
                    return got
                raise StepNotFoundError("its files went one after the other")
            except (CorruptCheckpointError, StorageError, StepNotFoundError) as error:
                if step not in self.all_steps():
                    message = f"step {step} of {self._storage.url} was retired while it was read"
                    raise StepNotFoundError(message, step=step, path=self._storage.url) from error
                if reader is None or self._open(step).save == reader.save:
                    raise

    def _existing(self, step: int | None) -> int:
        steps = self.all_steps()
        if step is None:
            if not steps:
                raise StepNotFoundError(f"{self._storage.url} has no step{self._what_else()}", path=self._storage.url)
            return steps[-1]
        if step not in steps:
            why = self._what_else() if not steps else ""
            if self._storage.list(str(step), recursive=False):
                why = f"; there is a folder {step}/, but no {MARKER} in it: an unfinished save, or a copy that has lost its marker"
            raise StepNotFoundError(
                f"{self._storage.url} has no step {step}; it has {steps[-10:]}{why}", step=step, path=self._storage.url
            )
        return step

    def _what_else(self) -> str:
        if self._alone is not None:
            return f": it is the folder of one checkpoint, and has no {MARKER}: unfinished, or a copy that has lost its marker"
        found = foreign_checkpoints(self._storage)
        return f": {describe_foreign(self._storage.url, found)}; raystate.load(…) reads one by its own path" if found else ""

    def _open(self, step: int) -> StepReader:
        return open_step(self._storage, step) if self._alone is None else self._alone.open()

    @functools.cached_property
    def _alone(self) -> SingleCheckpoint | None:
        return single_checkpoint(self._storage)


def _number(metrics: Mapping[str, Any], names: str | list[str]) -> Iterator[float]:
    """The value of the metric that is meant, if it can be compared. `names`: it, or a list of at most one."""
    for name in [names] if isinstance(names, str) else names:
        value = metrics.get(name)
        if isinstance(value, int | float) and not math.isnan(value):
            yield value
