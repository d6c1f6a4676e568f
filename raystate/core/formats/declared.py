"""What messages have in common: a kind of message is its fields, its words, and nothing elsewhere. `docs/extend.md` says how to add one."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import typing
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

_MODULE = re.compile(r"\b(?:[a-z_]\w*\.)+(?=\w)")


class Event:
    """What has happened, for `Coordinator.handle`. A HostActor's machine tells the Coordinator one by giving it as a command."""

    __slots__ = ()

    def words(self) -> str:
        """One line, for people."""
        raise NotImplementedError

    def about(self) -> Collection[int | str]:
        """The steps that it is news of, or what belongs to them: ids of saves, and log entries as "log entry 7"."""
        return [getattr(self, name) for name in ("step", "save") if hasattr(self, name)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error for a caller in another process: `error` names a class of core.formats.errors."""

    error: str
    message: str
    details: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])


def fingerprint(*kinds: Any) -> str:
    """Changes with the fields of these dataclasses and named tuples, and of those that they hold: their names, order, types and
    defaults."""
    lines: dict[Any, str] = {}
    waiting = list(kinds)
    for kind in waiting:
        if kind not in lines and (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")):
            hints = typing.get_type_hints(kind)
            fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
            defaults = [(field.name, field.default) for field in fields if field.default is not dataclasses.MISSING]
            lines[kind] = f"{kind} {hints} {defaults}"
            waiting += [part for hint in hints.values() for part in _parts(hint)]
    declared = _MODULE.sub("", "\n".join(sorted(lines.values())))  # a class that moves stays what it is
    return hashlib.sha256(declared.encode()).hexdigest()[:12]


def _parts(hint: Any) -> Iterator[Any]:
    yield hint
    for argument in typing.get_args(hint):
        yield from _parts(argument)
