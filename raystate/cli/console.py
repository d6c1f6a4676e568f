"""What the commands have in common on a terminal."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from raystate.arena import format_bytes
from raystate.core.formats.errors import ConfigError
from raystate.core.formats.texts import counted as count  # noqa: F401 - the commands have it from here
from raystate.core.formats.texts import printable

StorageArgument = Annotated[
    str, typer.Argument(metavar="STORAGE", help="a directory, file://…, gs://bucket/prefix or s3://bucket/prefix")
]
NewestStepArgument = Annotated[str, typer.Argument(metavar="[STEP]", help="number of a step, or 'latest'", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="one JSON document on standard output, for scripts")]

_UNITS = ((60.0, "s"), (3600.0, "min"), (86400.0, "h"))


class _Terminal(Console):
    """What is printed is shown, whatever it is made of; colours and moves of the cursor are rich's alone."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


# emoji: a name such as `vocabulary:a:` is a name.
out = _Terminal(highlight=False, soft_wrap=True, emoji=False)
screen_out = _Terminal(highlight=False, emoji=False)  # breaks its lines: rich's screen shows no more than its width
progress_out = _Terminal(stderr=True, emoji=False)


def print_json(document: Any) -> None:
    """NaN and infinities become null: other languages' parsers refuse them."""
    print(json.dumps(_plain(document), indent=2, sort_keys=True))


def _plain(value: Any) -> Any:
    match value:
        case Mapping():
            return {str(key): _plain(one) for key, one in value.items()}
        case list() | tuple():
            return [_plain(one) for one in value]
        case float():
            return value if math.isfinite(value) else None
        case datetime():
            return value.isoformat()
        case _:
            return value


def step_or_latest(text: str, what: str = "STEP", more: str = "") -> int | None:
    """The step that an argument names; None: the newest.

    Args:
        text: as it was given.
        what: the argument's name.
        more: ends the error's sentence.

    Raises:
        ConfigError: it is neither.
    """
    if text == "latest":
        return None
    if not text.isdecimal():
        raise ConfigError(f"{what}: expected a step's number or 'latest', not {text!r}{more}", field=what, got=text)
    return int(text)


def size(nbytes: float) -> str:
    """Bytes for people: "1.5 GiB"."""
    return format_bytes(nbytes)


def unit_of(span_s: float) -> tuple[float, str]:
    """(seconds of it, its name) of the unit in which a span is told."""
    below = 1.0
    for limit, name in _UNITS:
        if span_s < 3 * limit:
            return below, name
        below = limit
    return below, "d"


def span(seconds: float | None) -> str:
    """A time for people: "260 ms", "2.5 s", "3.2 h"."""
    if seconds is None:
        return "?"
    width_s, unit = unit_of(seconds)
    return f"{seconds / width_s:.1f} {unit}" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def at_utc(time_s: float) -> str:
    """The time of day, of seconds since 1970: a screen is read later, in another time zone. With the date, if it is not today's."""
    try:
        moment = datetime.fromtimestamp(time_s, UTC)
    except (ValueError, OverflowError, OSError):  # a ledger may say anything
        return f"{time_s:.4g} s since 1970"
    return moment.strftime("%H:%M:%S UTC" if moment.date() == datetime.now(UTC).date() else "%Y-%m-%d %H:%M:%S UTC")


def ago(time_s: float) -> str:
    """ "5.9 s ago, at 03:00:51 UTC"."""
    return f"{span(max(0.0, time.time() - time_s))} ago, at {at_utc(time_s)}"


def when(moment: datetime | None) -> str:
    """In the time zone of the terminal."""
    return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S") if moment is not None else "-"


def figure(value: float) -> str:
    """A metric or a difference, short."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
