"""From `save` to the arena: the machine that decides, the word that tells, and the copies that wait for their slot.

`save` runs on the training thread: it decides, has the runtime keep the bytes, and returns. A background turn carries them into slots.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

from raystate.arrays.items import PackedItems
from raystate.arrays.tree import Described, Plan, describe
from raystate.arrays.ways import Ways
from raystate.core.formats.messages import RestoreSettled, SnapshotId
from raystate.core.trainer.machine import Trainer
from raystate.core.trainer.save_decision import SaveDecision
from raystate.manager.checking import SaveCheck
from raystate.manager.pace import AgreedStep, StoragePace, not_copied, wait_for, wait_for_copies
from raystate.manager.room import Room, SlotNeed
from raystate.manager.session import Session
from raystate.manager.skipped import SkippedStep
from raystate.manager.staging import Job, KeptArguments, LatePromise, SaveArguments, StepCopy, keep
from raystate.orbax.save_policies import due_by_step
from raystate.restored import STATE
from raystate.waits import MOMENT_S, QUICK_ANSWER_S

logger = logging.getLogger("raystate")

REMEMBERED_ERRORS = 8


class Pipeline:
    """One trainer's. `save`, `flush` and the like are for one thread at a time; the background turn is another.

    Args:
        session: the trainer's connection; joined.
    """

    def __init__(self, session: Session):
        config = session.config
        self._session = session
        self.check = SaveCheck(config.check_saves, session.rank)
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self.machine = Trainer(
            session.rank,
            session.world,
            session.joined.lineage,
            snapshot_every=config.snapshot_every_steps,
            save_every_steps=config.save_every_steps,
            policy=due_by_step(config.save_policy),
            slots=config.snapshot_slots,
            stored_step=session.joined.newest_step,
        )
        self._ways = Ways()
        self._plan: Plan | None = None  # of the last description; the description itself would keep a second state on the devices
        self._jobs: deque[Job] = deque()
        self._running: Job | None = None
        self._skipped = SkippedStep()
        self._pauses: set[object] = set()  # of those that want that nothing begins
        self._pace = StoragePace(session)
        self._agreed = AgreedStep(session)
        self._compared = ""  # the lineage whose first snapshot says what this rank holds for itself
        self._room = Room(session, self.machine, self.lock, self._ways)
        self._end: Callable[[], None] | None = session.link.spawn(self.turn, self._changed, "raystate-stager")

    # ------------------------------------------------------------ save

    def describe(self, state: Any, items: PackedItems) -> Described:
        """What the state looks like. Raises for leaves that can't be kept; nothing else happens."""
        return describe(
            {STATE: state, **items.trees},
            process_index=self._session.rank,
            previous=self._plan,
            options=self._session.config.write_options,
        )

    def pass_by(self, step: int, lineage: str) -> None:
        """A save that began in this lineage has kept nothing."""
        self._session.refuse_overtaken(lineage)
        self.machine.pass_by(step)
        self._skipped.forget()

    @property
    def data_bytes(self) -> int:
        """How much of the newest step this process has."""
        return self._plan.layout.data_bytes if self._plan is not None else 0

    def save(
        self, given: SaveArguments, *, force: bool = False, decided: Callable[[SaveDecision], None] = lambda _: None
    ) -> SaveDecision:
        """Decide about a step, and keep its bytes if the decision says so. A save that raises leaves no trace; one that is interrupted
        leaves none either, or has done all that it does.

        Args:
            decided: called with what was decided, twice after an interruption.

        Raises:
            CapacityError: the state has grown beyond what fits; the slots before stay.
            ReferenceMismatchError: see `SaveCheck.look`. StepOrderError, and what the HostActor's word says has failed.
        """
        lineage = self._session.lineage
        self._session.refuse_overtaken(lineage)
        described = None
        if self.machine.capture_of(given.step, self._session.words.host_word()) is None:
            described = self.describe(given.state, given.items)
            self.check.look(described, given)
            self._move(self._room.need(described, given, known=described.plan is self._plan))
        elif force:
            self._room.check_later(given)
        self._wait_for_turn(given.step, force)
        while True:
            with self.lock:
                self._session.refuse_overtaken(lineage)
                decision = self._decide(given, described, force, decided)
            if not decision.wait:
                self.check.saved(given.step)
                return decision
            # At an agreed step: wait until all ranks have acknowledged it, or it is withdrawn.
            self._agreed.wait_or_raise(given.step)

    def _decide(
        self, given: SaveArguments, described: Described | None, force: bool, decided: Callable[[SaveDecision], None]
    ) -> SaveDecision:
        with self.lock:
            memento = self.machine.memento()
            busy = any(job is not None and job.fills for job in (self._running, *self._jobs))
            decision, job, is_kept = None, None, False
            try:
                word = self._session.words.host_word()
                decision = self.machine.on_save(given.step, force=force, host_word=word, stager_busy=busy)
                if decision.action in ("stage", "hold"):
                    described = described or self.describe(given.state, given.items)
                    self._ways.spread(0.0 if decision.promised else self.machine.copy_spread_s(word))
                    job = keep(given, described, self._ways, self._session, decision.slot, promised=decision.promised)
                    self.machine.times.snapshotted()
                elif decision.action == "promise":
                    job = LatePromise(SnapshotId(self.machine.lineage, given.step), decision.slot, given.metrics, given.custom)
                is_kept = True
                self._act(decision, described, job, decided)
                return decision
            except BaseException:
                if decision is not None and is_kept:
                    self._act(decision, described, job, decided)
                else:
                    self.machine.put_back(memento)
                raise

    def _act(
        self, decision: SaveDecision, described: Described | None, job: Job | None, decided: Callable[[SaveDecision], None]
    ) -> None:
        """From here on the step is saved. May be done twice."""
        self._plan = self._plan if described is None else described.plan
        if job is not None and job not in self._jobs:
            self._jobs.append(job)
            self._changed.notify_all()
        if decision.dropped is not None:
            self._drop(decision.dropped)
        if self.machine.slots.late is None:
            self._skipped.forget()
        if not decision.wait:
            self._agreed.over()
            decided(decision)
        if decision.action != "none":
            self._session.spent.reached(decision.word.newest_step)
        self._session.write_word(decision.word)

    def keep_skipped(self, given: KeptArguments) -> None:
        """save() found no slot for this step, the newest: one may come while the training thread does something else."""
        with self.lock:
            if self.machine.slots.late == given.step:
                self._skipped.keep(given, self._session.link.clock())

    def _catch_up(self) -> bool:
        """Whether the step that was skipped is kept now."""
        given = self._skipped.due(self.machine.slots.late, self._session.link.clock())
        if given is None or (taken := self.machine.take_slot(self._session.words.host_word())) is None:
            return False
        self._skipped.forget()
        try:
            described = self.describe(given.state, given.items)
            self._jobs.append(keep(given, described, self._ways, self._session, taken[0], promised=False))
            self.machine.times.snapshotted()
        except Exception:  # it was donated before a slot came
            self.machine.released(taken[0])
            self._session.write_word(self.machine.word())
        return True

    def _wait_for_turn(self, step: int, force: bool) -> None:
        """A loop that runs ahead of its devices waits for its own computation, and then at storage's pace; see `Trainer.must_wait`."""

        def has_turn() -> bool:
            return not self.machine.must_wait(step, force=force, host_word=self._session.words.host_word())

        if not self.wait_until(has_turn, 0.0):
            self.wait_until(lambda: self._running is None or self._session.fails, self._session.config.save_timeout_s)
            self._pace.wait_for_slot(lambda limit_s: self.wait_until(has_turn, limit_s))

    def _drop(self, snapshot: SnapshotId) -> None:
        """A newer promised one takes the place of one that still waits for a slot."""
        for job in [job for job in self._jobs if job.snapshot == snapshot and job.slot is None]:
            job.release()
            self._jobs.remove(job)

    def _break_promise(self, job: Job, why: str) -> None:
        job.release()
        if job.promised:
            self.machine.promises.broke(job.snapshot, why)

    def reached(self, step: int) -> bool:
        """Whether all ranks stop at this step. Waits while that is undecided."""
        while True:
            with self.lock:
                memento = self.machine.memento()
                try:
                    stops, wait = self.machine.reached(step, self._session.words.host_word())
                except BaseException:
                    self.machine.put_back(memento)
                    raise
                self._session.write_word(self.machine.word())
                if not wait:
                    self._agreed.over()
                    return stops
            self._agreed.wait_or_raise(step)

    # ------------------------------------------------------------ slots

    def prepare(self, state: Any, items: PackedItems) -> None:
        """Slots before the first step, so that the loop never waits for them."""
        described = self.describe(state, items)
        nothing = SaveArguments(step=0, state=None, items=items, metrics={}, custom=None)
        self._move(self._room.need(described, nothing, known=False))
        self._plan = described.plan
        self._ways.foresee(described)

    def _move(self, need: SlotNeed | None) -> None:
        if need is not None:
            with self.paused():
                self._room.take(need)
            self.wait_until(self._session.words.is_granted, QUICK_ANSWER_S)

    # ------------------------------------------------------------ the background turn

    def turn(self) -> bool:
        """Carry the next step into its slot; False if there is none, or no slot for it."""
        self._ways.prepare(carried := self._carry())
        return carried

    def _carry(self) -> bool:
        with self.lock:
            if self._pauses or not self._jobs:
                return not self._pauses and self._catch_up()
            job = self._jobs[0]
            if isinstance(job, StepCopy) and job.slot is None and not self._find_slot(job):
                return False
            self._jobs.popleft()
            self._running = job
        error: Exception | None = None
        try:
            # What this rank holds for itself is compared at the first snapshot of a line; before a commit the package's builder does it.
            job.put(self._session, compared=self._session.world > 1 and job.snapshot.lineage != self._compared)
            self._compared = job.snapshot.lineage
        except Exception as caught:
            error = caught
        slot, step = job.slot, job.snapshot.step
        assert slot is not None
        with self.lock:
            if error is not None:
                logger.warning("step %d was not %s: %s", step, "snapshotted" if job.fills else "promised", error)
                self._break_promise(job, str(error))
            if job.fills:
                self.machine.staged(slot, step) if error is None else self.machine.released(slot)
            job.release()
            self._running = None
            self._session.write_word(self.machine.word())
            self._changed.notify_all()
        return True

    def _find_slot(self, job: StepCopy) -> bool:
        taken = self.machine.take_slot(self._session.words.host_word())
        if taken is not None:
            job.slot = taken[0]
        elif self._session.link.clock() > job.give_up_s:
            self._jobs.popleft()
            self.machine.give_up_held()
            self._break_promise(
                job, f"no slot became free within {self._session.config.save_timeout_s:.0f} s (earlier saves still hold them)"
            )
            self._session.write_word(self.machine.word())
            self._changed.notify_all()
        return taken is not None

    # ------------------------------------------------------------ waiting

    def wait_until(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Whether it is, within that time."""
        if timeout_s:
            self._ways.hurry()
        return wait_for(self._session.link, self._changed, done, timeout_s)

    def drain(self) -> None:
        """Return when everything that was kept is staged, or is known to be lost. Raises BarrierTimeoutError."""
        self._session.link.check()
        self._session.refuse_unfinished_restore()
        self._move(self._room.again())
        # By then a copy without a slot has given up, and its step is named as lost.
        self._await_copies(lambda: self._running is None and not self._jobs, self._session.config.save_timeout_s + MOMENT_S)

    @contextmanager
    def paused(self) -> Generator[None, None, None]:
        """Finish the copies that have a slot, and begin no other. Raises BarrierTimeoutError."""
        mine = object()

        def pause() -> bool:
            if self._is_idle():
                self._pauses.add(mine)
            return mine in self._pauses

        try:
            self._await_copies(pause, self._session.config.save_timeout_s)
            yield
        finally:
            with self._changed:
                self._pauses.discard(mine)
                self._changed.notify_all()

    def _await_copies(self, done: Callable[[], bool], timeout_s: float) -> None:
        self._ways.hurry()
        if not wait_for_copies(self._session, self._changed, done, timeout_s):
            with self.lock:
                steps = [job.snapshot.step for job in (self._running, *self._jobs) if job is not None]
            raise not_copied(self._session.rank, steps, timeout_s)

    def _is_idle(self) -> bool:
        return self._running is None and all(job.slot is None for job in self._jobs)

    # ------------------------------------------------------------ promises

    @property
    def errors(self) -> tuple[str, ...]:
        """Promises that were broken on this rank and not told yet."""
        with self.lock:
            return tuple(f"step {key.step}: {why}" for key, why in self.machine.promises.broken[-REMEMBERED_ERRORS:])

    def promises(self) -> tuple[tuple[SnapshotId, ...], dict[SnapshotId, str]]:
        """(promises whose fate others know, broken ones and why)."""
        with self.lock:
            return self.machine.promises.unbroken, dict(self.machine.promises.broken)

    def told(self, promised: tuple[SnapshotId, ...], lost: Mapping[SnapshotId, str]) -> None:
        """The user has been told what became of these."""
        with self.lock:
            self.machine.promises.told((*promised, *lost))

    # ------------------------------------------------------------ from one lineage to the next, and the end

    def begin(self, lineage: str, origin: SnapshotId | None) -> None:
        """A restore begins a new lineage: give up waiting steps. RaystateError: the run is left."""
        with self.lock:
            self._session.refuse_left("restore()")
            for job in self._jobs:
                if job.fills and job.slot is not None:
                    self.machine.released(job.slot)
                job.release()
            self._jobs.clear()
            self._skipped.forget()
            self.machine.begin(lineage, origin)
            self._session.begin(lineage)
            self._session.write_word(self.machine.word())
            self._changed.notify_all()

    def settled(self, reply: RestoreSettled) -> None:
        """How a restore ended."""
        with self.lock:
            self.machine.settled(ahead=reply.ahead, safe=reply.safe, saving=reply.saving, stored=reply.durable_step >= 0)
            self._session.write_word(self.machine.word())

    def speak(self) -> None:
        """Write the machine's word."""
        with self.lock:
            self._session.write_word(self.machine.word())

    def close(self) -> None:
        """End the background turn: finish copies that have a slot; give up steps without one."""
        self.wait_until(lambda: self._is_idle() or self._session.fails, self._session.config.save_timeout_s)
        with self.lock:
            self._pauses.add(self)
            self._skipped.forget()
        if self._end is not None:
            self._end()
            self._end = None
        with self.lock:
            for job in self._jobs:
                self._break_promise(job, "the training ended before a slot became free for it")
            self._jobs.clear()
            self._ways.release()  # a closed manager that is kept keeps no copies of the state
