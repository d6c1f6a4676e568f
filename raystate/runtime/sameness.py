"""Whether two fields of two configurations are the same, where both came here from other processes."""

from __future__ import annotations

import io
import marshal
import pickle
import sys
from types import CellType, FunctionType
from typing import Any


def same(old: Any, new: Any) -> bool:
    """Policies are objects of anybody's. One without an equality of its own, or with such a one inside, as Orbax's `InitialSavePolicy` in
    its `AnySavePolicy`, is the same as another that pickles or prints the same. One of a script that was edited meanwhile never is."""
    if old == new:
        return True
    if type(old) is not type(new):
        return False
    try:
        return pickle.dumps(old) == pickle.dumps(new)
    except Exception:
        return repr(old) == repr(new)


def alike(old: Any, new: Any) -> bool:
    """As `same`, between processes that run one script: a function or class of it, which each process made for itself, is the same as
    another of its name and code. What these call is not looked at."""
    if same(old, new):
        return True
    if _name(type(old)) != _name(type(new)):
        return False
    try:
        return _written(old) == _written(new)
    except Exception:
        return repr(old) == repr(new)


def _name(thing: Any) -> tuple[str, str]:
    return thing.__module__, thing.__qualname__


def _written(value: Any) -> bytes:
    into = io.BytesIO()
    _Writer(into).dump(value)
    return into.getvalue()


class _Writer(pickle.Pickler):
    """Pickles are compared, and never read. One of cloudpickle's would not do: it numbers classes, by process."""

    def __init__(self, into: io.BytesIO):
        super().__init__(into)
        self.fast = True  # whether two parts are one object says nothing

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType):
            # Of what it reads outside itself only plain values: anything else would lead on to the whole script.
            read = {name: obj.__globals__.get(name) for name in obj.__code__.co_names}
            plain = {name: value for name, value in read.items() if isinstance(value, str | int | float)}
            code = marshal.dumps(obj.__code__, 2)  # this version writes equal code as equal bytes
            return str, (*_name(obj), code, obj.__defaults__, obj.__kwdefaults__, obj.__closure__, plain)
        if isinstance(obj, CellType):
            return str, (obj.cell_contents,)
        if isinstance(obj, type) and not _can_be_imported(obj):
            parts = {name: part for name, part in vars(obj).items() if isinstance(part, FunctionType | str | int | float)}
            return str, (*_name(obj), obj.__bases__, parts)
        return NotImplemented


def _can_be_imported(kind: type) -> bool:
    found: Any = sys.modules.get(kind.__module__)
    for part in kind.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is kind
