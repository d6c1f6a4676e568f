"""Value: what a function reads and another sets, as an item; and Python's values as JSON that tells what they were."""

from __future__ import annotations

import base64
import functools
import json
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import ml_dtypes  # noqa: F401 - numpy knows its dtypes by name then
import numpy as np

from raystate.core.formats.errors import ConfigError, ReferenceMismatchError
from raystate.public_calls import public_class

MOST_LEVELS = 100  # of nested containers: what writes and copies JSON calls itself for each
MOST_BITS = 10_000  # of an int: Python reads and writes no more than 4,300 digits
_TAG = "raystate"  # {_TAG: [kind, …]} stands for what JSON hasn't; all else is written as it is
_SEQUENCES: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS: dict[str, Callable[[Any], Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}


@public_class
class Value:
    """An item for other values of the program: NumPy's global random numbers, the best loss so far, a list of results::

        best = {"loss": float("inf"), "step": 0}
        items = {
            "best": raystate.Value(lambda: best, best.update),
            "random": raystate.Value(lambda: np.random.get_state(legacy=False), np.random.set_state),
        }

    Each process has its own, as with iterators. It is kept as JSON; nothing that is read is executed.

    Args:
        get: gives the value: dicts, lists, tuples (named ones, too), sets, numbers, texts, bytes, None, numpy arrays. Called in each
            `save`, and in a `restore`. Dtypes are numpy's and JAX's, without fields. Other classes are refused.
        set: takes such a value; a restore calls it.

    Raises:
        ConfigError: one of them is no function; in `save`: the value has something else in it.
    """

    def __init__(self, get: Callable[[], Any], set: Callable[[Any], object]):
        if not (callable(get) and callable(set)):
            raise ConfigError(
                "Value needs two functions: Value(lambda: best, best.update)", field="set" if callable(get) else "get"
            )
        self._get = get
        self._set = set

    def get_state(self) -> bytes:
        """For `save`."""
        return json.dumps(written(self._get(), "a Value")).encode()

    def set_state(self, state: bytes) -> None:
        """For `restore`."""
        self._set(read(json.loads(state)))


def written(value: Any, holder: str, item: str | None = None, path: tuple[Any, ...] = ()) -> Any:
    """The JSON from which `read` makes a value that is equal, and of the same classes.

    Args:
        holder: whose value it is, for the error; `item`: by name.
        path: where in it.

    Raises:
        ConfigError: it has something in it that would come back as something else.
    """

    def inner(one: Any, at: object) -> Any:
        return written(one, holder, item, (*path, at))

    kind: Any = type(value)
    if len(path) <= MOST_LEVELS:
        if value is None or kind in (bool, float, str) or (kind is int and int.bit_length(value) <= MOST_BITS):
            return value
        if kind is list:
            return [inner(one, at) for at, one in enumerate(value)]
        if kind is dict and _TAG not in value and all(type(key) is str for key in value):
            return {key: inner(one, key) for key, one in value.items()}
        if tagged := _tagged(value, kind, inner):
            return {_TAG: tagged}
    got = f"{kind.__qualname__} of {value.dtype}" if isinstance(value, np.ndarray | np.generic) else kind.__qualname__
    where = f", {'/'.join(map(str, path[:9]))}" if path else ""
    raise ConfigError(
        f"{holder}{where}: it can hold dicts, lists, tuples (of classes that stand in a module), sets, numbers (of 3,000 digits), "
        f"texts, bytes, None and numpy arrays, at most {MOST_LEVELS} levels deep, not a {got}, which would not come back as it is",
        field="items",
        item=item,
        got=got,
    )


def _tagged(value: Any, kind: Any, inner: Callable[[Any, object], Any]) -> list[Any] | None:
    if kind in _SEQUENCES.values():
        ones = [inner(one, at) for at, one in enumerate(value)]
        return [kind.__name__, *(ones if kind is tuple else sorted(ones, key=json.dumps))]  # sets: the same bytes in all processes
    if kind in _MAPPINGS.values():
        return [kind.__name__, *([inner(key, key), inner(one, key)] for key, one in value.items())]
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _named_tuple(name) is kind:
        return ["named tuple", name, *([field, inner(getattr(value, field), field)] for field in kind._fields)]
    if kind is bytes:
        return ["bytes", base64.b64encode(value).decode()]
    if (kind is np.ndarray or isinstance(value, np.generic)) and (dtype := _name(value.dtype)):
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return ["array" if kind is np.ndarray else "number", dtype, value.shape, data]
    return None


def _named_tuple(name: str) -> Any:
    """The class of this name, if it is there; nothing is imported or called for it."""
    module, _, path = name.partition(":")
    try:
        found: Any = functools.reduce(lambda at, part: vars(at)[part], path.split("."), sys.modules[module])
    except (KeyError, TypeError):
        return None
    return found if isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields") else None


def _name(dtype: np.dtype) -> str:
    """By which numpy knows it again; "": by none, or its bytes are no values."""
    if dtype.isbuiltin == 2:  # JAX's small floats and integers, all of which have the same `str`
        return dtype.name
    return dtype.str if dtype.kind in "biufcmMSU" and dtype.itemsize else ""


def read(raw: Any) -> Any:
    """The value of which `written` made this.

    Raises:
        ReferenceMismatchError: it has a named tuple whose class isn't there, or has other fields.
    """
    if isinstance(raw, list):
        return [read(one) for one in raw]
    if not isinstance(raw, dict):
        return raw
    if raw.keys() != {_TAG}:
        return {key: read(one) for key, one in raw.items()}
    kind, *rest = raw[_TAG]
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](map(read, rest))
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({read(key): read(one) for key, one in rest})
    match kind:
        case "named tuple":
            fields = dict(rest[1:])
            if (found := _named_tuple(rest[0])) is None or found._fields != (*fields,):
                fields = ", ".join(fields)
                raise ReferenceMismatchError(f"what was saved has a named tuple {rest[0]} of {fields}, and here is no such class")
            return tuple.__new__(found, map(read, fields.values()))
        case "bytes":
            return base64.b64decode(rest[0])
        case _:
            array = np.frombuffer(base64.b64decode(rest[2]), np.dtype(rest[0])).reshape(rest[1]).copy()
            return array if kind == "array" else array[()]
