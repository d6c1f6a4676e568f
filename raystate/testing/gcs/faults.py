"""Faults: which requests fail, and how.

A rule is a `FaultRule`, or a mapping with its fields, as in JSON:

    {"mode": "status", "status": 503, "kinds": ["upload"], "times": 2}              two uploads are refused, the third works
    {"mode": "reset_after_commit", "match": "commit_success.txt", "times": 1}       it happened, but the client can't know
    {"mode": "delay", "delay_s": 0.2, "kinds": ["get_media"], "probability": 0.1}   a tenth of all reads are slow

Of the rules that match a request all delays are added up; of the others the first one in the list acts, and the rules behind it don't see
the request. An `outage` comes before them all. What a rule chooses depends only on its seed and on the requests before.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeAlias

import pydantic
from pydantic import Field

from raystate.config.errors import config_error, contradiction, refuse_unknown
from raystate.core.formats.errors import ConfigError
from raystate.testing.gcs.answers import GcsAnswer, GcsError
from raystate.testing.gcs.operations import Kind

Mode: TypeAlias = Literal["status", "delay", "stall", "reset", "reset_after_commit", "truncate", "corrupt", "outage"]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class FaultRule(pydantic.BaseModel, frozen=True):
    """One rule. A bad field is a `ConfigError` that names it.

    Attributes:
        mode: what happens to a chosen request.
            "status": it is answered with `status`; nothing else happens.
            "outage": the same for every request; goes without `kinds`, `match`, `skip`, `times` and `probability`.
            "delay": it waits for `delay_s` and is then carried out.
            "stall": it is never answered, nor carried out; after `stall_s`, or when the rules are replaced, the connection is cut.
            "reset": the connection is reset before anything happened.
            "reset_after_commit": it is carried out, then the connection is reset instead of an answer.
            "truncate": a download promises its length, gives half of it and ends; an upload is reset and makes nothing; of any other
                answer the client gets half.
            "corrupt": the first byte of a download is another one, and its checksums are those of the object; only downloads are chosen.
        kinds: kinds of requests it is about (`operations.Kind`); none: all.
        match: regular expression, searched in `METHOD path?query gs://bucket/object`, where path and query are as sent (a slash in an
            object's name is %2F) and bucket and object are plain; "": everything.
        skip: matching requests to leave alone first.
        times: requests to act on; None: no end.
        probability: with which a matching request is chosen, after `skip`.
        seed: of these choices.
        status: for "status" and "outage".
        reason: in the error's body; None: what GCS says for `status`.
        body: the whole answer instead of an error in JSON.
        retry_after_s: the answer's Retry-After; None: without.
        delay_s: seconds to wait first, in any mode.
        stall_s: seconds after which a stalled connection is cut.
    """

    mode: Mode = "status"
    kinds: tuple[Kind, ...] = ()
    match: str = ""
    skip: Annotated[int, Field(ge=0)] = 0
    times: Annotated[int, Field(ge=1)] | None = None
    probability: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: int = 0
    status: Annotated[int, Field(ge=400, le=599)] = 503
    reason: str | None = None
    body: str | None = None
    retry_after_s: Annotated[int, Field(ge=0)] | None = None
    delay_s: Seconds = 0.0
    stall_s: Seconds = 300.0

    def __init__(self, **values: Any):
        refuse_unknown(values, list(type(self).model_fields))
        try:
            super().__init__(**values)
        except pydantic.ValidationError as error:
            raise config_error(error) from None

    @pydantic.field_validator("match")
    @classmethod
    def _check_match(cls, match: str) -> str:
        try:
            re.compile(match)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return match

    @pydantic.model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.mode == "delay" and not self.delay_s:
            raise contradiction("delay_s", self.delay_s, "must be given for mode 'delay'")
        filters = ("kinds", "match", "skip", "times", "probability")
        given = [name for name in filters if getattr(self, name) != type(self).model_fields[name].default]
        if self.mode == "outage" and given:
            raise contradiction(given[0], getattr(self, given[0]), "an outage is for every request; mode 'status' can choose")
        return self

    def answer(self) -> GcsAnswer:
        """What a request gets in the modes "status" and "outage"."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.body is not None:
            return GcsAnswer(
                status=self.status, headers={"Content-Type": "text/plain; charset=UTF-8", **headers}, body=self.body.encode()
            )
        return GcsError(self.status, f"An injected fault ({self.mode})", reason=self.reason, headers=headers).answer()


Rules: TypeAlias = Sequence[FaultRule | Mapping[str, Any]]


def parse_rules(rules: Rules | str) -> tuple[FaultRule, ...]:
    """Check rules.

    Args:
        rules: rules or mappings, or the JSON of a list of mappings (or of one).

    Raises:
        ConfigError: names the rule and the field, as in `faults[1].mode`.
    """
    given: Any = rules
    if isinstance(rules, str):
        try:
            given = json.loads(rules)
        except ValueError as error:
            raise ConfigError(f"faults: not JSON: {error}", field="faults") from None
        given = [given] if isinstance(given, dict) else given
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ConfigError(f"faults: must be a list of rules, not {given!r}", field="faults")
    parsed: list[FaultRule] = []
    for index, rule in enumerate(given):
        if not isinstance(rule, FaultRule | Mapping):
            raise ConfigError(f"faults[{index}]: must be a rule, not {rule!r}", field=f"faults[{index}]")
        try:
            parsed.append(rule if isinstance(rule, FaultRule) else FaultRule(**rule))
        except ConfigError as error:
            raise ConfigError(f"faults[{index}].{error}", field=f"faults[{index}].{error.field}") from None
    return tuple(parsed)


@dataclass(slots=True, kw_only=True)
class _Played:
    """A rule and how far it is."""

    rule: FaultRule
    random: random.Random
    seen: int = 0  # matching requests
    hits: int = 0  # requests that it acted on

    def takes(self, kind: Kind, line: str) -> bool:
        rule = self.rule
        kinds = rule.kinds if rule.mode != "corrupt" else ("get_media",)
        if (kinds and kind not in kinds) or not re.search(rule.match, line):
            return False
        self.seen += 1
        if self.seen <= rule.skip or (rule.times is not None and self.hits >= rule.times):
            return False
        if rule.probability < 1 and self.random.random() >= rule.probability:
            return False
        self.hits += 1
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """What one request has to bear: first the delay, then the rule."""

    delay_s: float = 0.0
    rule: FaultRule | None = None


class Faults:
    """The rules in force, and what each has done."""

    def __init__(self, rules: Sequence[FaultRule] = ()):
        self.replaced = asyncio.Event()  # set when the rules of now are no longer in force: stalled requests end
        self.replace(rules)

    def replace(self, rules: Sequence[FaultRule]) -> None:
        self.replaced.set()
        self.replaced = asyncio.Event()
        self._played = [_Played(rule=rule, random=random.Random(rule.seed)) for rule in rules]
        self._in_turn = sorted(self._played, key=lambda played: played.rule.mode != "outage")

    def choose(self, kind: Kind, line: str) -> Injection:
        """What happens to this request; counts it."""
        delay_s = 0.0
        for played in self._in_turn:
            if not played.takes(kind, line):
                continue
            delay_s += played.rule.delay_s
            if played.rule.mode != "delay":
                return Injection(delay_s=delay_s, rule=played.rule)
        return Injection(delay_s=delay_s)

    def hits(self) -> list[int]:
        """Requests that each rule acted on, in the order in which the rules were given."""
        return [played.hits for played in self._played]
