"""Control words as bytes: what trainers and HostActors write into shared memory for each other.

A cell in shared memory has a fixed size, and a word that did not fit would stop its reader for good. So a word always fits: texts
are cut, long facts of an error are left out, and of many errors the newest few remain. Numbers, kinds and names are never changed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from raystate.core.errors import CapacityError
from raystate.core.messages import Failure, HostWord, TrainerWord

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
    """The word in at most `MAX_WORD_BYTES` bytes. If it has to be shortened: texts are cut, `save_errors` keeps its newest few, and
    details of the failure that are too long are left out and named in the detail `left_out`.

    What JSON does not know among the details becomes text, a tuple becomes a list.

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
    data = _to_json(word)
    if len(data) <= MAX_WORD_BYTES:
        return data
    for candidate in shorter:
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
    """Texts are cut; what is longer than `room` as JSON goes; and so does the last of very many."""
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
    return json.dumps(dataclasses.asdict(word), separators=(",", ":")).encode()


def _parse(kind: type[_Word], data: bytes) -> _Word:
    try:
        return _read(kind, json.loads(data), kind.__name__)
    except RecursionError:
        raise ValueError(f"{kind.__name__}: nested too deeply") from None


@functools.cache
def _fields(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _read(kind: Any, raw: Any, where: str) -> Any:
    """The value of type `kind` that `raw`, read from JSON, stands for. ValueError if it stands for none."""
    kind = getattr(kind, "__supertype__", kind)
    origin, args = get_origin(kind), get_args(kind)
    value: Any = raw  # pyright forgets what `raw` was once it has looked at it
    if kind is Any:
        return value
    if isinstance(raw, dict) and dataclasses.is_dataclass(kind):
        return _read_dataclass(typing.cast(type, kind), typing.cast(dict[str, Any], raw), where)
    if origin in (Union, types.UnionType):
        if raw is None and type(None) in args:
            return None
        (only,) = (arg for arg in args if arg is not type(None))
        return _read(only, value, where)
    if origin is Literal and value in args:
        return value
    if origin is tuple and isinstance(raw, list):
        items = typing.cast(list[Any], raw)
        kinds = args[:1] * len(items) if args[-1] is ... else args
        if len(kinds) == len(items):
            return tuple(_read(one, item, where) for one, item in zip(kinds, items, strict=True))
    if origin is dict and isinstance(raw, dict):
        found = typing.cast(dict[str, Any], raw)
        return {name: _read(args[1], one, where) for name, one in found.items()}
    if kind in (int, str, bool, float) and type(value) is kind:
        return value
    if kind is float and type(value) is int:
        return float(value)
    raise ValueError(f"{where}: expected {kind}, got {json.dumps(value)[:100]}")


def _read_dataclass(kind: type, raw: dict[str, Any], where: str) -> Any:
    fields = _fields(kind)
    if unknown := sorted(raw.keys() - fields.keys()):
        raise ValueError(f"{where}: unknown fields {', '.join(unknown)}")
    values = {name: _read(fields[name], value, f"{where}.{name}") for name, value in raw.items()}
    try:
        return kind(**values)
    except TypeError as error:  # a field without a default is missing
        raise ValueError(f"{where}: {error}") from None
