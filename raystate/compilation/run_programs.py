"""The compiled programs of a run: JAX asks for them on the node, and what the node lacks comes from the run's storage.

What is fetched and offered goes by threads of its own. The training waits only where it would compile instead, and not for long.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

from raystate.compilation.shelf import Shelf
from raystate.compilation.store import ProgramStore, program_name
from raystate.core.formats.errors import RaystateError
from raystate.machine.priority import give_way
from raystate.waits import PROGRAMS_GATHERED_S, PROGRAMS_S

logger = logging.getLogger("raystate")

FETCHERS = 8


class RunPrograms:
    """A node's programs, and those of one run in its storage.

    Args:
        local: of the node.
        shelf: of the run.
        gathered_s: for how long new programs are gathered before they go to storage.
    """

    def __init__(self, local: ProgramStore, shelf: Shelf, *, gathered_s: float = PROGRAMS_GATHERED_S):
        self.folder = local.folder
        self._local = local
        self._shelf = shelf
        self._gathered_s = gathered_s
        self._lock = threading.Lock()
        self._is_known = threading.Event()  # what storage has
        self._fetched: dict[str, threading.Event] = {}  # or being fetched
        self._has_given_up = False  # nothing is waited for any more
        self._used: dict[str, None] = {}  # the least recently used first
        self._anew: set[str] = set()
        self._has_news = self._is_offering = self._told = False

    def begin(self) -> None:
        """Fetch what this rank used last time, as far as the node lacks it."""
        threading.Thread(target=self._bring, name="raystate-programs", daemon=True).start()

    def get(self, key: str) -> bytes | None:
        """The program; None if neither the node nor storage has it whole."""
        name = program_name(key)
        value = self._local.get(key)
        if value is None and self._comes(name):
            value = self._local.get(key)
        if value is not None:
            self._use(name)
        return value

    def put(self, key: str, value: bytes) -> bool:
        """Keep it; whether the node has it now."""
        name = program_name(key)
        is_anew = self._local.was_given(name)
        kept = self._local.put(key, value)
        if kept:
            self._use(name, is_anew=is_anew)
        return kept

    def trim(self) -> None:
        """Of the node."""
        self._local.trim()

    # ------------------------------------------------------------ from storage

    def _bring(self) -> None:
        wanted: list[str] = []
        try:
            wanted = [name for name in self._shelf.begin() if not self._local.has(name)]
        except RaystateError as error:
            self._tell(error)
        finally:
            self._is_known.set()
        left = iter(wanted)
        for _ in range(min(FETCHERS, len(wanted))):
            threading.Thread(target=self._bring_all, args=(left,), name="raystate-programs", daemon=True).start()

    def _bring_all(self, left: Iterator[str]) -> None:
        while True:
            with self._lock:
                name = next(left, None)
            if name is None:
                return
            done, is_mine = self._claim(name)
            if is_mine:
                self._fetch(name, done)

    def _claim(self, name: str) -> tuple[threading.Event, bool]:
        """(set when the program was fetched; whether the caller has to do that)."""
        with self._lock:
            is_mine = name not in self._fetched
            return self._fetched.setdefault(name, threading.Event()), is_mine

    def _fetch(self, name: str, done: threading.Event) -> None:
        try:
            if (held := self._shelf.fetch(name)) is not None:
                self._local.add(name, held)
        except RaystateError as error:
            self._tell(error)
        finally:
            done.set()

    def _comes(self, name: str) -> bool:
        """Wait for a program that the node lacks; whether it may be there now."""
        if not self._waits(self._is_known):
            return False
        # One that is being fetched may turn out to be damaged: it is gone only when that has ended.
        if name not in self._fetched and name not in self._shelf:
            return False
        done, is_mine = self._claim(name)
        if is_mine:  # on a thread: storage that hangs must not hang the training
            threading.Thread(target=self._fetch, args=(name, done), name="raystate-programs", daemon=True).start()
        return self._waits(done)

    def _waits(self, event: threading.Event) -> bool:
        if not self._has_given_up and not event.wait(PROGRAMS_S):
            self._has_given_up = True
            self._tell(f"no answer for {PROGRAMS_S:.0f} s")
        return event.is_set()

    # ------------------------------------------------------------ to storage

    def _use(self, name: str, *, is_anew: bool = False) -> None:
        with self._lock:
            is_news = is_anew or name not in self._used
            self._used.pop(name, None)
            self._used[name] = None
            if is_anew:
                self._anew.add(name)
            if not is_news:
                return
            self._has_news = True
            if self._is_offering:
                return
            self._is_offering = True
        threading.Thread(target=self._offer, name="raystate-programs", daemon=True).start()

    def _offer(self) -> None:
        give_way()
        self._is_known.wait(PROGRAMS_S)
        while True:
            threading.Event().wait(self._gathered_s)
            with self._lock:
                used, anew = list(self._used), self._anew
                self._anew, self._has_news = set(), False
            try:
                self._shelf.offer(used, self._local, anew=anew)
            except Exception as error:  # a thread that ended so would never offer anything again
                self._tell(error)
            with self._lock:
                if not self._has_news:
                    self._is_offering = False
                    return

    def _tell(self, why: Exception | str) -> None:
        if not self._told:
            logger.warning(
                "compiled programs don't go between this node and %s (%s): what a node lacks it compiles",
                self._shelf.storage.url,
                why,
            )
        self._told = True
