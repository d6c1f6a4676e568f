"""Two clusters that want the same run, again and again: each starts a process, which trains until another one has claimed."""

from __future__ import annotations

import os
import random
import secrets
from dataclasses import dataclass

from raystate.core.formats.errors import RaystateError, StaleAttemptError, StorageError
from raystate.storage import RunLog, Storage, assume_dead
from raystate.storage.base import TEMPORARY_PREFIX
from raystate.storage.directory import DirectoryStorage
from raystate.storage.names import LOG, MARKER
from tests.sim.storage import Violation
from tests.storage.harness import Process
from tests.storage.mortal import Mortal
from tests.storage.schedule import Actor, Scheduled, Scheduler
from tests.storage.truth import Truth

EVERY = 10  # steps between saves
_CHANGES = ("rename_tree", "delete", "delete_all", "delete_tree")


@dataclass(slots=True, kw_only=True)
class Life:
    """A process of a cluster. `ending`: "superseded", "died", "failed" (it could not even begin), or "went on"."""

    process: Process
    actor: Actor
    ending: str = ""

    @property
    def over(self) -> bool:
        """Nothing of it can do anything any more."""
        return bool(self.ending) and not self.actor.active


class Race:
    """One seeded race.

    Args:
        storage: empty.
        seed: of all that happens.
        saves: durable saves after which nobody starts anew, and who is still there tries to go on.
        deadly: how likely a process dies before an operation.
        lossy: how likely an operation fails, and how likely only its answer is lost.
        blind: the storage doesn't keep its promises, and nobody asks.
    """

    def __init__(
        self, storage: Storage, seed: int, *, saves: int, deadly: float = 0.0005, lossy: float = 0.0005, blind: bool = False
    ):
        self.storage = storage
        self.truth = Truth(storage)
        self.scheduler = Scheduler(seed, deadly=deadly, lossy=lossy)
        self.random = random.Random(f"race {seed}")
        self.saves = saves
        self.blind = blind
        self.durable = 0
        self.lives: list[Life] = []
        self.ready = 0  # processes that have heard that it is over
        self.known_dead: set[int] = set()
        self.operations = 0

    def run(self) -> None:
        """Raises Violation."""
        for cluster in ("east", "west"):
            self._start(cluster)
        self.scheduler.run()
        self._judge()
        self._afterwards()

    @property
    def endings(self) -> dict[str, int]:
        """How many processes ended how."""
        return {ending: sum(life.ending == ending for life in self.lives) for ending in ("superseded", "died", "failed", "went on")}

    # ---------------------------------------------------------------- lives

    def _start(self, cluster: str) -> None:
        actor = Actor(self.scheduler, f"{cluster}{len(self.lives)}")
        storage = Scheduled(self.storage, actor, self._changed, trusting=self.blind)
        process = Process(storage, name=actor.name, witness=self.truth, tasks=actor)
        life = Life(process=process, actor=actor)
        self.lives.append(life)
        self.scheduler.spawn(actor, lambda: self._live(life, cluster))

    def _live(self, life: Life, cluster: str) -> None:
        life_ended = "died"
        try:
            self._train(life.process)
            self._last_word(life)
            life_ended = "went on"
        except StaleAttemptError:
            life_ended = "superseded"
        except StorageError:
            life_ended = "failed"
        finally:
            life.ending = life_ended
            if self.durable < self.saves and self.scheduler.failure is None:
                self._start(cluster)
                # The other one has the run to itself for a while, or not.
                self.scheduler.sleep(self.lives[-1].actor, self.random.choice((0, 30, 300, 3000)))

    def _train(self, process: Process) -> None:
        process.claim()
        process.join()
        step = self._restore(process)
        while self.durable < self.saves:
            step += EVERY
            if process.save(step):
                self.durable += 1
            if self.random.random() < 0.05:
                self._delete(process)
            if self.random.random() < 0.3:
                self._look_for_dead()
                process.look_for_dead()

    def _look_for_dead(self) -> None:
        """Somebody may have seen to it that the processes of older attempts are gone, and says so."""
        tail = RunLog(self.storage).tail()
        for life in self.lives:
            attempt = life.process.machine.attempt
            if tail is not None and life.over and 0 < attempt < tail.attempt and attempt not in self.known_dead:
                self.known_dead.add(attempt)
                assume_dead(self.storage, attempt)

    def _restore(self, process: Process) -> int:
        chance, published = self.random.random(), process.machine.journal.published
        try:
            if chance < 0.1 and published:
                return process.restore(damaged=published[-1:])
            if chance < 0.2 and published:
                return process.restore(step=published[0], rollback=True)
        except StaleAttemptError:
            raise
        except RaystateError:
            pass  # what it wants to retire is held: somebody may be late with it
        return process.restore()

    def _delete(self, process: Process) -> None:
        try:
            process.delete(min(process.machine.journal.published, default=0))
        except StaleAttemptError:
            raise
        except RaystateError:
            pass  # held, or the newest

    def _last_word(self, life: Life) -> None:
        """When all who live have come so far, each tries to go on."""
        self.ready += 1
        self.scheduler.deadly = self.scheduler.lossy = 0.0
        self.scheduler.pause(lambda: self.ready >= sum(not one.ending for one in self.lives))
        self.ready -= 1
        process = life.process
        step = max(process.machine.journal.live, default=0) + EVERY
        while not process.save(step):
            step += EVERY
        process.settle()

    # ---------------------------------------------------------------- what is true

    def _changed(self, operation: str, name: str) -> None:
        self.operations += 1
        marker = operation == "create" and name.count("/") == 1 and name.endswith(f"/{MARKER}")
        entry = operation == "create" and name.startswith(LOG)
        if marker or (operation in _CHANGES and self.random.random() < 0.5) or (entry and self.random.random() < 0.3):
            self.truth.check()

    def _judge(self) -> None:
        self.truth.check()
        tail = self.truth.tail
        assert tail is not None
        if self.endings["went on"] != 1:
            raise Violation(f"exactly one goes on: {self.endings}")
        for life in self.lives:
            newest = life.process.machine.attempt == tail.attempt
            if life.ending == "went on" and not newest:
                raise Violation(f"one writer: {life.process.name} goes on beside attempt {tail.attempt}")
            if life.ending == "superseded" and newest:
                raise Violation(f"{life.process.name} has the newest attempt and was told that it is superseded")

    def _afterwards(self) -> None:
        """All are dead, and it is known: the next one finds everything in order and cleans up."""
        tail = self.truth.tail
        for attempt in range(1, tail.attempt if tail is not None else 1):
            assume_dead(self.storage, attempt)
        process = Process(Mortal(self.storage), name="last", witness=self.truth, is_dead=lambda writer: True)
        process.claim()
        process.join()
        step = process.restore()
        process.settle()
        if not process.save(step + EVERY):
            raise Violation(f"step {step + EVERY} can't be saved afterwards: {process.machine.journal.troubles}")
        process.settle()
        self.truth.check_clean()


class Overwriting(DirectoryStorage):
    """A directory on a mount without create-once: the last one wins."""

    def create(self, name: str, data: bytes) -> None:
        path = self.local_path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f"{TEMPORARY_PREFIX}{secrets.token_hex(4)}"
        temporary.write_bytes(data)
        os.replace(temporary, path)
