"""The folders of steps, however they are named: Orbax's managers can put a prefix before the number, and zeros.

Only readers ask here. A run names its steps by plain numbers (`steps.visible_steps`), and does not begin beside other names (`foreign`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from raystate.core.formats.errors import ConfigError
from raystate.core.formats.texts import counted
from raystate.storage.base import Storage
from raystate.storage.foreign import is_early, is_marked
from raystate.storage.names import STATE, step_of
from raystate.storage.steps import top_folders, visible_steps

_NAME = re.compile(r"(?:(.+)_)?([0-9]+)", re.DOTALL)

Naming = dict[int, str]  # step -> its folder


def step_folders(storage: Storage) -> Naming:
    """The folder of each complete step, by step, ascending.

    Where there is no run, steps of early Orbax's are among them (`foreign.is_early`). Plain numbers come first: beside them, and
    beside a run's log, other names mean something else, such as a copy of the best step.
    Without any, folders named as Orbax does with `step_prefix` ("train_1200"), `step_format_fixed_length` ("00001200") or both.

    Raises:
        ConfigError: there are steps under several such names: any of them may be meant; lists them.
        StorageError: storage failed.
    """
    folders = top_folders(storage)
    plain = {step: str(step) for step in visible_steps(storage, folders)}
    if STATE in folders:
        return plain
    numbers = {name: number for name in folders if (number := number_in(name)) is not None}
    numbers |= {name: step for step, name in plain.items()}  # one may have come after `folders` were listed
    marked = {*plain.values(), *(name for name in numbers if step_of(name) is None and is_marked(storage, name))}
    # One without a mark that comes after one that has it is no early Orbax's, but half copied or half removed.
    first = min((numbers[name] for name in marked), default=2**63)
    whole = marked | {name for name in numbers if numbers[name] < first and name not in marked and is_early(storage, name)}
    plain = {step: name for name in sorted(whole, key=numbers.__getitem__) if (step := step_of(name)) is not None}
    others = [name for name in folders if name in whole and step_of(name) is None]
    namings = _namings([*plain.values(), *others])
    for naming in namings:
        if naming.keys() >= plain.keys() and (plain or len(namings) == 1):
            return dict(sorted(naming.items()))
    if plain or not namings:
        return plain
    shown = " and ".join(f"{next(iter(naming.values()))!r} ({counted(len(naming), 'step')})" for naming in namings)
    raise ConfigError(
        f"{storage.url} holds steps under several names, such as {shown}: give the folder of the step that you mean",
        field="storage",
        got=storage.url,
    )


def number_in(folder: str) -> int | None:
    """The step that a folder's name stands for, under whichever naming; None if it ends in no number of its own."""
    found = _split(folder)
    return int(found[1]) if found else None


def _split(folder: str) -> tuple[str | None, str] | None:
    """(prefix, digits); None: it is no name of a step, which is below 2**63."""
    found = _NAME.fullmatch(folder)
    return (found[1], found[2]) if found and int(found[2]) < 2**63 else None


def _namings(folders: Iterable[str]) -> list[Naming]:
    """The folders by what one Orbax manager could have named."""
    by_prefix: dict[str | None, list[tuple[str, str]]] = defaultdict(list)
    for name in folders:
        if found := _split(name):
            by_prefix[found[0]].append((found[1], name))
    return [{int(digits): name for digits, name in group} for named in by_prefix.values() for group in _by_width(named)]


def _by_width(named: list[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """(digits, folder) by width. A manager fills up with zeros to one width; only numbers that need more digits have more."""
    padded = [one for one in named if step_of(one[0]) is None]
    rest = [one for one in named if step_of(one[0]) is not None]
    widths = {len(digits) for digits, _ in padded}
    if len(widths) <= 1 and all(len(digits) >= max(widths, default=0) for digits, _ in rest):
        return [named]
    groups = [[one for one in padded if len(one[0]) == width] for width in sorted(widths)]
    return [group for group in (rest, *groups) if group]
