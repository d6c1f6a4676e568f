"""A node's compiled programs and those of its run, without JAX: programs are any bytes."""

from __future__ import annotations

import time
from pathlib import Path

from raystate.compilation import ProgramStore, RunPrograms, Shelf
from raystate.storage import Storage
from tests.patience import PATIENCE_S

HOST = "0123abcd-jax-1"
CAP = 1 << 20


def shelf(storage: Storage, *, cap_bytes: int = CAP, host: str = HOST, rank: int = 0, world: int = 1) -> Shelf:
    return Shelf(storage, cap_bytes, host=host, rank=rank, world=world)


class Node:
    """One process of the run, on a node of its own or on `folder`'s."""

    def __init__(self, storage: Storage, folder: Path, *, cap_bytes: int = CAP, host: str = HOST, rank: int = 0, world: int = 1):
        folder.mkdir(mode=0o700, exist_ok=True)
        self.local = ProgramStore(folder, CAP)
        self.programs = RunPrograms(
            self.local, shelf(storage, cap_bytes=cap_bytes, host=host, rank=rank, world=world), gathered_s=0.0
        )
        self.programs.begin()

    def compiles(self, programs: dict[str, bytes]) -> list[str]:
        """Ask for each; "compile" and keep those that are nowhere. Returns their keys, once storage has all."""
        compiled: list[str] = []
        for key, value in programs.items():
            if (got := self.programs.get(key)) is None:
                compiled.append(key)
                self.programs.put(key, value)
            else:
                assert got == value, f"a wrong program for {key}"
        self.settle()
        return compiled

    def settle(self) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while self.programs._is_offering:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
