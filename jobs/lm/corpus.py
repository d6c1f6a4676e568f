"""The training text: the Python standard library's own source files, read in place. No download, the same on every host that
runs the same Python.
"""

from __future__ import annotations

import collections
import fnmatch
import hashlib
import math
import os
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jobs.lm.config import DataConfig

_SEPARATOR = b"\n"


class CorpusError(Exception):
    """There is no usable corpus on this host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Both texts as uint8 arrays of shape [bytes], and what identifies them."""

    train: np.ndarray
    val: np.ndarray
    train_files: tuple[str, ...]  # relative, sorted
    val_files: tuple[str, ...]
    fingerprint: str  # sha256 over role, name and content of every file


def load_corpus(config: DataConfig, root: str | Path | None = None) -> Corpus:
    """Read the corpus.

    Files are ranked by a hash of their relative name, so that neither the cap nor the split favours a letter of the alphabet. In that
    order they fill the validation text up to its part, then the training text up to the cap; a file that does not fit is passed over.
    Each text then has its files in the order of their names.

    Args:
        config: which files, how many bytes.
        root: the folder to read; None is the standard library.

    Raises:
        CorpusError: the folder is missing or has too little text.
    """
    root = Path(sysconfig.get_paths()["stdlib"] if root is None else root)
    found = _python_files(root, config.exclude)
    ranked = sorted(found, key=lambda name: hashlib.sha256(name.encode()).digest())
    limit_bytes = min(config.max_bytes, sum(found.values()))
    room_bytes = {"val": int(limit_bytes * config.val_fraction)}
    room_bytes["train"] = limit_bytes - room_bytes["val"]
    texts: dict[str, dict[str, bytes]] = {"train": {}, "val": {}}
    for name in ranked:
        role = next((role for role, room in room_bytes.items() if found[name] <= room), None)
        if role is not None:
            room_bytes[role] -= found[name]
            texts[role][name] = (root / name).read_bytes()
    digest = hashlib.sha256()
    arrays: dict[str, np.ndarray] = {}
    for role, files in texts.items():
        for name in sorted(files):
            digest.update(f"{role} {name} {len(files[name])}\n".encode())
            digest.update(files[name])
        arrays[role] = np.frombuffer(_SEPARATOR.join(files[name] for name in sorted(files)), np.uint8)
    if arrays["train"].size < 16384 or arrays["val"].size < 1024:
        raise CorpusError(
            f"{root} has too little Python text: {arrays['train'].size} bytes to train on, {arrays['val'].size} to validate on"
        )
    return Corpus(
        train=arrays["train"],
        val=arrays["val"],
        train_files=tuple(sorted(texts["train"])),
        val_files=tuple(sorted(texts["val"])),
        fingerprint=digest.hexdigest(),
    )


def _python_files(root: Path, exclude: tuple[str, ...]) -> dict[str, int]:
    """Relative names with forward slashes -> bytes. `exclude` has patterns for a folder's or a file's own name."""

    def excluded(name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude)

    found: dict[str, int] = {}
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not excluded(name)]
        relative = Path(folder).relative_to(root)
        for name in files:
            if name.endswith(".py") and not excluded(name):
                found[(relative / name).as_posix()] = os.stat(os.path.join(folder, name)).st_size
    return found


def zlib_bits_per_byte(text: np.ndarray) -> float:
    """What `zlib` at its best level needs for this text, uint8 [bytes]."""
    return 8 * len(zlib.compress(text.tobytes(), 9)) / text.size


def entropy_bits_per_byte(text: np.ndarray) -> float:
    """Order-0 entropy of this text's own bytes: what a model needs that knows only how frequent each byte is."""
    counts = collections.Counter(text.tobytes())
    return -sum(n / text.size * math.log2(n / text.size) for n in counts.values())
