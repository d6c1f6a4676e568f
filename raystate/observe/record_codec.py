"""Events and commands as JSON values and back, field by field. A new one needs nothing here: `messages` has all that its modules declare.

A JSON object has one key, which says what it is: a class of the messages, or "dict", "list", "set". A JSON array is a tuple. Fields that
have their default are left out.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from raystate.core.formats import entries, messages
from raystate.core.formats.declared import fingerprint

_MISSING = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One event.

    Attributes:
        attempt: whose.
        number: counts the attempt's events from 0; where one is missing it was left out.
        time_s: wall clock, for people.
        now_s: what the machine was given.
        event: what had happened.
        commands: what the machine made of it.
        more: the next event was part of the same batch.
    """

    attempt: int
    number: int
    time_s: float
    now_s: float
    event: messages.Event
    commands: tuple[messages.Command, ...]
    more: bool = False


class UnknownMessageError(ValueError):
    """What is written there is no message of this version of raystate."""


def _is_kind(value: Any) -> bool:
    own = isinstance(value, type) and value.__module__.startswith("raystate.core.")
    return own and (dataclasses.is_dataclass(value) or issubclass(value, tuple))


KINDS: dict[str, type[Any]] = {
    name: kind for module in (entries, messages) for name, kind in vars(module).items() if _is_kind(kind)
} | {Record.__name__: Record}


@cache
def messages_format() -> str:
    """Changes with the declaration of any message: a record of another format is another version's, and so is an actor."""
    return fingerprint(*KINDS.values())


@cache
def _fields(kind: type[Any]) -> tuple[tuple[str, Any], ...]:
    """(name, default) of each field."""
    if issubclass(kind, tuple):
        defaults: dict[str, Any] = getattr(kind, "_field_defaults", {})
        names: tuple[str, ...] = getattr(kind, "_fields", ())
        return tuple((name, defaults.get(name, _MISSING)) for name in names)
    return tuple((field.name, _default(field)) for field in dataclasses.fields(kind))


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else _MISSING


def encode(value: Any) -> Any:
    """What `json.dumps` takes. A value that JSON has no words for (in an error's details, say) becomes its text."""
    if value is None or isinstance(value, str | int | float):
        return value
    kind = cast("type[Any]", type(value))
    if KINDS.get(kind.__name__) is kind:
        given = {name: getattr(value, name) for name, _ in _fields(kind)}
        return {kind.__name__: {name: encode(given[name]) for name, default in _fields(kind) if given[name] != default}}
    if isinstance(value, tuple):
        return [encode(one) for one in cast("tuple[Any, ...]", value)]
    if isinstance(value, list):
        return {"list": [encode(one) for one in cast("list[Any]", value)]}
    if isinstance(value, set | frozenset):
        return {"set": sorted((encode(one) for one in cast("set[Any]", value)), key=repr)}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(one)] for key, one in cast("dict[Any, Any]", value).items()]}
    assert not _is_kind(kind), f"{kind.__name__} can't be read back: `messages` doesn't know it"
    return repr(value)


def decode(raw: Any) -> Any:
    """What `encode` was given.

    Raises:
        UnknownMessageError: another version of raystate has written it.
    """
    if isinstance(raw, list):
        return tuple(decode(one) for one in cast("list[Any]", raw))
    if not isinstance(raw, dict):
        return raw
    ((name, body),) = cast("dict[str, Any]", raw).items()
    if name == "list":
        return [decode(one) for one in body]
    if name == "set":
        return frozenset(decode(one) for one in body)
    if name == "dict":
        return {decode(key): decode(one) for key, one in body}
    if name not in KINDS:
        raise UnknownMessageError(f"there is no message {name}")
    try:
        return KINDS[name](**{field: decode(one) for field, one in body.items()})
    except TypeError as error:
        raise UnknownMessageError(str(error)) from None
