"""A run's compiled programs in its storage, for other nodes and other clusters.

Below `.raystate/compiled` there is a folder for each kind of host, by its CPU and its JAX: no key of JAX's covers what the CPU can do.
In it lie

    <program>.<seal>                               a program, as on a node; its name has the digest of its bytes
    used/<start>.<world>.<rank>.<random>.json      which programs a rank has used, and in which start each was used last

The seal makes a program whole or damaged, wherever it was copied. The lists are no more than advice: what is fetched ahead, and what
goes first where there is too much. Starts are counted, since clocks of two hosts don't agree.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import secrets
import threading
from collections.abc import Collection, Sequence
from typing import Any, cast

from raystate.compilation.store import ProgramStore, seal_of
from raystate.core.formats.errors import StorageError
from raystate.storage.base import Listing, ObjectExistsError, ObjectInfo, ObjectMissingError, Storage
from raystate.storage.names import COMPILED, log_name

logger = logging.getLogger("raystate")

_PROGRAM = re.compile(rf"{re.escape(COMPILED)}/([^/]+)/([0-9a-f]{{64}})\.([0-9a-f]{{32}})")
_LIST = re.compile(rf"{re.escape(COMPILED)}/([^/]+)/used/(\d{{8}})\.(\d+)\.(\d+)\.[0-9a-f]{{8}}\.json")


class Shelf:
    """The programs of one run, as one rank of it sees them.

    Args:
        storage: of the run.
        cap_bytes: the least recently used programs go when all together are larger.
        host: what hosts have to have in common; part of a name.
        rank, world: of this process.
    """

    def __init__(self, storage: Storage, cap_bytes: int, *, host: str, rank: int, world: int):
        self.storage = storage
        self._cap_bytes = cap_bytes
        self._folder = f"{COMPILED}/{host}"
        self._host, self._rank, self._world = host, rank, world
        self._there: dict[str, ObjectInfo] = {}  # what storage has, by program
        self._removed: set[str] = set()  # objects that a list may show once more
        self._lock = threading.Lock()  # of both: fetching and offering go at once
        self._start = 0  # of this process; 0: not known yet
        self._used_before: dict[str, int] = {}
        self._own_lists: list[str] = []

    def begin(self) -> Sequence[str]:
        """Learn what is there. Returns the programs that this rank used last, the newest first; without a list of its own another rank's.

        Raises:
            StorageError: storage failed.
        """
        found = self._look()
        lists = [(one, info.name) for info in found if (one := _LIST.fullmatch(info.name))]
        self._start = 1 + max((int(one[2]) for one, _ in lists), default=0)
        near = sorted(
            (int(one[4]) == self._rank, int(one[2]), name)
            for one, name in lists
            if one[1] == self._host and int(one[3]) == self._world
        )
        self._own_lists = [name for is_own, _, name in near if is_own]
        used = self._read_list(near[-1][2]) if near else {}
        if self._own_lists:
            self._used_before = used
        return sorted((name for name in used if name in self._there), key=lambda name: (-used[name], name))

    def __contains__(self, name: str) -> bool:
        return name in self._there

    def fetch(self, name: str) -> bytes | None:
        """A program's file, whole; None: it is gone, or was damaged and is removed.

        Raises:
            StorageError: storage failed.
        """
        info = self._there.get(name)
        if info is None:
            return None
        try:
            held = self.storage.read(info.name)
        except ObjectMissingError:
            with self._lock:
                self._there.pop(name, None)
            return None
        if seal_of(name, held) == info.name.rpartition(".")[2]:
            return held
        logger.warning("a compiled program in %s is damaged: it is removed, and compiled again", self.storage.url)
        self._remove(name)
        return None

    def offer(self, used: Sequence[str], local: ProgramStore, *, anew: Collection[str] = ()) -> None:
        """Have there what this process has used.

        Args:
            used: programs, the least recently used first.
            local: has them.
            anew: those that were compiled although they were there, because JAX could not load them.

        Raises:
            StorageError: storage failed.
        """
        if not self.storage.exists(log_name(1)):  # the run was removed
            return
        if not self._start:
            self.begin()
        for name in anew:
            self._remove(name)
        has_news = any(name not in self._there for name in used)
        if has_news:
            self._look()  # another rank may have put them there
        with self._lock:  # a thread that fetches may find one gone or damaged
            room = self._cap_bytes - sum(self._there[name].size for name in used if name in self._there)
        for name in reversed(used):
            if name in self._there or (held := local.read(name)) is None or len(held) > room:
                continue
            place = f"{self._folder}/{name}.{seal_of(name, held)}"
            with contextlib.suppress(ObjectExistsError):
                self.storage.create(place, held)
            room -= len(held)
            with self._lock:
                self._removed.discard(place)
                self._there[name] = ObjectInfo(name=place, size=len(held))
        self._tell_used(used)
        if has_news:
            self.trim()

    def trim(self) -> None:
        """Remove what is too much. Other processes may do the same at once.

        Raises:
            StorageError: storage failed.
        """
        found = self.storage.list(COMPILED)
        programs = [(one, info) for info in found if (one := _PROGRAM.fullmatch(info.name))]
        excess = sum(info.size for _, info in programs) - self._cap_bytes
        if excess <= 0:
            return
        last: dict[tuple[str, str], int] = {}
        for info in found:
            if one := _LIST.fullmatch(info.name):
                for name, start in self._read_list(info.name).items():
                    last[one[1], name] = max(start, last.get((one[1], name), 0))
        for one, info in sorted(programs, key=lambda program: (last.get((program[0][1], program[0][2]), 0), program[1].name)):
            if excess <= 0:
                return
            self.storage.delete(info.name)
            excess -= info.size
            if one[1] == self._host:
                self._there.pop(one[2], None)

    def _look(self) -> Listing:
        found = self.storage.list(COMPILED)
        programs = [(one[2], info) for info in found if (one := _PROGRAM.fullmatch(info.name)) and one[1] == self._host]
        with self._lock:
            self._there = {name: info for name, info in programs if info.name not in self._removed}
        return found

    def _remove(self, name: str) -> None:
        with self._lock:
            info = self._there.pop(name, None)
            self._removed.update([] if info is None else [info.name])
        if info is not None:
            with contextlib.suppress(StorageError):  # it is damaged, or of no use, the next time, too
                self.storage.delete(info.name, info.generation or None)

    def _tell_used(self, used: Sequence[str]) -> None:
        """For the next start: one list in the place of those before."""
        starts = {**self._used_before, **dict.fromkeys(used, self._start)}
        data = json.dumps({name: start for name, start in sorted(starts.items()) if name in self._there})
        name = f"{self._folder}/used/{self._start:08d}.{self._world}.{self._rank}.{secrets.token_hex(4)}.json"
        self.storage.create(name, data.encode())
        older, self._own_lists = self._own_lists, [name]
        for one in older:
            self.storage.delete(one)

    def _read_list(self, name: str) -> dict[str, int]:
        """Empty if it is gone or damaged: then programs are fetched when they are asked for."""
        try:
            raw: Any = json.loads(self.storage.read(name))
            listed = cast(dict[str, Any], raw) if isinstance(raw, dict) else {}
            return {name: start for name, start in listed.items() if type(start) is int}
        except (ObjectMissingError, ValueError, RecursionError):
            return {}
