"""What of an answer the client wants: `fields`, such as `nextPageToken,items(name,generation)` or `items/name`, and `projection`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from raystate.testing.gcs.answers import GcsAnswer, GcsError, json_answer

Selection: TypeAlias = dict[str, "Selection"]  # an empty one: everything below

_TOKENS = re.compile(r"[^,()/\s]+|[,()/]")


def show(value: Mapping[str, Any], query: Mapping[str, str]) -> GcsAnswer:
    """An answer with what a request's query wants of `value`: an object, a bucket, or a list of them in `items`.

    Raises:
        GcsError: 400, `fields` is no selector.
    """
    if query.get("projection", "noAcl").lower() != "full":
        value = _without_acl(value)
        if "items" in value:
            value = {**value, "items": [_without_acl(item) for item in value["items"]]}
        if "resource" in value:  # of a rewrite
            value = {**value, "resource": _without_acl(value["resource"])}
    if "fields" in query:
        value = select(value, parse_fields(query["fields"]))
    return json_answer(value)


def _without_acl(resource: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: value for key, value in resource.items() if key != "acl"} if "acl" in resource else resource


def parse_fields(text: str) -> Selection:
    """Understand a selector.

    Raises:
        GcsError: 400, it isn't one.
    """
    tokens = _TOKENS.findall(text)
    selection, rest = _parse_list(tokens, text)
    if rest or not selection:
        raise _invalid(text)
    return selection


def select(value: Any, selection: Selection) -> Any:
    """What a selection leaves of a value from JSON; a list is selected from item by item."""
    if not selection:
        return value
    if isinstance(value, list):
        return [select(item, selection) for item in value]
    if not isinstance(value, dict):
        return value
    chosen: dict[str, Any] = {}
    for name, inside in value.items():
        below = selection.get(name, selection.get("*"))
        if below is not None:
            chosen[name] = select(inside, below)
    return chosen


def _parse_list(tokens: list[str], text: str) -> tuple[Selection, list[str]]:
    selection: Selection = {}
    while True:
        name, tokens = _parse_name(tokens, text)
        below = selection.setdefault(name, {})
        while tokens[:1] == ["/"]:
            name, tokens = _parse_name(tokens[1:], text)
            below = below.setdefault(name, {})
        if tokens[:1] == ["("]:
            inside, tokens = _parse_list(tokens[1:], text)
            if tokens[:1] != [")"]:
                raise _invalid(text)
            below.update(inside)
            tokens = tokens[1:]
        if tokens[:1] != [","]:
            return selection, tokens
        tokens = tokens[1:]


def _parse_name(tokens: list[str], text: str) -> tuple[str, list[str]]:
    if not tokens or tokens[0] in ",()/":
        raise _invalid(text)
    return tokens[0], tokens[1:]


def _invalid(text: str) -> GcsError:
    return GcsError(400, f"Invalid field selection {text!r}", reason="invalidParameter")
