"""One tree of a run or of a path, and what it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from raystate.arrays import check_asked
from raystate.inspection import StepMetadata
from raystate.reader.steps import Reader
from raystate.restored import ReadOptions
from raystate.storage import StorageUrl


def load(
    path_or_run: StorageUrl,
    reference: object = None,
    *,
    step: int | None = None,
    item: str | None = None,
    partial: bool = False,
    cast: bool = False,
    shapes: Literal["match", "checkpoint"] = "match",
    transforms: Callable[[Any], object] | None = None,
) -> Any:
    """One tree, placed as `reference` says (None: numpy arrays).

    Args:
        path_or_run: a run, or the folder of one step, of one plain Orbax checkpoint or of one of its items.
        reference: see DESIGN.md, References.
        step: of a run; None: its newest.
        item: an item of arrays; None: the state.
        partial, cast, shapes, transforms: as `Reader.restore`.

    Raises:
        StepNotFoundError: there is none, or it was retired meanwhile.
        ReferenceMismatchError: the step has no such item, no state, or other leaves; says what there is.
        CorruptCheckpointError, StorageError.
    """
    step = check_asked(reference, step=step, shapes=shapes, call="load")
    options = ReadOptions(partial=partial, cast=cast, shapes=shapes, transforms=transforms)
    return Reader(path_or_run).load_tree(reference, step=step, item=item, options=options)


def metadata(path_or_run: StorageUrl, step: int | None = None) -> StepMetadata:
    """What the checkpoint at a path, or a step of a run (None: the newest), holds. Raises as `Reader.metadata`."""
    return Reader(path_or_run).metadata(step)
