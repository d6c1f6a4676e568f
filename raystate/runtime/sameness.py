"""Whether two fields of two configurations are the same, where both came here from other processes."""

from __future__ import annotations

import hashlib
import io
import marshal
import pickle
import sys
from types import CellType, FunctionType, ModuleType
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
    another of its name and code. What these call is not looked at. Of what can't be written, only its class and its attributes count."""
    if same(old, new):
        return True
    if _name(type(old)) != _name(type(new)):
        return False
    try:
        return _Digests().of(old) == _Digests().of(new)
    except RecursionError:
        return True  # nested too deep to be compared: one script has made both, so a doubt is no difference


def _name(thing: Any) -> tuple[str, str]:
    return thing.__module__, thing.__qualname__


_ATOMS = (str, int, float, bytes, bool, type(None))


class _Digests:
    """Digests of one value, part by part: each part as it looks by itself, so that it says nothing which parts are one object.

    A part that holds itself, as a class does by a method that calls super(), is written there as the number of steps back to it.
    """

    def __init__(self) -> None:
        self._above: list[Any] = []  # the parts that are being written, each within the one before
        self._reached: list[int] = []  # for each of these: the outermost of them that it leads back to
        self._whole: dict[int, tuple[Any, bytes]] = {}  # by id, with what keeps the id: parts that lead back to nothing above them

    def of(self, part: Any) -> bytes | int:
        """Its digest; of one that is being written, how far above it begins."""
        for place, one in enumerate(self._above):
            if one is part:
                self._reached[-1] = min(self._reached[-1], place)
                return len(self._above) - place
        if (known := self._whole.get(id(part))) is not None:
            return known[1]
        place = len(self._above)
        self._above.append(part)
        self._reached.append(place)
        try:
            digest = hashlib.sha256(self._written(part)).digest()  # short, however often it is in others
        finally:
            self._above.pop()
            reached = self._reached.pop()
        if reached >= place:
            self._whole[id(part)] = (part, digest)
        else:
            self._reached[-1] = min(self._reached[-1], reached)
        return digest

    def _written(self, part: Any) -> bytes:
        if isinstance(part, set | frozenset):  # its order is the process's own
            elements: Any = part
            return repr((_name(type(elements)), sorted(repr(self.of(one)) for one in elements))).encode()
        try:
            return _dumped(part, self)
        except RecursionError:
            raise
        except Exception:  # such as a lock's: cloudpickle may know a way, pickle doesn't
            return _dumped((*_name(type(part)), getattr(part, "__dict__", None)), self)


def _dumped(part: Any, digests: _Digests) -> bytes:
    into = io.BytesIO()
    _Writer(into, part, digests).dump(part)
    return into.getvalue()


class _Writer(pickle.Pickler):
    """Writes one part; the parts in it come from `_Digests`. Pickles are compared, and never read. One of cloudpickle's would not do: it
    numbers classes, by process."""

    def __init__(self, into: io.BytesIO, part: Any, digests: _Digests):
        super().__init__(into)
        self.fast = True  # whether two parts are one object says nothing
        self._part: Any = part
        self._begun = False
        self._digests = digests

    def persistent_id(self, obj: Any) -> bytes | int | None:
        if type(obj) in _ATOMS:
            return None
        if obj is self._part and not self._begun:
            self._begun = True
            return None
        return self._digests.of(obj)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType):
            # Of what it reads outside itself only plain values: anything else would lead on to the whole script.
            read = {name: obj.__globals__.get(name) for name in obj.__code__.co_names}
            plain = {name: value for name, value in read.items() if isinstance(value, str | int | float)}
            code = marshal.dumps(obj.__code__, 2)  # this version writes equal code as equal bytes
            return str, (*_name(obj), code, obj.__defaults__, obj.__kwdefaults__, obj.__closure__, plain)
        if isinstance(obj, CellType):
            return str, _content(obj)
        if isinstance(obj, ModuleType):
            return str, (obj.__name__,)
        if isinstance(obj, type) and not _can_be_imported(obj):
            parts = {name: part for name, part in vars(obj).items() if isinstance(part, FunctionType | str | int | float)}
            return str, (*_name(obj), obj.__bases__, parts)
        return NotImplemented


def _content(cell: CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # nothing has been put there
        return ()


def _can_be_imported(kind: type) -> bool:
    found: Any = sys.modules.get(kind.__module__)
    for part in kind.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is kind
