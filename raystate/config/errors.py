"""What a wrong setting gets: one ConfigError that names the field, the value and what is allowed."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import pydantic

from raystate.config.hints import FIELDS
from raystate.core.formats.errors import ConfigError


def contradiction(field: str, value: object, allowed: str) -> ConfigError:
    """The error of a field whose value others, or this version, don't allow."""
    return ConfigError(_sentence(field, value, allowed), field=field, got=plain(value), expected=allowed)


def plain(value: object) -> object:
    """What an error may carry between processes: a plain value as it is, anything else as text."""
    return value if value is None or isinstance(value, str | int | float) else repr(value)


def _sentence(field: str, value: object, allowed: str) -> str:
    return f"{field} = {value!r}: {allowed}"


def check_flag(name: str, value: object) -> None:
    """Raises ConfigError unless it is True or False: a text such as "no" would count as True."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, not {value!r}", field=name, got=plain(value))


def by_name(value: object) -> ConfigError:
    """The error of a setting that was given without its name."""
    text = f"{value!r} is given without a name; settings have names: StateConfig(storage={value!r}, run=…)"
    return ConfigError(text, field="storage", got=plain(value))


def refuse_unknown(values: Mapping[str, Any], fields: Sequence[str]) -> None:
    """Raises ConfigError if a name is none of the fields; says which is meant."""
    for name, value in values.items():
        if name not in fields:
            close = difflib.get_close_matches(str(name), fields, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the fields are: {', '.join(fields)}"
            hint = FIELDS.get(name, hint)
            raise ConfigError(
                f"{name}: there is no such field; {hint}", field=str(name), got=plain(value), expected=close or fields
            )


class OneOfAll(ValueError):  # noqa: N818 - a wrapping, for pydantic
    """A field's own ConfigError."""

    def __init__(self, error: ConfigError):
        super().__init__(error.message)
        self.error = error


@contextlib.contextmanager
def one_of_all() -> Generator[None]:
    """In a validator: a ConfigError is told together with those of the other fields; by itself it would hide them."""
    try:
        yield
    except ConfigError as error:
        raise OneOfAll(error) from None


def config_error(error: pydantic.ValidationError) -> ConfigError:
    """One ConfigError for everything that is wrong; `field`, `got` and `expected` are those of the first."""
    faults: dict[str, tuple[object, str]] = {}
    own: dict[str, ConfigError] = {}
    for fault in error.errors(include_url=False):
        field = str(fault["loc"][0]) if fault["loc"] else "StateConfig"
        if isinstance(cause := fault.get("ctx", {}).get("error"), OneOfAll):
            own[field] = cause.error
        got = None if fault["type"] == "missing" else fault["input"]
        allowed = _allowed(fault["type"], fault["msg"])
        if field in faults:  # the other branch of a union, such as "or None"
            allowed = f"{faults[field][1]}, or {allowed.removeprefix('must be ')}"
        faults[field] = (got, allowed)
    if len(faults) == len(own) == 1:
        return next(iter(own.values()))
    texts = {field: _said(field, got, allowed) for field, (got, allowed) in faults.items()}
    texts |= {field: error.message for field, error in own.items()}
    field, (got, expected) = next(iter(faults.items()))
    return ConfigError("; ".join(texts.values()), field=field, got=plain(got), expected=expected, fields=sorted(faults))


_MISSING = "must be given"


def _said(field: str, got: object, allowed: str) -> str:
    return f"{field}: {allowed}" if allowed == _MISSING else _sentence(field, got, allowed)


def _allowed(kind: str, message: str) -> str:
    if kind == "missing":
        return _MISSING
    return message.removeprefix("Value error, ").replace("Input should be", "must be")
