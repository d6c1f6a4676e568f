"""Value: what a function reads and another sets, as an item."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import ml_dtypes  # noqa: F401 - numpy knows its dtypes by name then
import numpy as np

from raystate.core.formats.errors import ConfigError


class Value:
    """An item for what lies in the program and is no iterator: NumPy's global random numbers, the best loss so far, a list of results::

        best = {"loss": float("inf"), "step": 0}
        items = {
            "best": raystate.Value(lambda: best, best.update),
            "random": raystate.Value(lambda: np.random.get_state(legacy=False), np.random.set_state),
        }

    Each process has its own, as with iterators. It is kept as JSON; nothing that is read is executed.

    Args:
        get: gives the value: dicts with text keys, lists, tuples, numbers, texts, bytes, None, numpy arrays. Called in each `save`, and
            in a `restore`. Dtypes are numpy's and JAX's, without fields; of a subclass there is no value.
        set: is given a value of the same form by a restore.

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
        return json.dumps(_written(self._get())).encode()

    def set_state(self, state: bytes) -> None:
        """For `restore`."""
        self._set(_read(json.loads(state)))


def _written(value: Any) -> Any:
    """JSON: a container is a list that begins with its kind."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        return [type(value).__name__, *map(_written, value)]
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return ["dict", {key: _written(one) for key, one in value.items()}]
    if type(value) is bytes:
        return ["bytes", base64.b64encode(value).decode()]
    if (type(value) is np.ndarray or isinstance(value, np.generic)) and (dtype := _name(value.dtype)):
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return ["array" if isinstance(value, np.ndarray) else "number", dtype, value.shape, data]
    got = f"{type(value).__name__} of {value.dtype}" if isinstance(value, np.ndarray | np.generic) else type(value).__name__
    raise ConfigError(
        f"a Value holds dicts with text keys, lists, tuples, numbers, texts, bytes, None and numpy arrays, not a {got}",
        field="items",
        got=got,
    )


def _name(dtype: np.dtype) -> str:
    """By which numpy knows it again; "": by none, or its bytes are no values."""
    if dtype.isbuiltin == 2:  # JAX's small floats and integers, all of which have the same `str`
        return dtype.name
    return dtype.str if dtype.kind in "biufcmMSU" and dtype.itemsize else ""


def _read(raw: Any) -> Any:
    if not isinstance(raw, list):
        return raw
    kind, *rest = raw
    match kind:
        case "list":
            return [_read(one) for one in rest]
        case "tuple":
            return tuple(_read(one) for one in rest)
        case "dict":
            return {key: _read(one) for key, one in rest[0].items()}
        case "bytes":
            return base64.b64decode(rest[0])
        case _:
            array = np.frombuffer(base64.b64decode(rest[2]), np.dtype(rest[0])).reshape(rest[1]).copy()
            return array if kind == "array" else array[()]
