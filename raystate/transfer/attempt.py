"""An attempt without a Coordinator: a process that claims a run, and commits and retires through its log as a run does."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence

from raystate.core.formats.entries import LiveStep, LogEntry
from raystate.core.formats.errors import StaleAttemptError, StorageError
from raystate.core.formats.log import IntentKey, claim_entry, key_of, live_steps, next_entry, refuse_retire, refuse_save
from raystate.storage import RunLog, StepFolder, Storage, assumed_dead, foreign_steps
from raystate.storage.foreign import is_run

_APPEND_TRIES = 5
_KINDS = ("import", "rm")  # begin the log's name for such a process, which has ended when somebody reads it


def is_outside(writer: str) -> bool:
    """Whether an entry's writer was such a process: no run lives that wrote it."""
    return writer.startswith(tuple(f"{kind}." for kind in _KINDS))


class OutsideAttempt:
    """It has the run from here on: the attempt that had it ends with StaleAttemptError.

    Args:
        storage: of the run.
        kind: what for, as in the log.
        run: its name for the log; None: the one that it has, else the kind.

    Attributes:
        tail: the newest entry of the log, which is this attempt's.

    Raises:
        StorageError, CorruptCheckpointError, ConfigError: the log can't be read or written.
    """

    def __init__(self, storage: Storage, kind: str, run: str | None = None):
        assert kind in _KINDS
        self._storage = storage
        self._log = RunLog(storage)
        self._writer = f"{kind}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
        self._carried: set[IntentKey] = set()

        def claim(tail: LogEntry | None) -> LogEntry:
            name = run or (tail.run if tail is not None else kind)
            dead = assumed_dead(storage)
            return claim_entry(tail, self._writer, name, foreign_steps(storage, live_steps(tail)), kind, dead=dead)

        if not is_run(storage):
            claim(None)  # first without writing: a refused claim leaves nothing there
        storage.self_test()
        self.tail = self._log.claim(claim)
        self._dead = assumed_dead(storage)

    def finish_earlier(self) -> None:
        """Carry out what earlier attempts have decided, as each claim of a run has to."""
        for intent in self.tail.intents:
            folder = StepFolder(self._storage, intent.step, intent.save)
            if intent.kind == "commit":
                folder.publish(folder.read_package())
            else:
                folder.retire(aside=intent.aside)
            self._carried.add(key_of(intent))

    def refuse_save(self, step: int) -> str | None:
        """See `core.formats.log.refuse_save`."""
        return refuse_save(self.tail, step, attempt=self.tail.attempt, carried=self._carried, dead=self._dead)

    def refuse_retire(self, step: int) -> str | None:
        """See `core.formats.log.refuse_retire`."""
        return refuse_retire(self.tail, step, attempt=self.tail.attempt, carried=self._carried, dead=self._dead)

    def append(self, reason: str, *, commit: LiveStep | None = None, retires: Sequence[tuple[int, bool, str]] = ()) -> None:
        """The next entry; see `core.formats.log.next_entry`.

        Raises:
            StaleAttemptError: somebody else has claimed the run.
            StorageError: it could not be written; it may still appear.
        """
        entry = next_entry(
            self.tail,
            attempt=self.tail.attempt,
            writer=self._writer,
            carried=self._carried,
            dead=self._dead,
            commit=commit,
            retires=retires,
            reason=reason,
        )
        for _ in range(_APPEND_TRIES):
            done = self._log.append(entry)
            if done.outcome == "ok":
                self.tail = entry
                return
            if done.outcome == "taken":
                text = f"{self._storage.url}: somebody else has claimed the run: {done.error}"
                raise StaleAttemptError(text, attempt=entry.attempt)
        url = self._storage.url
        raise StorageError(f"{url}: the log could not be written: {done.error}", operation="append", path=url)

    def carried_out(self, kind: str, step: int) -> None:
        """Note that the decision of this kind about a step is carried out."""
        self._carried.update(key_of(one) for one in self.tail.intents if one.kind == kind and one.step == step)
