"""The `state:` section of a YAML file, read so that nothing in it means something else than it seems to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import yaml

from raystate.core.formats.errors import ConfigError

SECTION = "state"  # of a YAML file that also holds the job's own settings

_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_OCTAL = re.compile(r"[-+]?0[0-7_]")


def read_section(path: Path) -> dict[str, Any]:
    """Field -> value.

    Raises:
        ConfigError: the file can't be read or has no such section; a field is there twice; or YAML takes a number for another one than
            it looks like. Names file and section.
    """
    facts = {"file": str(path), "section": SECTION}
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        try:
            root = loader.get_single_node()
            _refuse_twice(root, path, only=SECTION)
            _refuse_twice(_section_of(root), path)
            raw: object = loader.construct_document(root) if root is not None else None
        finally:
            loader.dispose()
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror or error}", **facts) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not YAML: {' '.join(str(error).split())}", **facts) from error
    top = _mapping(raw)
    if top is None or SECTION not in top:
        found = ", ".join(top) if top is not None else f"a {type(raw).__name__}"
        raise ConfigError(f"{path}: has no section {SECTION!r} at the top level (found: {found or 'nothing'})", **facts)
    section = _mapping(top[SECTION])
    if section is None:
        raise ConfigError(f"{path}: section {SECTION!r} must hold `field: value` lines, not {top[SECTION]!r}", **facts)
    _refuse_odd_numbers(_section_of(root), section, path)  # what "<<" brings is in the node by now
    return section


def _refuse_twice(node: yaml.Node | None, path: Path, *, only: str | None = None) -> None:
    """YAML lets the last one win, without a word."""
    lines: dict[str, int] = {}
    for key, _ in _pairs(node):
        line = key.start_mark.line + 1
        if key.value in lines and only in (None, key.value):
            what = f"{path}: section {SECTION!r}" if only else f"{path}, section {SECTION!r}: {key.value}"
            message = f"{what} is there twice, in lines {lines[key.value]} and {line}: keep one of them"
            raise ConfigError(message, file=str(path), section=SECTION, field=None if only else key.value)
        lines[key.value] = line


def _refuse_odd_numbers(node: yaml.Node | None, section: dict[str, Any], path: Path) -> None:
    """YAML 1.1 has octal numbers, 010, and such of base 60, 1:30: the writer means ten, or a time,
    or a text."""
    for key, value in _pairs(node):
        text = value.value
        if (value.tag == _INT and _OCTAL.match(text)) or (value.tag in (_INT, _FLOAT) and ":" in text):
            got = section.get(key.value)
            raise ConfigError(
                f"{path}, section {SECTION!r}: {key.value}: {text} is {got!r} in YAML, where a number that begins with 0 is octal and "
                "one with colons of base 60: write it without these, or in quotes if it is a text",
                file=str(path), section=SECTION, field=key.value, got=text,
            )  # fmt: skip


def _section_of(root: yaml.Node | None) -> yaml.Node | None:
    return next((value for key, value in _pairs(root) if key.value == SECTION), None)


def _pairs(node: yaml.Node | None) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
    """The keys and values of a mapping, as far as the keys are texts or numbers."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return [(key, value) for key, value in pairs if isinstance(key, yaml.ScalarNode)]


def _mapping(raw: object) -> dict[str, Any] | None:
    return {str(name): value for name, value in cast("dict[object, Any]", raw).items()} if isinstance(raw, dict) else None
