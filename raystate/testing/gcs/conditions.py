"""Preconditions: what a request says must hold of the object that it reads or changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from raystate.testing.gcs.answers import GcsError


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """Which object of a name it is: `generation` changes with the bytes, `metageneration` counts changes of its metadata."""

    generation: int
    metageneration: int

    @classmethod
    def of(cls, resource: Mapping[str, Any]) -> Self:
        """The version of an object as the JSON API describes it."""
        return cls(generation=int(resource["generation"]), metageneration=int(resource["metageneration"]))


ABSENT = Version(generation=0, metageneration=0)  # what the conditions call a name without an object


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The four preconditions of a request; None: not asked for."""

    generation_match: int | None = None
    generation_not_match: int | None = None
    metageneration_match: int | None = None
    metageneration_not_match: int | None = None

    @classmethod
    def from_query(cls, query: Mapping[str, str], prefix: str = "if") -> Self:
        """Read from a URL's query.

        Args:
            query: names and values.
            prefix: "if", or "ifSource" for the source of a rewrite or copy.

        Raises:
            GcsError: 400, a value isn't a number.
        """
        return cls(
            generation_match=number(query, f"{prefix}GenerationMatch"),
            generation_not_match=number(query, f"{prefix}GenerationNotMatch"),
            metageneration_match=number(query, f"{prefix}MetagenerationMatch"),
            metageneration_not_match=number(query, f"{prefix}MetagenerationNotMatch"),
        )

    def __bool__(self) -> bool:
        return self != _NONE

    def check(self, version: Version, what: str, *, reading: bool = False) -> None:
        """Refuse unless all hold.

        Args:
            version: of the object now; ABSENT if there is none.
            what: named in the message.
            reading: a failed "not match" means then that the reader has it already: 304 instead of 412.

        Raises:
            GcsError: 412 or 304.
        """
        pairs = (
            ("GenerationMatch", self.generation_match, version.generation),
            ("MetagenerationMatch", self.metageneration_match, version.metageneration),
        )
        for name, wanted, got in pairs:
            if wanted is not None and wanted != got:
                raise _broken(412, f"if{name}={wanted}", got, what)
        pairs = (
            ("GenerationNotMatch", self.generation_not_match, version.generation),
            ("MetagenerationNotMatch", self.metageneration_not_match, version.metageneration),
        )
        for name, unwanted, got in pairs:
            if unwanted is not None and unwanted == got:
                raise _broken(304 if reading else 412, f"if{name}={unwanted}", got, what)


_NONE = Conditions()


def number(query: Mapping[str, str], name: str) -> int | None:
    """An integer parameter of a query; None: not given.

    Raises:
        GcsError: 400, it isn't a number.
    """
    text = query.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise GcsError(400, f"Invalid value for {name}: {text!r} is not a number") from None


def _broken(status: int, condition: str, got: int, what: str) -> GcsError:
    return GcsError(status, f"At least one of the pre-conditions you specified did not hold: {condition}, but {what} has {got}")
