"""What the small files of a checkpoint say, as values of known types.

Any program may have written such a file, or damaged it. So each thing that is wrong with one is a
CorruptCheckpointError: a run must be able to set the step aside and go on with an older one.
"""

from __future__ import annotations

import json
import math
from typing import Any, TypeGuard, TypeVar

import pydantic

from raystate.core.formats.errors import CorruptCheckpointError

MOST_LEVELS = 256  # of nested containers; Python itself gives up a few hundred levels later, wherever it stands then

Form = TypeVar("Form", bound="Said")


class Said(pydantic.BaseModel):
    """A form that a file must have. Fields that it has beside those of the form are passed over."""

    model_config = pydantic.ConfigDict(strict=True, frozen=True, extra="ignore")


def parse_json(data: bytes, what: str) -> Any:
    """The JSON value in a file. `what` begins the error's message.

    Raises:
        CorruptCheckpointError: it is no JSON, or nested more than `MOST_LEVELS` levels deep.
    """
    try:
        value = json.loads(data)
    except ValueError as error:
        raise CorruptCheckpointError(f"{what} is not JSON: {error}", path=what) from error
    except RecursionError:
        raise _too_deep(what) from None
    if data.count(b"[") + data.count(b"{") > MOST_LEVELS and _is_deep(value):
        raise _too_deep(what)
    return value


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """As `parse_json`, of a file that holds an object."""
    value = parse_json(data, what)
    if not isinstance(value, dict):
        raise CorruptCheckpointError(f"{what} is not a JSON object", path=what)
    return value


def is_comparable(metric: object) -> TypeGuard[int | float]:
    """Whether a metric's value is a number and not NaN. JSON has integers that no float can hold: they can be compared, too."""
    return isinstance(metric, int) or (isinstance(metric, float) and not math.isnan(metric))


def parse_form(form: type[Form], data: bytes, what: str) -> Form:
    """As `parse_json`, of a file whose form is known. The first line of the form's docstring ends the message's sentence."""
    value = parse_object(data, what)
    try:
        return form.model_validate(value)
    except pydantic.ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False)[0]
        where = "/".join(map(str, wrong["loc"]))[:200]
        text = f"{what} has not the form of {form.__doc__}: {where}: {wrong['msg']}"
        raise CorruptCheckpointError(text.encode(errors="backslashreplace").decode(), path=what) from None


def check_name(name: str, what: str) -> str:
    """Refuse a name that neither a file nor a terminal can hold."""
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError:
            shown = name.encode(errors="backslashreplace").decode()
            raise CorruptCheckpointError(f"{what} has the name {shown[:200]!r}, which is no text", path=what) from None
    return name


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [
            child for one in level for child in (one.values() if isinstance(one, dict) else one if isinstance(one, list) else ())
        ]
        if not level:
            return False
    return any(isinstance(one, dict | list) for one in level)


def _too_deep(what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{what} is nested more than {MOST_LEVELS} levels deep", path=what)
