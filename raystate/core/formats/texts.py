"""Texts for people: what others have named, numbers of things, and short times."""

from __future__ import annotations

import re

# All but tabs and ends of lines; marks that turn the order of what follows them; ends of lines of other kinds; halves of characters.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

_NODE_ID = re.compile(r"\b[0-9a-f]{56}\b")


def printable(text: str) -> str:
    """A text without characters that command a terminal or that no file can hold: others chose the names in it."""
    return _COMMANDS.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def brief(text: str) -> str:
    """A text for people: of Ray's node ids the first eight digits, which tell hosts apart. Programs
    find the full ids in the details."""
    return _NODE_ID.sub(lambda found: found[0][:8], text)


def with_machine(host: str, machine: str) -> str:
    """Of a node's id the first eight digits, with the name of its machine where that is known: `83f75645 (gpu-node-7)`."""
    return printable(f"{host[:8]} ({machine})" if machine else host[:8])


def of_step(step: int, text: str) -> str:
    """The text, which says of which step it is, once."""
    return text if text.startswith(f"step {step} ") else f"step {step}: {text}"


def counted(number: int, noun: str, nouns: str = "") -> str:
    """`1 step`, `2,000 steps`. `nouns`: of several, if that is not `noun` with an s."""
    return f"{number:,} {noun if number == 1 else nouns or f'{noun}s'}"


def duration(seconds: float) -> str:
    """A short time, of a step or less: `0.35 ms`, `31 ms`, `1.5 s`."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.1f} s"
