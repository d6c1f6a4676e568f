"""Damage of every kind to one object of a run: drawn by a seed, done to a copy, and taken back."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SEEDS = 2000 if os.environ.get("RAYSTATE_ALL") else 300
# Other seeds in every run. What a seed damages is said where it matters, for names and sizes of objects differ from run to run.
FIRST = int(os.environ["RAYSTATE_SEED"]) * 10_000

Kind = Literal["flip", "truncate", "delete", "zeros", "append", "swap", "delete folder"]

KINDS: dict[Kind, int] = {"flip": 10, "truncate": 4, "delete": 3, "zeros": 2, "append": 2, "swap": 2, "delete folder": 1}  # weights


ONE_OBJECT: tuple[Kind, ...] = ("flip", "truncate", "delete", "zeros", "append", "swap")


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One damage. `name` is relative to the storage; of kind "delete folder" a folder's."""

    seed: int
    kind: Kind
    name: str
    data: bytes | None = None  # what lies there instead; None: nothing
    other: tuple[str, bytes] | None = None  # of kind "swap": the second object and what lies there instead
    detail: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The objects and folders that are not as they were."""
        return (self.name,) if self.other is None else (self.name, self.other[0])

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.kind} {' and '.join(self.names)} {self.detail}".rstrip()


def is_data(name: str) -> bool:
    """Whether an object holds array bytes, or the nodes and manifests that say where they are, under a writer's unique name."""
    return "/d/" in name or "/ocdbt.process_" in name


class Copy:
    """A copy of a run by hard links, to be damaged. What is damaged becomes another file, so that the original stays as it is."""

    def __init__(self, original: Path, root: Path):
        self.root = root
        self._original = original
        shutil.copytree(original, root, copy_function=os.link)
        self.names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
        self._folders = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_dir())
        self._bytes = {name: (root / name).read_bytes() for name in self.names}

    def draw(self, seed: int, *, kinds: Sequence[Kind] = (*KINDS,), among: Sequence[str] = ()) -> Damage:
        """Each object is as likely as any other, so that small ones get their share. Two data objects never change places.

        Args:
            seed: decides everything.
            kinds: of which kinds.
            among: of which objects; none: of all.
        """
        drawn = random.Random(seed)
        while True:
            kind = drawn.choices(kinds, [KINDS[kind] for kind in kinds])[0]
            if kind == "delete folder":
                return Damage(seed=seed, kind=kind, name=drawn.choice(self._folders))
            damage = self._of_object(drawn, seed, kind, drawn.choice(among or self.names))
            if damage is not None:
                return damage

    def _of_object(self, drawn: random.Random, seed: int, kind: Kind, name: str) -> Damage | None:
        """None if this kind would leave the object as it is."""
        data = bytearray(self._bytes[name])
        if kind == "delete":
            return Damage(seed=seed, kind=kind, name=name)
        if kind == "append":
            more = drawn.choice([b"\0", drawn.randbytes(drawn.randint(1, 64)), bytes(data)])
            return Damage(seed=seed, kind=kind, name=name, data=bytes(data) + more, detail=f"+ {more[:20]!r}")
        if kind == "swap":
            equal = [other for other in self.exchangeable(name) if not (is_data(name) and is_data(other))]
            return self.exchange(name, drawn.choice(equal), seed=seed) if equal else None
        at = drawn.randrange(len(data))
        if kind == "truncate":
            at = drawn.choice([at, 0, len(data) - 1])
            return Damage(seed=seed, kind=kind, name=name, data=bytes(data[:at]), detail=f"to {at} of {len(data)}")
        if kind == "zeros":  # a page, or a block, that was never written
            end = min(len(data), drawn.choice([at + 1, at + 16, at + 512, len(data)]))
            if not any(data[at:end]):
                return None
            data[at:end] = bytes(end - at)
            return Damage(seed=seed, kind=kind, name=name, data=bytes(data), detail=f"from {at} to {end}")
        bit = drawn.randrange(8)
        data[at] ^= 1 << bit
        return Damage(seed=seed, kind=kind, name=name, data=bytes(data), detail=f"bit {bit} of byte {at}")

    def exchangeable(self, name: str) -> list[str]:
        """Objects of the same size and with other bytes."""
        mine = self._bytes[name]
        return [other for other, data in self._bytes.items() if len(data) == len(mine) and data != mine]

    def exchange(self, name: str, other: str, *, seed: int = 0) -> Damage:
        """Two objects change places."""
        return Damage(seed=seed, kind="swap", name=name, data=self._bytes[other], other=(other, self._bytes[name]))

    @contextlib.contextmanager
    def damaged(self, damage: Damage) -> Iterator[Path]:
        """The copy's root while it is damaged."""
        done = {damage.name: damage.data, **dict([damage.other] if damage.other else [])}
        try:
            for name, data in done.items():
                path = self.root / name
                if damage.kind == "delete folder":
                    shutil.rmtree(path)
                    continue
                path.unlink()
                if data is not None:
                    path.write_bytes(data)
            yield self.root
        finally:
            for name in done:
                path = self.root / name
                if damage.kind == "delete folder":
                    shutil.copytree(self._original / name, path, copy_function=os.link)
                else:
                    path.unlink(missing_ok=True)
                    os.link(self._original / name, path)
