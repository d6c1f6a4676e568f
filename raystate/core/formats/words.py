"""Control words as bytes: what trainers and HostActors write into shared memory for each other.

A cell in shared memory has a fixed size, and a word that did not fit would stop its reader for good. So a word always fits: texts
are cut, long facts of an error are left out, and of many errors the newest few remain. Numbers, kinds and names are never changed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from raystate.core.formats.errors import CapacityError
from raystate.core.formats.messages import Failure, HostWord, TrainerWord

MAX_WORD_BYTES = 32_000
MAX_SLOTS = 256  # of one trainer: so many numbers of any size fit a word beside everything else

LEFT_OUT = "left_out"  # the detail that names those that were too long

# How much is kept, tried in this order: characters of each text, and how many errors of a list.
_ROOMS = ((4000, 8), (1000, 4), (250, 2), (60, 1))

_Word = TypeVar("_Word", TrainerWord, HostWord)


def trainer_word_to_json(word: TrainerWord) -> bytes:
    """The word in at most `MAX_WORD_BYTES` bytes; only a long `error` is cut.

    Raises:
        CapacityError: the numbers and names alone are too long: more than `MAX_SLOTS` slots, or a name of many kilobytes.
    """
    shorter = (dataclasses.replace(word, error=cut(word.error, room)) for room, _ in _ROOMS)
    return _first_that_fits(word, shorter)


def host_word_to_json(word: HostWord) -> bytes:
    """The word in at most `MAX_WORD_BYTES` bytes. If it has to be shortened: texts are cut, and
    `save_errors` keeps its newest few. Details of the failure that are too long are left out, and
    named in the detail `left_out`.

    Details that JSON does not know become text, a tuple becomes a list.

    Raises:
        CapacityError: the numbers and names alone are too long: more than `MAX_SLOTS` slots, or a name of many kilobytes.
    """
    if word.failure is not None:
        word = dataclasses.replace(word, failure=dataclasses.replace(word.failure, details=_plain(word.failure.details)))
    return _first_that_fits(word, (_shorter_host_word(word, room, errors) for room, errors in _ROOMS))


def trainer_word_from_json(data: bytes) -> TrainerWord:
    """Raises ValueError if it is not a TrainerWord of this version."""
    return _parse(TrainerWord, data)


def host_word_from_json(data: bytes) -> HostWord:
    """Raises ValueError if it is not a HostWord of this version."""
    return _parse(HostWord, data)


def cut(text: str, room: int) -> str:
    """The first `room` characters and a note that says how many more there were."""
    return text if len(text) <= room else f"{text[:room]}… ({len(text) - room} more characters)"


# ---------------------------------------------------------------- shortening


def _first_that_fits(word: _Word, shorter: typing.Iterable[_Word]) -> bytes:
    data = b""
    for candidate in itertools.chain([word], shorter):
        data = _to_json(candidate)
        if len(data) <= MAX_WORD_BYTES:
            return data
    raise CapacityError(
        f"a {type(word).__name__} has {len(data)} bytes when its texts are cut; {MAX_WORD_BYTES} fit",
        needed_bytes=len(data),
        available_bytes=MAX_WORD_BYTES,
        limit="word",
    )


def _shorter_host_word(word: HostWord, room: int, errors: int) -> HostWord:
    proposal = word.proposal and dataclasses.replace(word.proposal, reason=cut(word.proposal.reason, room))
    failure = word.failure and Failure(
        error=word.failure.error,
        message=cut(word.failure.message, room),
        details=_shorter_details(word.failure.details, room),
    )
    texts = tuple(cut(text, room) for text in word.save_errors[-errors:])
    return dataclasses.replace(word, proposal=proposal, failure=failure, save_errors=texts)


def _shorter_details(details: dict[str, Any], room: int) -> dict[str, Any]:
    """Texts are cut; values longer than `room` as JSON go, and so does the last of very many."""
    kept: dict[str, Any] = {}
    left_out: list[str] = []
    left = 2 * room  # for all together
    for name, value in details.items():
        value = cut(value, room) if isinstance(value, str) else value
        size = len(json.dumps(name)) + (0 if isinstance(value, str) else len(json.dumps(value)))
        if size > room or size > left:
            left_out.append(name)
            continue
        left -= size + (min(len(value), room) if isinstance(value, str) else 0)
        kept[name] = value
    if left_out:
        kept[LEFT_OUT] = cut(", ".join(left_out), room)
    return kept


def _plain(details: dict[str, Any]) -> dict[str, Any]:
    """The details as JSON knows them: a fact of a type of its own must not keep an error from being told."""
    plain: dict[str, Any] = {}
    for name, value in details.items():
        try:
            plain[str(name)] = json.loads(json.dumps(value))
        except (TypeError, ValueError, RecursionError):
            try:
                plain[str(name)] = str(value)
            except Exception:  # somebody's own __str__
                plain[str(name)] = f"a {type(value).__name__}"
    return plain


# ---------------------------------------------------------------- JSON


def _to_json(word: TrainerWord | HostWord) -> bytes:
    return json.dumps(word, separators=(",", ":"), default=_fields).encode()


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(one.name for one in dataclasses.fields(kind))


def _fields(value: Any) -> dict[str, Any]:
    """Of a dataclass, for `json`. Unlike `dataclasses.asdict` it copies nothing: words are written many times a second."""
    if not dataclasses.is_dataclass(value):
        raise TypeError(f"a {type(value).__name__} is no JSON")
    return {name: getattr(value, name) for name in _names(type(value))}


def _parse(kind: type[_Word], data: bytes) -> _Word:
    try:
        return _read_dataclass(kind, json.loads(data))
    except RecursionError:
        raise ValueError(f"{kind.__name__}: nested too deeply") from None
    except _Unfit as error:
        raise ValueError(f"{kind.__name__}{error}") from None


class _Unfit(ValueError):  # noqa: N818 - the text says what is wrong, from the field on: ".grants: expected …"
    """JSON that stands for no value of the type."""


@functools.cache
def _readers(kind: type) -> dict[str, Callable[[Any], Any]]:
    return {name: _reader(one) for name, one in typing.get_type_hints(kind).items()}


def _read_dataclass(kind: Any, raw: Any) -> Any:
    readers = _readers(kind)
    if not isinstance(raw, dict):
        raise _misfit(kind, raw)
    fields = typing.cast(dict[str, Any], raw)
    if unknown := sorted(fields.keys() - readers.keys()):
        raise _Unfit(f": unknown fields {', '.join(unknown)}")
    values: dict[str, Any] = {}
    for name, value in fields.items():
        try:
            values[name] = readers[name](value)
        except _Unfit as error:
            raise _Unfit(f".{name}{error}") from None
    try:
        return kind(**values)
    except TypeError as error:  # a field without a default is missing
        raise _Unfit(f": {error}") from None


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Gives the value of type `kind` that its argument, read from JSON, stands for. It raises _Unfit if that stands for none.

    Made once for each type: words are read many times a second, beside the training.
    """
    kind = getattr(kind, "__supertype__", kind)
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda raw: raw
    if dataclasses.is_dataclass(kind):
        return functools.partial(_read_dataclass, kind)
    if origin in (Union, types.UnionType):
        (only,) = (_reader(arg) for arg in args if arg is not type(None))
        return only if type(None) not in args else lambda raw: None if raw is None else only(raw)
    if origin is tuple:
        return functools.partial(_read_tuple, kind, [_reader(arg) for arg in args if arg is not ...], args[-1] is ...)
    if origin is dict:
        return functools.partial(_read_dict, kind, _reader(args[1]))

    def read(raw: Any) -> Any:
        if (origin is Literal and raw in args) or type(raw) is kind:
            return raw
        if kind is float and type(raw) is int:
            return float(raw)
        raise _misfit(kind, raw)

    return read


def _read_tuple(kind: Any, readers: list[Callable[[Any], Any]], any_length: bool, raw: Any) -> tuple[Any, ...]:
    if isinstance(raw, list):
        items = typing.cast(list[Any], raw)
        if any_length:
            return tuple(map(readers[0], items))
        if len(readers) == len(items):
            return tuple(read(item) for read, item in zip(readers, items, strict=True))
    raise _misfit(kind, raw)


def _read_dict(kind: Any, reader: Callable[[Any], Any], raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise _misfit(kind, raw)
    return {name: reader(one) for name, one in typing.cast(dict[str, Any], raw).items()}


def _misfit(kind: Any, raw: Any) -> _Unfit:
    return _Unfit(f": expected {kind}, got {json.dumps(raw)[:100]}")
