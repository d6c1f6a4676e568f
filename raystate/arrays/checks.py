"""What a caller gives to `save`, or asks of a restore, checked before anything is decided.

Pure: nothing is kept, and nothing that still computes is waited for. Every mistake is a `ConfigError`. It names
the argument (`field`) and the path in it, what was given, and the way out. How strictly a reference must match
is checked by `raystate.restored.ReadOptions`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from raystate.core.formats.errors import ConfigError
from raystate.core.formats.texts import printable
from raystate.items.value import MOST_BITS, MOST_LEVELS

_LARGEST_STEP = 2**63 - 1


def check_step(step: Any) -> int:
    """The step's number.

    Args:
        step: an int >= 0; numpy integers and integer arrays of shape () count as ints.

    Raises:
        ConfigError: `field` is "step".
    """
    number = None
    if not isinstance(step, bool | np.bool_ | Tracer):
        try:
            number = operator.index(step)
        except Exception:  # jax raises RuntimeError for an array that was donated, and classes of its own
            number = None
    if number is None or not 0 <= number <= _LARGEST_STEP:
        text = f"step must be the number of completed steps, an int >= 0 (and below 2**63), not {shown(step)}"
        raise ConfigError(text, field="step", expected="int >= 0", got=shown(step))
    return number


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
            f"it is the function {name}, which no checkpoint holds. If it makes the state, give jax.eval_shape of it; "
            "else leave it out of the tree, with Equinox by "
            "`eqx.filter(tree, eqx.is_array)`, and put it back after the restore by `eqx.combine(restored, tree)`"
        )
    return ""


def of_a_class(given: type, *, array: str = "an array") -> str:
    """What a caller is told who gives a class in the place of a value.

    Args:
        array: how the text names what may stand for an array there.
    """
    is_array = issubclass(given, np.ndarray | np.generic | jax.Array)
    way = f"give {array} in its place" if is_array else f"did you mean {given.__qualname__}()?"
    return f"it is the class {given.__qualname__} itself, not a value: {way}"


def check_metrics(metrics: Any) -> dict[str, Any]:
    """The metrics of a save: what was given, as a dict of its own.

    Args:
        metrics: name -> number (bool, int, float, numpy's) or array of shape (), which may still be computing. None: no metrics.

    Returns:
        name -> Python float, or the jax.Array as it was given (`hold_metrics` keeps it safe from donation).

    Raises:
        ConfigError: `field` is "metrics", `path` the metric's name.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise _refused("metrics", (), f"a {kind(metrics)} is no dict of names and numbers")
    checked: dict[str, Any] = {}
    for name, value in metrics.items():
        check_text("metrics", (), "the name", name)
        checked[str.__str__(name)] = _number(name, value)
    return checked


def hold_metrics(checked: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a step that is kept: copies of its arrays are enqueued, so that the next step may donate them.

    Args:
        checked: from `check_metrics`.

    Returns:
        name -> Python float or jax.Array; `float(np.asarray(value))` of each waits for its computation.
    """
    return {
        name: jax.device_put(value, value.sharding, may_alias=False) if isinstance(value, jax.Array) else value
        for name, value in checked.items()
    }


def check_custom(custom: Any) -> Any:
    """A copy of `custom` as it will come back.

    It must be JSON. Tuples become lists, numpy's numbers and strings Python's; NaN and infinities are kept.

    Raises:
        ConfigError: `field` is "custom", `path` says where in it.
    """
    return plain_json("custom", custom)


def plain_json(argument: str, value: Any, path: tuple[Any, ...] = (), *, where: str = "", **facts: Any) -> Any:
    """A copy of a JSON value that comes back equal from every JSON file that raystate and Orbax write.

    Args:
        argument: of `save`: what the error's `field` is.
        value: None, bool, int, float, str, lists and tuples, and mappings with str as keys.
        path: where `value` is in the argument.
        where: how the error's message begins; "": as the argument is called.
        **facts: attributes of the error.

    Raises:
        ConfigError: `path` says where.
    """

    def refused(why: str) -> ConfigError:
        return _refused(argument, path, why, where=where, **facts)

    if len(path) > MOST_LEVELS:
        raise refused(f"it is nested more than {MOST_LEVELS} levels deep (or contains itself); flatten it")
    if isinstance(value, np.generic) and not isinstance(value, str):
        plain = value.item()
        value = plain if isinstance(plain, bool | int | float) else value
    if isinstance(value, str):
        check_text(argument, path, "it", value, empty=True, where=where, **facts)
        return str.__str__(value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        if value.bit_length() > MOST_BITS:
            raise refused(f"an int of {value.bit_length()} bits can't be written; give a string")
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise refused(f"the key {shown(key)} is not a string; JSON has no other keys: use str(key)")
            check_text(argument, path, "the key", key, empty=True, where=where, **facts)
        return {str.__str__(key): plain_json(argument, child, (*path, key), where=where, **facts) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(argument, child, (*path, index), where=where, **facts) for index, child in enumerate(value)]
    raise refused(f"a {kind(value)} is not JSON{_hint(argument, value)}")


def check_text(
    argument: str, path: tuple[Any, ...], what: str, text: Any, *, empty: bool = False, where: str = "", **facts: Any
) -> None:
    """Refuse what is no text, and text that no file can hold."""
    if not isinstance(text, str):
        raise _refused(argument, path, f"{what} must be a str, not {shown(text)}", where=where, **facts)
    if not text and not empty:
        raise _refused(argument, path, f"{what} must not be empty", where=where, **facts)
    if lone := lone_surrogate(text):
        why = f"{what} {shown(text)} has the lone surrogate {lone}, which no file can hold: it is no character. Encode it otherwise"
        raise _refused(argument, path, why, where=where, **facts)


def plain_scalar(value: Any) -> Any:
    """The bool, int, float or str that a value is, also one of a subclass (an enum's member): no file keeps what is more to it.

    Its class's own `__str__`, `__int__` and comparisons are not asked.
    """
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bool | np.generic):
        return value
    return int.__int__(value) if isinstance(value, int) else float.__float__(value)


def lone_surrogate(text: str) -> str:
    r"""The first character of `text` that UTF-8 can't encode, as in '\ud800', or ""."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return repr(text[error.start])
    return ""


def shown(value: Any) -> str:
    """A value for a message: its type and, as far as it is short and known, what it is."""
    if isinstance(value, jax.Array):  # its text would wait for its computation, or fail if it was donated
        return f"a jax.Array {value.dtype}{list(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"a numpy.ndarray {value.dtype}{list(value.shape)}"
    if isinstance(value, bool | int | float | str | bytes | None | np.generic):
        try:
            text = repr(value)
        except ValueError:  # an int of more digits than Python writes
            return f"an {type(value).__name__} of very many digits"
        return text if len(text) <= 60 else f"{text[:57]}…"
    return f"a {kind(value)}"


def kind(value: Any) -> str:
    """The name of a value's class, with its module unless it is Python's own."""
    if isinstance(value, jax.Array) and not isinstance(value, Tracer):
        return "jax.Array"  # its class has another name, which is JAX's own
    made = type(value)
    return made.__qualname__ if made.__module__ == "builtins" else f"{made.__module__}.{made.__qualname__}"


def _number(name: str, value: Any) -> Any:
    def refused(why: str) -> ConfigError:
        return _refused("metrics", (name,), f"{why}; a metric is a number or an array of shape (): put anything else into `custom`")

    if isinstance(value, jax.Array):
        if isinstance(value, Tracer):
            raise _refused("metrics", (name,), "it is traced: save() can't be called inside jit")
        if value.shape != () or not _is_real(value.dtype):
            raise refused(f"{shown(value)} is no number")
        if value.is_deleted():
            raise _refused("metrics", (name,), "it was donated to a later computation and is deleted: give the newest value")
        if not value.sharding.addressable_devices:
            raise _refused("metrics", (name,), "it lies on devices of other processes: give each process a value of its own")
        return value
    if isinstance(value, np.ndarray | np.generic):
        if value.shape != () or not _is_real(value.dtype):
            raise refused(f"{shown(value)} is no number")
        return float(value)
    if isinstance(value, bool | int | float):
        try:
            return float(value)
        except OverflowError:
            raise refused(f"the int {shown(value)} is larger than any float") from None
    raise refused(f"{shown(value)} is no number")


def _is_real(dtype: Any) -> bool:
    number, boolean = jax.numpy.number, jax.numpy.bool_
    real = jax.numpy.issubdtype(dtype, number) or jax.numpy.issubdtype(dtype, boolean)
    return real and not jax.numpy.issubdtype(dtype, jax.numpy.complexfloating)


def _hint(argument: str, value: Any) -> str:
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return "; use float(x), int(x) or x.tolist(), or save it as an item, as a tree with arrays"
    if isinstance(value, set | frozenset):
        return "; use sorted(x)"
    if isinstance(value, bytes | bytearray):
        return "; use x.decode() or base64"
    if isinstance(value, type):
        return "; use its name"
    if argument == "items":
        hint = "; an item is an iterator (get_state, set_state), Orbax v1's checkpointable (async save, load), a tree with arrays, or JSON"
        if hasattr(value, "__next__"):
            hint += ". raystate.Counted(make_iterator) counts for an iterator that can't say where it is"
        return hint
    return "; it can hold None, bool, int, float, str, lists and dicts with str as keys"


def _refused(argument: str, path: tuple[Any, ...], why: str, *, where: str = "", **facts: Any) -> ConfigError:
    place = printable("/".join(map(str, path)))
    text = f"{where or argument}{f', {place}' if place else ''}: {why}"
    return ConfigError(printable(text), **{"field": argument, "path": place or "the value itself", **facts})
