"""A machine's state as plain values: to be printed, compared, and told in an error."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, cast

_OWN = "raystate.core."
_MANY = 1000  # of more entries only their number is told


def printed_parts(machine: object) -> dict[str, Any]:
    """What the fields of a machine hold. A part that several know is told once, where the machine itself names it."""
    fields = _fields(machine)
    parts = [id(value) for value in fields.values() if _is_own(value)]
    return {
        name.strip("_"): _printed(value, {one for one in parts if one != id(value)})
        for name, value in fields.items()
        if _is_state(value)
    }


def _printed(value: Any, known: set[int]) -> Any:
    """`known`: objects that are told elsewhere."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        held = cast("Mapping[Any, Any]", value)
        if len(held) > _MANY:
            return f"{len(held)} entries"
        return {_key(key): _printed(one, known) for key, one in held.items() if _is_told(one, known)}
    if isinstance(value, set | frozenset):
        return sorted((_printed(one, known) for one in cast("set[Any]", value)), key=repr)
    if hasattr(value, "_fields"):  # a named tuple
        return {name: _printed(getattr(value, name), known) for name in value._fields}
    if isinstance(value, tuple | list | deque):
        return [_printed(one, known) for one in cast("Iterable[Any]", value) if _is_told(one, known)]
    if not _is_own(value):
        return repr(value)
    below = {*known, id(value)}
    return {name.strip("_"): _printed(one, below) for name, one in _fields(value).items() if _is_told(one, below)}


def _key(key: Any) -> str:
    if isinstance(key, tuple):  # such as a SnapshotId
        return " ".join(str(one) for one in cast("tuple[Any, ...]", key))
    return key.__name__ if isinstance(key, type) else str(key)


def _fields(value: object) -> dict[str, Any]:
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return vars(value)


def _is_own(value: Any) -> bool:
    return type(value).__module__.startswith(_OWN) and not isinstance(value, tuple)


def _is_state(value: Any) -> bool:
    """Not what it calls."""
    return not callable(value) and not (isinstance(value, Mapping) and any(callable(one) for one in cast("Any", value).values()))


def _is_told(value: Any, known: set[int]) -> bool:
    return _is_state(value) and id(value) not in known
