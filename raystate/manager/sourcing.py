"""A run that starts from another one's step, or from a plain Orbax checkpoint: fine-tuning."""

# JAX's own functions are only partly typed; everything of ours is checked strictly.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import functools
import os
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from raystate.arrays.paths import path_key
from raystate.core.formats.errors import ConfigError, ReferenceMismatchError, StepNotFoundError, StorageError
from raystate.core.formats.names import told_newest
from raystate.reader import Reader
from raystate.restored import ReadOptions, Restored

_WAYS_OUT = (
    "source_select takes only a part of the state. restore_or_init() accepts only partial and transforms of the options above. "
    "For the others, call manager.restore(reference) first; if it returns None, use raystate.load(source, reference, …)."
)

Place = str | os.PathLike[str] | tuple[str | os.PathLike[str], int]
Source = Place | Mapping[str, Place] | Callable[[], Place | None]
Select = Callable[[Any], Any] | str | re.Pattern[str]


def check_source(source: Any, select: Any) -> None:
    """Refuse what can't be a source, before anything is asked of anybody.

    Raises:
        ConfigError: names the argument.
    """
    for place in source.values() if isinstance(source, Mapping) else [] if source is None or callable(source) else [source]:
        _place(place)
    if isinstance(select, str):
        try:
            re.compile(select)
        except re.error as error:
            raise ConfigError(f"source_select: {select!r} is no regular expression: {error}", field="source_select") from None
    elif select is not None and not callable(select) and not isinstance(select, re.Pattern):
        text = f"source_select must be a function of the abstract state or a regular expression, not a {type(select).__name__}"
        raise ConfigError(text, field="source_select")
    if select is not None and isinstance(source, Mapping):
        raise ConfigError("source_select is for one source, and a mapping names its parts: leave it out", field="source_select")
    if select is not None and source is None:
        raise ConfigError("source_select picks what a source has: give source=… too", field="source_select")


def restore_from_source(
    source: Source,
    select: Select | None,
    reference: Any,
    init: Callable[[], Any],
    *,
    options: ReadOptions,
    items: Mapping[str, object] | None,
) -> Restored | None:
    """The state of `source` at step 0; leaves that it lacks are initialized. None: a callable
    source gave None.

    Collective: process 0's newest step of the source is the one that all read.

    Args:
        source: see `StateManager.restore_or_init`.
        select: the part that is taken; None: all. A function of the abstract state gives the tree
            as it lies in the source. Or a regular expression for paths joined by "/", of leaves or
            of the nodes above them.
        reference: the abstract state.
        init: makes the fresh state.
        options: `partial`: what the source lacks is initialized; `transforms`.
        items: given back as they are: their positions belong to the source's run.

    Raises:
        ConfigError, StepNotFoundError, ReferenceMismatchError (names the source), StorageError, CorruptCheckpointError.
    """
    if isinstance(source, Mapping):
        return _from_several(source, reference, init, options=options, items=items)
    place = _agreed(source)
    if place is None:
        return None
    url, step = place
    leaves, structure = jax.tree_util.tree_flatten(reference)
    asked, taken = _asked(select, reference)
    fresh: list[Any] | None = None
    if options.partial:  # what the source lacks needs a value
        fresh = jax.tree_util.tree_leaves(init())
        position = {id(leaf): index for index, leaf in enumerate(leaves)}
        values = fresh
        asked = jax.tree_util.tree_map(lambda leaf: leaf if leaf is ... else values[position[id(leaf)]], asked)
    try:
        got = Reader(url).restore(asked, step=step, partial=options.partial, transforms=options.transforms)
    except ReferenceMismatchError as error:
        text = f"source {os.fspath(url)}, step {step}: {error.message}"
        raise ReferenceMismatchError(f"{text}\n{_WAYS_OUT}", **error.details) from None
    found = [leaf for leaf in jax.tree_util.tree_leaves(got.state) if leaf is not ...]
    if len(taken) < len(leaves):
        fresh = jax.tree_util.tree_leaves(init()) if fresh is None else fresh
        chosen = dict(zip(taken, found, strict=True))
        found = [chosen.get(index, leaf) for index, leaf in enumerate(fresh)]
    else:
        found = [leaf for _, leaf in sorted(zip(taken, found, strict=True), key=lambda pair: pair[0])]
    state = jax.tree_util.tree_unflatten(structure, found)
    return Restored(step=0, state=state, items=dict(items or {}), metrics=got.metrics, custom=got.custom, tier="source")


