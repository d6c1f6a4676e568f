"""Control words as bytes: what trainers and HostActors write into shared memory for each other.

A cell in shared memory has a fixed size, and a word that did not fit would stop its reader for good. So a word always fits: texts
are cut, long facts of an error are left out, and of many errors the newest few remain. Numbers, kinds and names are never changed.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable
from typing import Any, TypeVar

from raystate.core.formats.codec import dumps, loads
from raystate.core.formats.declared import Failure
from raystate.core.formats.errors import CapacityError
from raystate.core.formats.reports import HostWord, TrainerWord

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
    return loads(TrainerWord, data)


def host_word_from_json(data: bytes) -> HostWord:
    """Raises ValueError if it is not a HostWord of this version."""
    return loads(HostWord, data)


def cut(text: str, room: int) -> str:
    """The first `room` characters and a note that says how many more there were."""
    return text if len(text) <= room else f"{text[:room]}… ({len(text) - room} more characters)"


# ---------------------------------------------------------------- shortening


def _first_that_fits(word: _Word, shorter: Iterable[_Word]) -> bytes:
    data = b""
    for candidate in itertools.chain([word], shorter):
        data = dumps(candidate)
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
