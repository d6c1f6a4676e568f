"""Sizes of memory in settings and for people."""

from __future__ import annotations

import contextlib
import re

from raystate.core.formats.errors import ConfigError
from raystate.machine.memory import node_memory

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[_letter] = _UNITS[_letter + "ib"] = 1024**_power  # "4G" means what Linux and Kubernetes' Gi mean
    _UNITS[_letter + "i"] = 1024**_power
    _UNITS[_letter + "b"] = 1000**_power
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-z%]*)\s*$", re.IGNORECASE)


def parse_share(value: object) -> object:
    """ "3%" is 0.03. What is no percentage stays as it is."""
    if isinstance(value, str) and value.strip().endswith("%"):
        with contextlib.suppress(ValueError):
            return float(value.strip()[:-1]) / 100
    return value


def parse_memory(value: str | int, *, total_bytes: int | None = None, field: str = "host_memory") -> int:
    """Bytes meant by a setting.

    Args:
        value: bytes, "2GiB" / "512 MB" / "1.5G", or a percentage of the node's memory such as "40%".
        total_bytes: what 100% is; None: this node's memory, or its control group's limit if that is smaller.
        field: the setting's name, for the error.

    Raises:
        ConfigError: not a size above zero, or more than 100%.
    """
    size = value if isinstance(value, int) and not isinstance(value, bool) else None
    if isinstance(value, str) and (match := _SIZE.match(value)):
        number, unit = float(match[1]), match[2].lower()
        if unit == "%" and number <= 100:
            size = int(number / 100 * (node_memory().total_bytes if total_bytes is None else total_bytes))
        elif unit in _UNITS:
            size = int(number * _UNITS[unit])
    if size is None or size <= 0:
        raise ConfigError(
            f'{field}: expected bytes, a size such as "2GiB", or a percentage such as "40%", got {value!r}', field=field, got=value
        )
    return size


_SHOWN_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(size_bytes: float, *, of: float | None = None) -> str:
    """A size for a person: "1.5 GiB"; with `of`, how much of what: "1.5 of 4.0 GiB"."""
    scale, power = abs(size_bytes if of is None else of), 0
    while scale >= 1024 and power < len(_SHOWN_UNITS) - 1:
        scale, power = scale / 1024, power + 1
    amounts = [f"{one / 1024**power:.{1 if power else 0}f}" for one in (size_bytes, of) if one is not None]
    return f"{' of '.join(amounts)} {_SHOWN_UNITS[power]}"
