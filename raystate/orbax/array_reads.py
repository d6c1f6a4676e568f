"""Many boxes of many arrays at once: each chunk fetched once where boxes share it, and a bound on the bytes in flight."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from raystate.core.formats.errors import CapacityError, ConfigError
from raystate.core.formats.tree import ArraySpec, LeafSpec
from raystate.machine.aligned import SMALL_BYTES, aligned
from raystate.machine.memory import node_memory
from raystate.orbax import kv

Request = tuple[int, tuple[int, ...], tuple[int, ...]]  # leaf index, start, shape, in elements of the global array
BYTES_IN_FLIGHT = 1 << 30  # of chunks that are read at a time; one larger fetch goes alone
_UNASKED_BYTES = 256 << 20  # so much is read without a look at what is free

_Box = tuple[tuple[int, ...], tuple[int, ...]]  # start, end


def read_boxes(
    arrays: Mapping[int, tuple[LeafSpec, ts.TensorStore]],
    requests: Sequence[Request],
    *,
    what: Callable[[int], str],
    facts: Callable[[int], dict[str, Any]],
    on_bytes: Callable[[int], None],
    into: Sequence[np.ndarray] | None = None,
) -> list[np.ndarray]:
    """Read boxes.

    Args:
        arrays: leaf index -> its description and open array.
        requests: the boxes.
        what: leaf index -> beginning of an error's message.
        facts: leaf index -> an error's attributes.
        on_bytes: called with the bytes of chunks that have come, bit by bit.
        into: where the bytes go: one array per request, C-contiguous, of the box's shape and the leaf's dtype, no two in the same memory.

    Returns:
        One array per request: that of `into`, if it is given.

    Raises:
        CapacityError: it takes more memory than there is, which ends the process where TensorStore asks for it.
        CorruptCheckpointError, StorageError.
    """
    # Boxes that touch the same chunks become one fetch: restoring onto many devices asks for small parts of one chunk.
    fetches: dict[int, dict[_Box, list[int]]] = {}
    for index, (leaf, start, shape) in enumerate(requests):
        spec = arrays[leaf][0].array
        if spec is None:
            raise ConfigError(f"{what(leaf)}: not an array", **facts(leaf))
        if len(start) != len(spec.shape) or len(shape) != len(spec.shape) or not _inside(spec, start, shape):
            raise ConfigError(f"{what(leaf)}: the box at {start} of shape {shape} is not within {spec.shape}", **facts(leaf))
        fetches.setdefault(leaf, {}).setdefault(_whole_chunks(spec, start, shape), []).append(index)

    plan = [(leaf, *fetch) for leaf, boxes in fetches.items() for fetch in _joined(boxes).items()]
    _check_memory(arrays, requests, plan, what, facts)
    parts: list[np.ndarray | None] = [None] * len(requests)
    waiting: deque[tuple[int, _Box, list[int], int, Any]] = deque()
    flying = 0

    def land() -> None:
        nonlocal flying
        leaf, begun, indices, nbytes, future = waiting.popleft()
        with kv.named_errors(what(leaf), damage=True, **facts(leaf)):
            data = future()
        flying -= nbytes
        on_bytes(nbytes)
        for index in indices:
            part = _cut(data, begun[0], requests[index])
            if into is None or part is into[index]:
                parts[index] = part
            else:
                np.copyto(into[index], part)
                parts[index] = into[index]
        for index in indices[1:] if into is None else ():
            if requests[index] == requests[indices[0]]:
                parts[index] = parts[indices[0]]

    try:
        for leaf, chunks, indices in plan:
            spec, store = arrays[leaf][0].array, arrays[leaf][1]
            assert spec is not None
            dtype = np.dtype(spec.dtype)
            nbytes = _volume(chunks) * dtype.itemsize
            while waiting and flying + nbytes > BYTES_IN_FLIGHT:
                land()
            only = {requests[index] for index in indices}
            box = chunks if len(only) > 1 else _box(requests[indices[0]])
            view = store[tuple(slice(s, e) for s, e in zip(*box, strict=True))]
            shape = tuple(end - start for start, end in zip(*box, strict=True))
            target = into[indices[0]] if into is not None and len(only) == 1 else None
            waiting.append((leaf, box, indices, nbytes, _read(view, shape, dtype, target)))
            flying += nbytes
        while waiting:
            land()
    finally:
        # After an error the rest isn't wanted: TensorStore gives up reads without a reference. Don't
        # call cancel(): it holds the GIL while it waits for a read that is just ending in another
        # thread, and that thread waits for the GIL. Nothing in the process would run any more.
        waiting.clear()
    return [part for part in parts if part is not None]


def _read(view: ts.TensorStore, shape: tuple[int, ...], dtype: np.dtype, target: np.ndarray | None) -> Callable[[], np.ndarray]:
    """Begin to read; a function that waits for it. Large ones are read to where jax, on CPUs, can leave them."""
    if target is None and math.prod(shape) * dtype.itemsize <= SMALL_BYTES:
        reading = view.read(order="C")
        return lambda: kv.result(reading)
    target = aligned(shape, dtype) if target is None else target
    writing = ts.array(target, copy=False, write=True).write(view)

    def wait() -> np.ndarray:
        kv.result(writing)
        return target

    return wait


def _check_memory(
    arrays: Mapping[int, tuple[LeafSpec, ts.TensorStore]],
    requests: Sequence[Request],
    plan: Sequence[tuple[int, _Box, list[int]]],
    what: Callable[[int], str],
    facts: Callable[[int], dict[str, Any]],
) -> None:
    sizes = {leaf: np.dtype(spec.dtype).itemsize for leaf, (one, _) in arrays.items() if (spec := one.array) is not None}
    fetches = [(_volume(chunks) * sizes[leaf], leaf) for leaf, chunks, _ in plan]
    whole_chunks = [(math.prod(spec.chunk) * sizes[leaf], leaf) for leaf, (one, _) in arrays.items() if (spec := one.array)]
    needed, largest = max([*fetches, *whole_chunks], default=(0, 0))
    needed = max(needed, sum(math.prod(shape) * sizes[leaf] for leaf, _, shape in set(requests)))
    if needed < _UNASKED_BYTES or needed <= (node := node_memory()).free_bytes:
        return
    text = f"{what(largest)} takes {needed} bytes of memory, and {node.free_bytes} are free on {node.whose}"
    raise CapacityError(text, **{**facts(largest), "needed_bytes": needed, "available_bytes": node.free_bytes})


def _joined(boxes: dict[_Box, list[int]]) -> dict[_Box, list[int]]:
    """The same requests in fewer boxes: two that share chunks become one, where that reads no more than both."""
    done: dict[_Box, list[int]] = {}
    waiting = list(boxes.items())
    while waiting:
        box, indices = waiting.pop()
        for other in done:
            if _overlap(box, other) and _volume(union := _union(box, other)) <= _volume(box) + _volume(other):
                waiting.append((union, [*done.pop(other), *indices]))
                break
        else:
            done[box] = indices
    return done


def _overlap(a: _Box, b: _Box) -> bool:
    return all(low < high for low, high in zip(map(max, a[0], b[0]), map(min, a[1], b[1]), strict=True))


def _union(a: _Box, b: _Box) -> _Box:
    return tuple(map(min, a[0], b[0])), tuple(map(max, a[1], b[1]))


def _volume(box: _Box) -> int:
    return math.prod(end - start for start, end in zip(*box, strict=True))


def _inside(spec: ArraySpec, start: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return all(
        begin >= 0 and length >= 0 and begin + length <= size for begin, length, size in zip(start, shape, spec.shape, strict=True)
    )


def _whole_chunks(spec: ArraySpec, start: tuple[int, ...], shape: tuple[int, ...]) -> _Box:
    if 0 in shape:
        return tuple(start), tuple(start)
    begin = tuple(s // c * c for s, c in zip(start, spec.chunk, strict=True))
    end = tuple(min(-(-(s + n) // c) * c, size) for s, n, c, size in zip(start, shape, spec.chunk, spec.shape, strict=True))
    return begin, end


def _box(request: Request) -> _Box:
    _, start, shape = request
    return tuple(start), tuple(s + n for s, n in zip(start, shape, strict=True))


def _cut(data: np.ndarray, begun: tuple[int, ...], request: Request) -> np.ndarray:
    """The request's part of what was fetched from `begun` on; a copy unless it is all, so that the rest can be freed."""
    _, start, shape = request
    data = np.asarray(data)
    if data.shape == tuple(shape):
        return data
    return data[tuple(slice(s - b, s - b + n) for s, b, n in zip(start, begun, shape, strict=True))].copy()