def _from_several(
    sources: Mapping[str, Place],
    reference: Any,
    init: Callable[[], Any],
    *,
    options: ReadOptions,
    items: Mapping[str, object] | None,
) -> Restored:
    """Each part of a state that is a dict from a place of its own; parts without a place are
    initialized."""
    if type(reference) is not dict or not sources or not {*sources} <= {*reference}:
        has = f"are {list(reference)[:10]}" if isinstance(reference, dict) else f"it has none: it is a {type(reference).__name__}"
        text = f"source: a mapping names parts of a state that is a dict, by its keys ({has}), not {list(sources)}"
        raise ConfigError(text, field="source", got=list(sources))
    fresh = functools.cache(init)
    state: dict[str, Any] = {}
    for name, below in reference.items():
        got = None
        if name in sources:
            got = restore_from_source(sources[name], None, below, lambda name=name: fresh()[name], options=options, items=None)
        state[name] = fresh()[name] if got is None else got.state
    return Restored(step=0, state=state, items=dict(items or {}), metrics={}, custom=None, tier="source")


def _place(source: Any) -> tuple[str | os.PathLike[str], int | None]:
    url, step = source if isinstance(source, tuple) and len(source) == 2 else (source, None)
    if isinstance(url, str | os.PathLike) and (step is None or (type(step) is int and step >= 0)):
        return url, step
    text = f"source: expected a run or checkpoint (URL or path), (run, step), a mapping of them or a function, not {source!r}"
    raise ConfigError(text, field="source", got=repr(source))


def _asked(select: Select | None, reference: Any) -> tuple[Any, list[int]]:
    """(the reference for the source, which of the state's leaves it gives, in order)."""
    flat, structure = jax.tree_util.tree_flatten_with_path(reference)
    if select is None:
        return reference, list(range(len(flat)))
    if isinstance(select, str | re.Pattern):
        pattern = re.compile(select)
        names = ["/".join(str(path_key(key)) for key in keys) for keys, _ in flat]
        taken = [index for index, name in enumerate(names) if _matches(pattern, name)]
        if not taken:
            some = sorted({name.split("/")[0] for name in names})[:10]
            text = f"source_select: {pattern.pattern!r} matches no path of the state, which begins with {some}"
            raise ConfigError(text, field="source_select", got=pattern.pattern)
        wanted = set(taken)
        return structure.unflatten([leaf if index in wanted else ... for index, (_, leaf) in enumerate(flat)]), taken
    asked = select(reference)
    position = {id(leaf): index for index, (_, leaf) in enumerate(flat)}
    taken = [position.get(id(leaf), -1) for leaf in jax.tree_util.tree_leaves(asked) if leaf is not ...]
    if not taken or -1 in taken or len(set(taken)) < len(taken):
        text = "source_select must give a tree of leaves of the abstract state that it is called with, each at most once"
        raise ConfigError(text, field="source_select")
    return asked, taken


def _matches(pattern: re.Pattern[str], name: str) -> bool:
    """The path itself, or that of a node above it."""
    cut = len(name)
    while cut > 0:
        if pattern.fullmatch(name[:cut]):
            return True
        cut = name.rfind("/", 0, cut)
    return False


def _agreed(source: Any) -> tuple[str | os.PathLike[str], int] | None:
    """With the step to read: the newest may be another one a moment later, and all processes must read the same."""
    place: tuple[str | os.PathLike[str], int | None] | None = None
    step, problem = -1, None
    try:
        given = source() if callable(source) else source
        place = None if given is None else _place(given)
        if place is not None:
            step = _existing(*place)
    except Exception as error:  # any at all: the other processes wait for this one's answer
        if jax.process_count() == 1:
            raise
        problem = error
    if jax.process_count() > 1:
        asked = "" if place is None else os.fspath(place[0]) + ("" if place[1] is None else f", step {place[1]}")
        step = _same_step(asked, step, problem)
    return None if place is None else (place[0], step)


def _existing(url: str | os.PathLike[str], step: int | None) -> int:
    steps = Reader(url).all_steps()
    if not steps or (step is not None and step not in steps):
        what = f"has no step {step}; it has {told_newest(steps)}" if steps else "has no step, and is no checkpoint"
        raise StepNotFoundError(f"source {os.fspath(url)} {what}", step=step, path=os.fspath(url))
    return steps[-1] if step is None else step


def _same_step(url: str, step: int, problem: Exception | None) -> int:
    """Process 0's, if all found the same source. Those that found none take part, so that no
    process waits for them."""
    from jax.experimental import multihost_utils

    name = zlib.crc32(url.encode())
    words = [int(problem is None), name >> 16, name & 0xFFFF, step >> 30, step & (2**30 - 1)]
    told = np.asarray(multihost_utils.process_allgather(np.array(words, np.int32))).reshape(-1, len(words))
    if problem is not None:
        raise problem
    if failed := [process for process, row in enumerate(told) if not row[0]]:
        raise StorageError(f"source {url}: processes {failed} could not find it, see their errors", path=url)
    if other := [process for process, row in enumerate(told) if (row[1:3] != told[0][1:3]).any()]:
        raise ConfigError(f"source: process 0 and processes {other} gave different sources", field="source", got=url)
    return (int(told[0][3]) << 30) + int(told[0][4])
