"""Values of declared types as JSON and back: what lies in shared memory and in storage is written and read here.

A dataclass is an object with its fields, of which those with a default may be missing. A tuple, with names or without, is an array.
Bytes are base64. Reading checks each value, since others may have written the file or damaged it.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import re
import types
import typing
import zlib
from collections.abc import Callable
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

_Kind = TypeVar("_Kind")
_SEAL = re.compile(rb',"crc32":"([0-9a-f]{8})"\}\Z')


class MisfitError(ValueError):
    """JSON that stands for no value of the type. The text says where, from the field on: ".grants: expected …"."""


def dumps(value: Any) -> bytes:
    """The value as JSON."""
    return json.dumps(value, separators=(",", ":"), default=plain, check_circular=False).encode()


def plain(value: object) -> Any:
    """What a dataclass or bytes become, one level deep, for `json`. It copies nothing: words are written many times a second."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return {name: getattr(value, name) for name in _names(type(value))}


def loads(kind: type[_Kind], data: bytes) -> _Kind:
    """The value of that type in what `dumps` gave. Raises ValueError that names the field; also for anything that is no JSON."""
    try:
        return decode(kind, json.loads(data))
    except RecursionError:
        raise ValueError(f"{kind.__name__}: nested too deeply") from None


def decode(kind: type[_Kind], raw: Any) -> _Kind:
    """The value of that type that a value read from JSON stands for. Raises ValueError that names the field."""
    try:
        return _reader(kind)(raw)
    except MisfitError as error:
        raise MisfitError(f"{getattr(kind, '__name__', kind)}{error}") from None


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    if not dataclasses.is_dataclass(kind):
        raise TypeError(f"{kind} is no JSON")
    return tuple(one.name for one in dataclasses.fields(kind))


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Made once for each type: words are read many times a second, beside the training."""
    kind = getattr(kind, "__supertype__", kind)
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda raw: raw
    if scalars := _scalars(kind):
        return lambda raw: raw if type(raw) in scalars else _misfit(kind, raw)
    if kind is bytes:
        return _read_bytes
    if dataclasses.is_dataclass(kind):
        return functools.partial(_read_dataclass, kind)
    if origin is Literal:
        return lambda raw: raw if raw in args else _misfit(kind, raw)
    if origin in (Union, types.UnionType):
        (only,) = (_reader(arg) for arg in args if arg is not type(None))
        return only if type(None) not in args else lambda raw: None if raw is None else only(raw)
    if origin is dict:
        return functools.partial(_read_dict, kind, _reader(args[1]))
    if origin is tuple and args[-1] is ...:
        return functools.partial(_read_tuple, kind, _reader(args[0]), _scalars(args[0]))
    if origin is tuple:
        return functools.partial(_read_row, kind, [_reader(arg) for arg in args])
    rows = [_reader(hint) for hint in typing.get_type_hints(kind).values()]  # of a named tuple
    return lambda raw: kind(*_read_row(kind, rows, raw))


def _scalars(kind: Any) -> frozenset[type]:
    """The types of JSON that stand for themselves, of a number, a text or a choice of these; empty: it is of another kind."""
    kind = getattr(kind, "__supertype__", kind)
    if kind is float:
        return frozenset((int, float))
    if kind in (bool, int, str, type(None)):
        return frozenset((kind,))
    parts = [_scalars(arg) for arg in get_args(kind)] if get_origin(kind) in (Union, types.UnionType) else []
    return frozenset[type]().union(*parts) if all(parts) else frozenset()


@functools.cache
def _readers(kind: type) -> dict[str, tuple[frozenset[type], Callable[[Any], Any]]]:
    return {name: (_scalars(hint), _reader(hint)) for name, hint in typing.get_type_hints(kind).items()}


def _read_dataclass(kind: Any, raw: Any) -> Any:
    readers = _readers(kind)
    if not isinstance(raw, dict):
        _misfit(kind, raw)
    fields = typing.cast(dict[str, Any], raw)
    values: dict[str, Any] = {}
    name = ""
    try:
        for name, value in fields.items():
            scalars, read = readers[name]
            values[name] = value if type(value) in scalars else read(value)
    except MisfitError as error:
        raise MisfitError(f".{name}{error}") from None
    except KeyError:
        raise MisfitError(f": unknown fields {', '.join(sorted(fields.keys() - readers.keys()))}") from None
    try:
        return kind(**values)
    except TypeError as error:  # a field without a default is missing
        raise MisfitError(f": {error}") from None


def _read_tuple(kind: Any, read: Callable[[Any], Any], scalars: frozenset[type], raw: Any) -> tuple[Any, ...]:
    if not isinstance(raw, list):
        _misfit(kind, raw)
    items = typing.cast(list[Any], raw)
    return tuple(items) if scalars.issuperset(map(type, items)) else tuple(map(read, items))


def _read_row(kind: Any, readers: list[Callable[[Any], Any]], raw: Any) -> tuple[Any, ...]:
    if not isinstance(raw, list) or len(typing.cast(list[Any], raw)) != len(readers):
        _misfit(kind, raw)
    return tuple(read(item) for read, item in zip(readers, typing.cast(list[Any], raw), strict=True))


def _read_dict(kind: Any, read: Callable[[Any], Any], raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict):
        _misfit(kind, raw)
    return {name: read(one) for name, one in typing.cast(dict[str, Any], raw).items()}


def _read_bytes(raw: Any) -> bytes:
    try:
        return base64.b64decode(raw, validate=True)
    except (TypeError, ValueError):
        _misfit(bytes, raw)


def _misfit(kind: Any, raw: Any) -> typing.NoReturn:
    raise MisfitError(f": expected {kind}, got {json.dumps(raw)[:100]}")


# ---------------------------------------------------------------- with a checksum, so that damage in storage is noticed


def seal(document: dict[str, Any]) -> bytes:
    """The document as JSON, keys sorted, with a last field `crc32`: of all bytes before it, as 8 hexadecimal digits (zlib's)."""
    body = json.dumps(document, sort_keys=True, separators=(",", ":"), default=plain).encode()[:-1]
    return body + b',"crc32":"%08x"}' % zlib.crc32(body)


def unseal(data: bytes) -> dict[str, Any]:
    """The document in what `seal` gave. Raises ValueError if it is anything else."""
    found = _SEAL.search(data)
    if found is None:
        raise ValueError("it does not end with its checksum")
    body = data[: found.start()]
    if zlib.crc32(body) != int(found[1], 16):
        raise ValueError(f"its checksum is {zlib.crc32(body):08x} instead of {found[1].decode()}")
    return json.loads(body + b"}")
