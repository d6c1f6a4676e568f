"""`transforms` as a mapping: which leaf of the reference comes from which path of the checkpoint, and through which function.

Orbax's `Transform` objects say the same, so they become the same rules; they are known by their fields, for importing Orbax takes
seconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raystate.arrays.paths import Path
from raystate.arrays.stored import Stored
from raystate.core.formats.errors import ConfigError

Transforms = Callable[[Any], object] | Mapping[str, Any]


class KeepReference:
    """The reference's value stays."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """The old path that a rule names is not in the checkpoint."""

    old: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A leaf that a function makes.

    Attributes:
        inputs: per argument of the function, the leaves it is made of and where that argument's tree begins in their paths.
        call: takes the arguments, and the reference's leaf.
        said: where it comes from, for messages.
    """

    inputs: tuple[tuple[tuple[int, ...], int], ...]
    call: Callable[[list[Any], Any], Any]
    said: str

    @property
    def needs(self) -> list[int]:
        """The leaves to read, each once."""
        return list(dict.fromkeys(index for indices, _ in self.inputs for index in indices))


Ruled = int | KeepReference | Unknown | Made | None


@dataclass(slots=True)
class _Rule:
    pattern: re.Pattern[str]
    old: tuple[str, ...] | None = None  # with back-references; None: the same path
    function: Callable[..., Any] | None = None
    kept: bool = False
    subtrees: bool = False  # it may name an inner node, and moves all below it
    whole: Any = None  # an Orbax Transform with a multi_value_fn, called with (path, tree of what is read)
    used: bool = field(default=False)


class Rules:
    """What a mapping of new path to old path says. Paths are joined by "/".

    Args:
        mapping: the caller's, nested or flat; see `restore_tree`.

    Raises:
        ConfigError: names the key that makes no sense.
    """

    def __init__(self, mapping: Mapping[Any, Any]):
        self._rules = [_rule(key, value) for key, value in _flat(mapping, "")]

    def apply(self, path: Path, stored: Stored) -> Ruled:
        """What becomes of the reference's leaf at `path`. None: no rule speaks of it."""
        said: Ruled = None
        new = "/".join(map(str, path))
        for rule in self._rules:  # of several that match the last counts, as in Orbax
            match, rest = rule.pattern.fullmatch(new), ""
            cut = len(new)
            while match is None and rule.subtrees and (cut := new.rfind("/", 0, cut)) > 0:
                match, rest = rule.pattern.fullmatch(new[:cut]), new[cut:]
            if match is not None:
                rule.used = True
                said = _said(rule, match, new, rest, stored)
        return said

    def unused(self) -> list[str]:
        """The patterns that matched nothing so far."""
        return [rule.pattern.pattern for rule in self._rules if not rule.used]


def _flat(mapping: Mapping[Any, Any], above: str) -> Iterator[tuple[str, Any]]:
    for key, value in mapping.items():
        if not isinstance(key, str | int) or isinstance(key, bool):
            raise _mistake(str(key), f"a path must be a string (a regular expression), not a {type(key).__name__}")
        path = f"{above}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}/")
        else:
            yield path, value


def _rule(key: str, value: Any) -> _Rule:
    try:
        pattern = re.compile(key)
    except re.error as error:
        raise _mistake(key, f"not a regular expression: {error}") from None
    if _is_orbax(value):
        return _orbax_rule(key, pattern, value)
    if value is None:
        return _Rule(pattern, kept=True)
    if isinstance(value, str):
        return _Rule(pattern, old=(value,), subtrees=True)
    if callable(value):
        return _Rule(pattern, function=value)
    if isinstance(value, Sequence) and len(value) == 2 and callable(value[1]):
        old, function = value
        if isinstance(old, str):
            return _Rule(pattern, old=(old,), function=function)
        if isinstance(old, Sequence) and old and all(isinstance(path, str) for path in old):
            return _Rule(pattern, old=tuple(old), function=function)
    raise _mistake(
        key,
        "expected an old path, a function, (old path, function), ([old paths], function), None (keep the reference's value) or an "
        f"orbax.checkpoint.Transform, not {value!r}",
    )


def _is_orbax(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("original_key", "use_fallback", "value_fn", "multi_value_fn"))


def _orbax_rule(key: str, pattern: re.Pattern[str], transform: Any) -> _Rule:
    if transform.use_fallback:
        return _Rule(pattern, kept=True)
    if transform.multi_value_fn is not None:
        for name in getattr(transform, "multi_value_fn_input_args", None) or ():
            try:
                re.compile(name)
            except re.error as error:
                raise _mistake(key, f"its input {name!r} is not a regular expression: {error}") from None
        return _Rule(pattern, whole=transform)
    old = transform.original_key
    if old is not None and not isinstance(old, str):
        old = "/".join(old)
    return _Rule(pattern, old=None if old is None else (old,), function=transform.value_fn)


def _said(rule: _Rule, match: re.Match[str], new: str, rest: str, stored: Stored) -> Ruled:
    if rule.kept:
        return KeepReference()
    if rule.whole is not None:
        return _whole(rule.whole, new, stored)
    inputs: list[tuple[tuple[int, ...], int]] = []
    olds = [_expand(rule, match, old) + rest for old in (rule.old if rule.old is not None else ())] or [new]
    for old in olds:
        leaves, depth = stored.named(old)
        if rule.function is None:
            is_leaf = len(leaves) == 1 and len(stored.spec.leaves[leaves[0]].path) == depth
            return leaves[0] if is_leaf else Unknown(old)
        if not leaves:
            return Unknown(old)
        inputs.append((leaves, depth))
    function = rule.function
    assert function is not None
    return Made(inputs=tuple(inputs), call=lambda values, _: function(*values), said=", ".join(olds))


def _expand(rule: _Rule, match: re.Match[str], old: str) -> str:
    try:
        return match.expand(old)
    except (re.error, IndexError) as error:
        raise _mistake(rule.pattern.pattern, f"its old path {old!r} can't be filled in: {error}") from None


def _whole(transform: Any, new: str, stored: Stored) -> Ruled:
    """Orbax's functions of a tree. A RestoreTransform names what they need; without names they may need anything."""
    wanted = getattr(transform, "multi_value_fn_input_args", None)
    leaves = [(index, "/".join(map(str, leaf.path))) for index, leaf in enumerate(stored.spec.leaves)]
    if wanted is not None:
        for name in wanted:
            if not any(re.fullmatch(name, old) for _, old in leaves):
                return Unknown(name)
        leaves = [(index, old) for index, old in leaves if any(re.fullmatch(name, old) for name in wanted)]

    def call(values: list[Any], reference: Any) -> Any:
        if wanted is None:
            return transform.multi_value_fn(new, *values)
        from orbax.checkpoint.checkpoint_utils import construct_restore_args

        return transform.multi_value_fn(new, *values, construct_restore_args(reference))

    said = ", ".join(wanted) if wanted is not None else "the whole tree"
    return Made(inputs=((tuple(index for index, _ in leaves), 0),), call=call, said=said)


def _mistake(key: str, why: str) -> ConfigError:
    return ConfigError(f"transforms[{key!r}]: {why}", field="transforms", path=key)
