"""What a caller asks a restore for, checked before anything is looked up: the mistakes that can be told from the call alone.

How strictly a reference must match is checked by `raystate.restored.ReadOptions`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raystate.arrays.checks import check_step, of_a_class, shown
from raystate.core.formats.errors import ConfigError


def check_asked(reference: Any = None, *, step: Any = None, items: Any = None, call: str = "restore") -> int | None:
    """The step that is asked for, as an int; None: the newest.

    Args:
        reference: not looked into, unless the step is something else than a step.
        step: an int >= 0, or None.
        items: a dict {name: value}, or None.
        call: what the caller calls, for messages.

    Raises:
        ConfigError: names the argument, and what was probably meant.
    """
    if items is not None and not isinstance(items, Mapping):
        names = items if isinstance(items, list | tuple | set) and items and all(isinstance(name, str) for name in items) else ()
        meant = ", ".join(f"{name!r}: …" for name in names) or '"data": iterator'
        raise ConfigError(
            f"items must be a dict of name and value, not {shown(items)}: {call}(…, items={{{meant}}}), where a value is an iterator "
            "that is set in place, or the reference of a tree",
            field="items", got=shown(items),
        )  # fmt: skip
    if step is None:
        return None
    try:
        return check_step(step)
    except ConfigError as error:
        if is_step(reference):
            error = ConfigError(
                f"{call}({reference}, …): the first argument is the reference, and step is {error.got}; "
                f"did you mean {call}(reference, step={reference})?",
                field="step", got=error.got,
            )  # fmt: skip
        elif isinstance(step, str) and step.isdecimal():
            error = ConfigError(f"{error.message}; did you mean step={int(step)}?", field="step", got=error.got)
        raise error from None


def is_step(reference: Any) -> bool:
    """Whether a reference is a bare number, as of somebody who meant a step."""
    return isinstance(reference, int) and not isinstance(reference, bool) and reference >= 0


def not_a_value(leaf: Any) -> str:
    """Why a class or a function is no leaf, and the way out; "" for anything else."""
    if isinstance(leaf, type):
        return of_a_class(leaf, array="an array, or a jax.ShapeDtypeStruct(shape, dtype),")
    if callable(leaf):
        name = getattr(leaf, "__qualname__", None) or getattr(leaf, "__name__", None) or type(leaf).__qualname__
        return (
            f"it is the function {name}, which no checkpoint holds: leave it out of the tree, with Equinox by "
            "`eqx.filter(tree, eqx.is_array)`, and put it back after the restore by `eqx.combine(restored, tree)`"
        )
    return ""
