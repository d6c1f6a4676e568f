"""What flax calls its checkpoints: `<prefix><step>`, where a step may be any number, and how such names are ordered."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from raystate.storage.names import ORBAX_TEMPORARY

GDA = "_gda"  # ends the folder with the arrays that several processes held
TEMPORARY = "tmp"  # the "step" of a file that is being written

_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
_SIGNED = re.compile(f"([-+]?{_NUMBER})")
_UNSIGNED = re.compile(f"[-+]?({_NUMBER})")
_SCHEME = re.compile(r"([a-z][a-z0-9.+-]+://)?(.*)", re.IGNORECASE | re.DOTALL)


def natural_sort(file_list: Iterable[str], signed: bool = True) -> list[str]:
    """Names in the order of the numbers in them: file_1, file_2, file_10; file_-0.2, file_0.1, file_1e1.

    Args:
        file_list: names or paths.
        signed: whether a sign before a number belongs to it; else it only separates.
    """
    pattern = _SIGNED if signed else _UNSIGNED

    def key(name: str) -> list[str | float]:
        # Every second part is a number, so that a number is never compared with a text.
        return [float(part) if place % 2 else part for place, part in enumerate(pattern.split(name))]

    return sorted(file_list, key=key)


def safe_normpath(path: str) -> str:
    """A path without `.`, `..` and double slashes; the `scheme://` before it stays."""
    found = _SCHEME.fullmatch(path)
    assert found is not None  # it matches every text
    return (found[1] or "") + os.path.normpath(found[2])


def last_number(name: str) -> float | None:
    """The last number of a name, with its sign; None if it has none."""
    numbers = _SIGNED.findall(name)
    return float(numbers[-1]) if numbers else None


def split_name(name: str) -> tuple[str, float] | None:
    """(prefix, step) of a name that ends in a number; None for any other name. In `epoch-3` the dash belongs to the prefix."""
    *before, number, rest = ("", *_SIGNED.split(name))
    if rest or len(before) < 2:
        return None
    prefix = "".join(before)
    if number[0] in "+-" and prefix[-1:].isalnum():
        prefix, number = prefix + number[0], number[1:]
    return prefix, float(number)


def is_temporary(name: str) -> bool:
    """Whether a name is that of something half written, by flax or by Orbax."""
    return name.removesuffix(GDA).endswith(TEMPORARY) or ORBAX_TEMPORARY in name
