"""Steps of a run, or of what Orbax alone wrote."""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeVar

import jax

from raystate.arrays.checks import check_asked
from raystate.arrays.monitoring import reading
from raystate.arrays.transforms import Transforms
from raystate.config.hints import KnowsOthers
from raystate.core.formats.errors import ConfigError, StepNotFoundError
from raystate.inspection import Checkpoints, StepMetadata, look
from raystate.orbax.item_kinds import STATE_ITEMS
from raystate.orbax.json_checks import is_comparable
from raystate.orbax.step_reader import StepReader
from raystate.public_calls import public_class
from raystate.restored import STATE, ReadOptions, Restored, StepContent, content_from_storage
from raystate.storage import StorageUrl
from raystate.waits import LOOK_EVERY_S, STARTS_S

T = TypeVar("T")


logger = logging.getLogger("raystate")


@public_class
class Reader(KnowsOthers):
    """Reads the steps of a run or of a directory that Orbax alone wrote, or a single checkpoint.

    Args:
        storage: gs://…, s3://…, file://…, a directory or a PathLike. It is a run's, or the folder
            of one step, of one plain Orbax checkpoint, or of one of its items. Steps may be named
            as Orbax does with `step_prefix` or `step_format_fixed_length`.

    Raises:
        ConfigError: no usable URL, or a file or below one. A directory may be missing yet.
    """

    def __init__(self, storage: StorageUrl):
        self._checkpoints = Checkpoints(storage)
        self.bytes_read: int = 0  # array bytes that restores have read from storage

    def all_steps(self) -> list[int]:
        """Complete, visible steps, ascending. Of a single checkpoint: its folder's number, 0 if that is none.

        Raises:
            StepNotFoundError: there is nothing at the path. A run has a folder as soon as it has begun; until it saves, it has no steps.
        """
        steps = self._checkpoints.steps()
        if not steps:
            self._checkpoints.check_there()
        return steps

    def latest_step(self) -> int | None:
        """The newest of `all_steps`, None if there is none. Raises as it does."""
        steps = self.all_steps()
        return steps[-1] if steps else None

    def best_step(self, metric: str | None = None, mode: Literal["min", "max"] = "min") -> int | None:
        """The step with the best value of a metric; of equal ones the newest, as retention keeps them. NaN is never the best.

        Args:
            metric: its name; None: the only one that was saved.
            mode: whether small or large values are good.

        Returns:
            None if there is no step, no metric is named and no step has one, or all values are NaN.

        Raises:
            ConfigError: no such metric was saved, or several and none is named; lists the names. Or `mode` is neither of the two.
        """
        if mode not in ("min", "max"):
            raise ConfigError(f"mode: expected 'min' or 'max', not {mode!r}", field="mode", got=mode)
        by_step: dict[int, dict[str, Any]] = {}
        steps: list[int] = []
        while True:
            before, steps = steps, self.all_steps()
            by_step = {step: by_step[step] for step in steps if step in by_step}
            try:
                for step in steps:
                    if step not in by_step:
                        by_step[step] = self._checkpoints.read_existing(step, lambda reader: reader.metrics())
                break
            except StepNotFoundError:
                if steps == before:  # not retired since they were listed: one is listed and not there
                    raise
        names = sorted({name for metrics in by_step.values() for name in metrics})
        if metric is None and len(names) > 1:
            raise ConfigError(f"name the metric: the steps have {names}", field="metric", expected=names)
        if metric is not None and steps and metric not in names:
            have = f"the steps have {names}" if names else "none has metrics: save(step, state, metrics={…}) gives them some"
            raise ConfigError(f"metric: no step has {metric!r}; {have}", field="metric", expected=names, got=metric)
        sign = 1 if mode == "min" else -1
        scored = [(sign * value, -step) for step, metrics in by_step.items() for value in _number(metrics, metric or names)]
        return -min(scored)[1] if scored else None

    def metadata(self, step: int | None = None) -> StepMetadata:
        """The trees of a step (None: the newest), with an object for each array, its items, metrics and times.

        Raises:
            StepNotFoundError: also when retention takes the step meanwhile. CorruptCheckpointError, StorageError.
        """
        return self._read(step, functools.partial(look, self._checkpoints))

    def restore(
        self,
        reference: object = None,
        step: int | None = None,
        items: Mapping[str, object] | None = None,
        partial: bool = False,
        cast: bool = False,
        shapes: Literal["match", "checkpoint"] = "match",
        transforms: Transforms | None = None,
    ) -> Restored:
        """The newest step, or exactly `step`, placed as `reference` says (None: the raw tree).

        Local: in a multi-process program each process reads its own share.

        Args:
            reference, partial, cast, shapes, transforms: see `StateManager.restore`.
            items: iterators are set in place; trees are references.

        Raises:
            StepNotFoundError: also when retention takes the step while it is read. ReferenceMismatchError, CapacityError,
            CorruptCheckpointError, StorageError.
        """
        step = check_asked(reference, step=step, items=items)
        options = ReadOptions(partial=partial, cast=cast, shapes=shapes, transforms=transforms)
        return self._placed(step, lambda content: content.restore(reference, items, options, **_this_process()))

    def load_tree(self, reference: object, *, step: int | None, item: str | None, options: ReadOptions) -> Any:
        """One tree: the state, or an item of arrays. See `raystate.load`."""

        def place(content: StepContent) -> Any:
            wanted = STATE if item is None or (item in STATE_ITEMS and item not in content.trees) else item
            return content.tree(wanted, reference, options)

        return self._placed(step, place)

    def load_items(self, items: Mapping[str, object], *, step: int | None, options: ReadOptions) -> dict[str, Any]:
        """Several items of one step, by name. See `raystate.load`."""
        return self._placed(step, lambda content: content.load_items(items, options, **_this_process()))

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
        transforms: Transforms | None = None,
    ) -> Iterator[Restored]:
        """Each new step as it becomes durable, or the newest if behind. Ends after `timeout_s` without a new step (None: never).

        When the training goes back to an older step, its later saves are new, also under numbers
        that were given before.

        Args:
            reference: see `restore`; so are the options.
            after: skip this step, and those before it that are there now.
            timeout_s: seconds.

        Raises:
            StepNotFoundError: nothing has come to that path for a minute, or for `timeout_s`. Else as `restore`.
        """
        given: object = timeout_s
        if given is not None and not (isinstance(given, int | float) and given >= 0):
            raise ConfigError(f"follow(): timeout_s must be seconds, at least 0, or None, not {timeout_s!r}", field="timeout_s")
        self._wait_until_there(STARTS_S if timeout_s is None else min(timeout_s, STARTS_S))
        save_of = self._checkpoints.save_of
        told = {step: save_of(step) for step in self.all_steps() if after is not None and step <= after}
        deadline_s = time.monotonic() + timeout_s if timeout_s is not None else None
        while True:
            newest = self.latest_step()
            save = save_of(newest) if newest is not None else None
            if newest is not None and (newest not in told or told[newest] != save):
                restored = None
                try:
                    restored = self.restore(reference, newest, items, partial, cast, shapes, transforms)
                except StepNotFoundError as error:  # retired between the listing and the read
                    if error.of_caller:
                        raise
                    if self.latest_step() not in (newest, None):
                        continue
                if restored is not None:
                    told[newest] = save
                    yield restored
                    deadline_s = time.monotonic() + timeout_s if timeout_s is not None else None
                    continue
            if deadline_s is not None and time.monotonic() > deadline_s:
                return
            time.sleep(LOOK_EVERY_S if deadline_s is None else max(0.0, min(LOOK_EVERY_S, deadline_s - time.monotonic())))

    # ------------------------------------------------------------ inside

    def _wait_until_there(self, limit_s: float) -> None:
        end_s, is_told = time.monotonic() + limit_s, False
        while True:
            try:
                return self._checkpoints.check_there()
            except StepNotFoundError as error:
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    raise
                if not is_told:
                    logger.warning("%s; follow() waits %.0f s for a run to begin there", error.message, limit_s)
                    is_told = True
            time.sleep(min(LOOK_EVERY_S, left_s))

    def _placed(self, step: int | None, place: Callable[[StepContent], T]) -> T:
        """Place what is read of a step; count its bytes, and tell the listeners of
        `jax.monitoring`."""

        def read(chosen: int, reader: StepReader) -> T:
            try:
                return place(content_from_storage(reader, chosen, alone=self._checkpoints.single is not None))
            finally:
                self.bytes_read += reader.bytes_read

        _export()
        with reading(self._checkpoints.storage.url) as events:
            before = self.bytes_read
            got = self._read(step, read)
            events.nbytes = self.bytes_read - before
            return got

    def _read(self, step: int | None, read: Callable[[int, StepReader], T]) -> T:
        return self._checkpoints.read(check_asked(step=step), read)


def _export() -> None:
    """Give Ray the metrics of this process, if it has joined one."""
    if (is_initialized := getattr(sys.modules.get("ray"), "is_initialized", None)) is not None and is_initialized():
        from raystate.actors.exporting import this_process

        this_process.begin("")


def _this_process() -> dict[str, int]:
    return {"world": jax.process_count(), "process_index": jax.process_index()}


def _number(metrics: Mapping[str, Any], names: str | list[str]) -> Iterator[float]:
    """The value of the metric that is meant, if it can be compared. `names`: it, or a list of at most one."""
    for name in [names] if isinstance(names, str) else names:
        value = metrics.get(name)
        if is_comparable(value):
            yield value
