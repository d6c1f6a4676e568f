"""A run whose record the tests read: steps are saved, one save fails once, the oldest is retired, the newest set aside and saved again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from raystate.core.formats.errors import StorageError
from raystate.observe.record import Recorder
from raystate.storage import Storage, StorageWrapper, open_storage
from tests.storage.harness import Process

FIRST_S = 1_750_000_000.0  # wall clock


class Silent:
    """A witness that nobody asks."""

    def heard_durable(self, step: int, save: str | None) -> None: ...
    def heard_gone(self, step: int, save: str | None) -> None: ...


class Unwilling(StorageWrapper):
    """Refuses the first object of step 20."""

    refused = False

    def before(self, operation: str, name: str) -> None:
        if not self.refused and operation == "create" and "/20.a1k" in name:
            self.refused = True
            raise StorageError("503: try again", operation=operation, path=name)


@contextmanager
def recorded(storage: Storage, folder: Path, name: str) -> Iterator[Process]:
    """One attempt, whose record is complete at the end."""
    ticks = itertools.count()
    recorder = Recorder(folder, wall_clock=lambda: FIRST_S + process.now_s + next(ticks) / 100)
    process = Process(storage, name=name, witness=Silent(), is_dead=lambda _: True, recorder=recorder)
    yield process
    recorder.close()


def play(place: Path, folder: Path) -> list[Process]:
    """Two attempts at `place`, recorded in `folder`."""
    storage = open_storage(place)
    with recorded(Unwilling(storage), folder, "first") as first:
        first.claim()
        first.join()
        first.restore()
        for step in (10, 20, 30):
            assert first.save(step)
        first.settle()
    with recorded(storage, folder, "second") as second:
        second.claim()
        second.join()
        assert second.restore(damaged={30}) == 20
        assert second.save(30)
        second.settle()
    return [first, second]
