"""One sequence of calls, drawn by a seed, played by all ranks, and checked after each call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from raystate.core.formats.errors import (
    BarrierTimeoutError,
    CapacityError,
    ConfigError,
    CorruptCheckpointError,
    RaystateError,
    StaleAttemptError,
    StepNotFoundError,
    StepOrderError,
    StorageError,
)
from raystate.items.counted import Counted
from raystate.manager import StateManager
from raystate.reader import Reader
from tests.model.iterators import Holds
from tests.model.truth import Line, Truth
from tests.model.vanishing import REMOVALS
from tests.model.world import Ended, Rank, Violation, World

CALLS = 14
TROUBLED_STARTS = 6
MOST_FLOATS = 300_000  # of an array; the slots of three ranks have to fit into a host's memory
BATCHES = 5  # of an epoch
LARGE_CHARS = 100_000  # more than the first slots of a rank have room for beside the arrays
SLOW_STORAGE = (
    "gave way to newer ones: saves take longer than the steps between them",
    "gave way to newer ones while storage fails: it stands still",
)
MOST_WAIT_S = (
    12.0  # of one due save: an outage is noticed meanwhile, even before the first step is durable, and a staging copy ends
)
MOST_AWAY_S = 34.0  # the same where not only storage may be what a save waits for


@dataclass(frozen=True, kw_only=True)
class Call:
    """What every rank does next."""

    name: str
    number: int
    amount: int = 0
    flag: bool = False


TROUBLES = ("coordinator", "host", "outage", "slow", "stuck", "trainer")


@dataclass(frozen=True, kw_only=True)
class Mood:
    """What a sequence is drawn from: how often each call, and which circumstances."""

    calls: dict[str, int]
    ranks: tuple[int, ...] = (1, 1, 1, 2, 2, 3)
    save_every_steps: tuple[int, ...] = (1, 2, 3, 100)
    troubles: tuple[str, ...] = TROUBLES
    most_troubles: int = 2  # at a start
    threads: bool = False  # where there is one rank, another thread of it saves while it leaves


ANY = Mood(
    calls={
        "save": 10,
        "force": 4,
        "again": 3,
        "repeat": 2,
        "flush": 4,
        "restore": 2,
        "older": 2,
        "rollback": 3,
        "bad": 2,
        "crash": 2,
        **dict.fromkeys(("missing", "delete", "grow", "change", "reopen", "order", "latest", "large", "exhausted", "deleted"), 1),
    }
)
# Few kinds of calls, many times: what needs three of a kind in a row hardly comes up among twenty kinds (Groce et al., Swarm
# Testing, ISSTA 2012).
MOODS = (
    Mood(calls={"force": 5, "older": 4, "reopen": 4, "flush": 1}),
    Mood(calls={"save": 8, "force": 1, "flush": 1}, ranks=(1,), save_every_steps=(1,), troubles=("outage", "slow", "stuck")),
    Mood(calls={"save": 8, "force": 2, "grow": 2, "change": 4}),
    Mood(calls={"save": 4, "force": 1, "reopen": 4, "crash": 3, "restore": 1}, troubles=("trainer", "slow"), most_troubles=4),
)
IN_A_MOOD = (2, 8)  # last digits of the seeds that have one
# Steps that are lost, and saved once more: some ranks have waited and know it, others have not.
LOST_AND_AGAIN = Mood(
    calls={"save": 3, "force": 2, "again": 6, "flush": 2, "flush_one": 4},
    ranks=(2, 2, 3),
    save_every_steps=(1, 2),
    troubles=("outage", "slow", "stuck", "coordinator", "host"),
    most_troubles=4,
)
LOSES = 4  # the last digit of the seeds that have this mood
# Trainers that die over an outage: their promises end with them.
LOST_AND_DEAD = Mood(
    calls={"save": 8, "force": 1, "crash": 2, "flush": 1},
    ranks=(1, 1, 2),
    save_every_steps=(1, 2),
    troubles=("outage", "outage", "stuck"),
    most_troubles=4,
)
DIES = 25  # what is left of the seeds that have this mood, by 50
# Calls of another thread, generators that are closed, and states whose arrays become others in mid-run.
THREADED = Mood(
    calls={
        "save": 6, "force": 3, "beside": 4, "dtype": 3, "shape": 2, "change": 1, "grow": 1, "reopen": 3, "fail": 2, "flush": 2,
        "restore": 2, "older": 1, "latest": 2, "crash": 1,
    },
    ranks=(1, 1, 1, 2),
    threads=True,
)  # fmt: skip
# Files of snapshots that somebody removes.
VANISHING = replace(ANY, troubles=(*TROUBLES, "vanished", "vanished", "vanished"))
# A rank that hangs, wherever it is: what the others do ends, and names it.
HANGING = replace(ANY, ranks=(2, 2, 3), troubles=("hang", "hang", "slow", "coordinator"), most_troubles=3)
IN_HANGING = (7, 37)  # what is left of the seeds that have this mood, by 50
IN_VANISHING = (2, 19, 32, 45)  # what is left of the seeds that have this mood, by 50
# All processes stand still together, and nothing else is wrong: nothing is lost, and no rank is ended.
STILL = replace(
    ANY, calls={name: often for name, often in ANY.calls.items() if name != "crash"}, troubles=("still",), most_troubles=4
)
IN_STILL = (7, 23, 31, 40)  # what is left of the seeds that have this mood, by 50
IN_THREADS = (5, 15, 17, 21, 33, 36, 43, 47, 49)  # what is left of the seeds that have this mood, by 50


def draw(rng: Random, number: int, mood: Mood = ANY) -> Call:
    """A random call."""
    names = [name for name, often in mood.calls.items() for _ in range(often)]
    return Call(name=rng.choice(names), number=number, amount=rng.randint(1, 3), flag=rng.random() < 0.5)


def _mood(seed: int) -> Mood:
    if seed % 50 == DIES:
        return LOST_AND_DEAD
    if seed % 50 in IN_STILL:
        return STILL
    if seed % 50 in IN_THREADS:
        return THREADED
    if seed % 50 in IN_VANISHING:
        return VANISHING
    if seed % 50 in IN_HANGING:
        return HANGING
    if seed % 10 == LOSES:
        return LOST_AND_AGAIN
    return MOODS[seed // 10 % len(MOODS)] if seed % 10 in IN_A_MOOD else ANY


class Sequence:
    """A seed's calls and circumstances.

    Args:
        seed: of everything.
    """

    def __init__(self, seed: int):
        rng = Random(seed)
        self.seed = seed
        self.mood = mood = _mood(seed)
        self.ranks = rng.choice(mood.ranks)
        impatient = {"save_timeout_s": 3.0, "barrier_timeout_s": 5.0} if rng.random() < 0.1 and mood is not STILL else {}
        self.world = World(
            seed,
            ranks=self.ranks,
            nodes=rng.randint(1, self.ranks),
            paces=[rng.choice((1.0, 1.0, 1.0, 20.0)) for _ in range(self.ranks)],
            save_every_steps=rng.choice(mood.save_every_steps),
            snapshot_every_steps=rng.choice((0, 1, None, 2)),
            keep_last=rng.choice((1, 2, None)),
            **impatient,
        )
        self.impatient = bool(impatient)
        self.donates = self.ranks == 1 and rng.random() < 0.5
        self.truth = Truth(storage=self.world.config.storage, ranks=self.ranks, clock=self.world.clock)
        self.world.published = self.truth.publish
        self.calls = [draw(rng, number, mood) for number in range(CALLS)]
        self.trouble = rng.random() < 0.5 or mood is STILL
        self.calm = mood is STILL or (not self.trouble and not impatient)
        self._rng = rng
        self.group = 0
        self.deleted: set[int] = set()  # by a call
        self.told: list[str] = []  # what has happened, for a person
        self.players: dict[int, Player] = {}  # of the present group, by rank
        self.close_failed = False
        self.hung: int | None = None  # the rank of the present group that hangs
        self.rolling_back: dict[int, int] = {}  # rank that is in such a restore -> the step it goes back to
        self.met: int | None = None  # such a step, of a restore that a crash met, until another one has settled

    # ------------------------------------------------------------ playing

    def play(self) -> None:
        """Raises Violation."""
        world = self.world
        try:
            at, done = 0, False
            while not done:
                # A crash ends all scripts; the launcher starts them again behind it.
                crash = next((i for i in range(at, len(self.calls)) if self.calls[i].name == "crash"), len(self.calls))
                made = self._start(self.calls[at:crash], last=crash == len(self.calls))
                done = not world.crashed
                at = min(at + made + 1, len(self.calls))
        except Violation as error:
            raise Violation(f"seed {self.seed}: {error}\n  " + "\n  ".join(self.told[-40:])) from None
        finally:
            world.close()

    def _start(self, calls: list[Call], *, last: bool) -> int:
        """Let all ranks make these calls, and at the `last` start leave. How many they have made, of which the last may be in part."""
        world = self.world
        self.group += 1
        self.close_failed = False
        self.hung = None
        group = f"g{self.group}"
        self.made = 0
        ranks = [Rank(world, number, self._script(calls, group, last=last)) for number in range(self.ranks)]
        if self.trouble and self.group <= TROUBLED_STARTS:
            for _ in range(self._rng.randint(0, self.mood.most_troubles)):
                world.at(0.2 + 3.0 * self._rng.random(), self._trouble(self._rng))
        world.run(ranks)
        if world.crashed and self.mood is STILL:
            raise Violation(f"a rank was ended, or has failed: {[str(rank.error) for rank in ranks]}")
        world.crashed = world.crashed or not last
        if world.crashed:
            for rank in ranks:
                rank.kill()
            world.storage.out = world.slow = world.stuck = False
            self.told.append(f"{world.now_s:.2f} s: all trainers are dead")
            lineages = {rank.manager._session.lineage if rank.manager is not None else "" for rank in ranks}
            self.truth.crashed(self.stored(), world.held(), lineages.pop() if len(lineages) == 1 else "")
            self.players = {}
            self.met = min([*self.rolling_back.values(), *([] if self.met is None else [self.met])], default=None)
            self.rolling_back = {}
            if self.met is not None:  # whoever restores next may find it carried out
                self.truth.floor = min(self.truth.floor, (self.met, "was rolled back to"))
        return self.made

    def _trouble(self, rng: Random) -> Callable[[], None]:
        world = self.world
        kind = rng.choice(self.mood.troubles)
        host = rng.choice(list(world.hosts.values()))
        rank = rng.randrange(self.ranks)
        remove = rng.choice(REMOVALS) if kind == "vanished" else None

        def strike() -> None:
            self.told.append(f"{world.now_s:.2f} s: {kind}")
            if kind == "coordinator":
                world.kill_coordinator()
            elif kind == "host" and host.loop is not None:
                host.crash()
                world.at(0.3, host.start)
            elif remove is not None:
                if host.loop is not None and not host.loop.has_vanished():
                    remove(host.loop.arena.path)
                    self.truth.memory_gone(self.stored())
            elif kind == "still":
                world.stand_still(20.0 + 200.0 * rng.random())
            elif kind == "trainer":
                world.kill_rank(rank)
            elif kind == "hang":
                self._hang(world.playing[rank])
            elif kind == "outage":
                world.storage.out = True
                world.at(2.0, self._mend)
            elif kind == "slow":
                world.slow = True
                world.at(3.0, self._mend)
            else:
                world.stuck = True
                world.at(3.0, self._mend)

        return strike

    def _hang(self, rank: Rank) -> None:
        """From its next wait on. Its launcher ends it once the others have ended, which they do in time."""
        world, config = self.world, self.world.config
        others = [one for one in world.playing if one is not rank]
        if rank.finished or self.hung is not None:
            return
        rank.hangs, self.hung = True, rank.number
        deadline_s = world.now_s + 3 * config.barrier_timeout_s + config.restore_timeout_s + config.start_timeout_s

        def look() -> None:
            if all(one.finished for one in others):
                world.end_all()
            elif world.now_s > deadline_s:
                world.found.append(f"a rank still waits although rank {rank.number} hangs, at {deadline_s:.0f} s")
                world.end_all()
            elif not rank.dead:
                world.at(1.0, look)

        look()

    def _mend(self) -> None:
        self.world.storage.out = self.world.slow = self.world.stuck = False

    def stored(self) -> list[int]:
        return Reader(self.world.config.storage).all_steps()

    def _script(self, calls: list[Call], group: str, *, last: bool) -> Callable[[Rank], None]:
        def script(rank: Rank) -> None:
            try:
                player = self.players[rank.number] = Player(self, rank, group)
                for number, call in enumerate(calls):
                    self.made = max(self.made, number)
                    player.do(call)
                self.made = len(calls)
                if last and not player.close(Call(name="close", number=CALLS, amount=1)) and self.hung is not None:
                    raise Ended("close has named the rank that hangs: the launcher starts this script again")
            except RaystateError as error:
                if rank.manager is not None:
                    rank.manager.__exit__(type(error), error, None)
                if self.impatient and not self.calm and isinstance(error, BarrierTimeoutError) and error.phase == "save":
                    # One rank alone waited for storage, which stood still, for longer than the others wait for it.
                    raise Ended(str(error)) from error
                if isinstance(error, StaleAttemptError) and "Coordinator has died during it" in str(error) and not self.calm:
                    raise Ended(str(error)) from error
                if self.hung is not None and isinstance(error, BarrierTimeoutError):
                    if f"rank {self.hung}" not in str(error):
                        raise Violation(f"rank {self.hung} hangs, and rank {rank.number} is told: {error}") from error
                    raise Ended(str(error)) from error
                raise

        return script


def _items() -> dict[str, Any]:
    """Of a fresh start."""
    return {"data": Holds(b"0"), "rows": Holds([]), "batches": Counted(lambda: range(BATCHES))}


class Player:
    """One rank's script."""

    def __init__(self, sequence: Sequence, rank: Rank, group: str):
        self.sequence = sequence
        self.truth = sequence.truth
        self.rank = rank
        self.me = rank.number
        self.size = 8
        self.parts: tuple[str, ...] = ("w",)
        self.dtype: Any = np.float32
        self.columns: tuple[int, ...] = ()
        self.large = False
        self.line = Line()
        self.items = _items()
        self.ahead: set[int] = set()
        self.promises: list[tuple[int, float]] = []
        self.last_true = -1  # the newest step that this line has promised
        self.lines = 0
        self.reopened = 0
        self.group = group
        self.flushed = False  # the newest promise has been waited for, and nothing has been saved since
        self.open()

    def open(self) -> None:
        """Make a manager, and restore the newest step."""
        try:
            self.manager: StateManager = self.rank.open(self.group)
            self.restore(None)
        except StorageError as error:
            if self.sequence.calm:
                raise
            self.note(f"refused: {error}")
            raise Ended("a run that begins in an outage is refused: the launcher starts this script again") from error
        except CorruptCheckpointError as error:
            if not any(line.endswith(" s: vanished") for line in self.sequence.told):
                raise
            self.note(f"refused: {error}")  # the host has not noticed yet that what it holds is gone
            raise Ended("the launcher starts this script again") from error

    def note(self, text: str) -> None:
        if self.me == 0:
            self.sequence.told.append(f"{self.rank.world.now_s:.2f} s: {text}")

    # ------------------------------------------------------------ state

    def state(self, token: float) -> dict[str, Any]:
        make = jnp.full if self.sequence.ranks == 1 else np.full
        return {**{part: make((self.size, *self.columns), token, self.dtype) for part in self.parts}, "none": None}

    def token(self, number: int, turn: int) -> float:
        return float(1000 * self.sequence.group + 20 * number + turn + 1)

    # ------------------------------------------------------------ calls

    def do(self, call: Call) -> None:
        getattr(self, f"do_{call.name}")(call)
        if self.flushed and self.truth.newest <= self.last_true:
            self.rank.rest(0.05)
            self.still_there(call.name)

    def do_save(self, call: Call) -> None:
        for turn in range(call.amount * (3 if call.flag else 1)):
            self.save(self.line.newest + 1, self.token(call.number, turn))

    def do_force(self, call: Call) -> None:
        self.save(self.line.newest + call.amount, self.token(call.number, 0), force=True)

    def do_again(self, call: Call) -> None:
        """The same step once more, by force: its capture counts, whatever bytes this call has. Where there is none, they are the same."""
        line, pipeline = self.line, self.manager._pipeline
        if line.newest < 0:
            return
        token = self.token(call.number, 0) if line.token is None else line.token
        if pipeline.machine.capture_of(line.newest, self.manager._session.words.host_word()) is not None:
            got = self._save(line.newest, self.token(call.number, 0), True)
        else:
            self.truth.save(self.me, line.newest, token)
            self.items["data"].state = str(token).encode()
            self.truth.items[token, self.me] = self.items["rows"].state, self.items["batches"].get_state()
            got = self._save(line.newest, token, True, items=self.items)
        if got == line.promised:
            raise Violation(f"save({line.newest}, force=True) once more on rank {self.me} says {got}")
        if got:
            self.line = Line(newest=line.newest, token=token, promised=True, saved=True)
            self.promises.append((line.newest, token))
            self.last_true, self.flushed = line.newest, False

    def do_repeat(self, call: Call) -> None:
        """The same step once more, without force: nothing."""
        if self.line.newest >= 0 and self.line.saved:
            self.save(self.line.newest, self.token(call.number, 0))

    def save(self, step: int, token: float, *, force: bool = False) -> None:
        line = self.line
        if step in self.ahead:
            try:
                self._save(step, token, force)
            except StepOrderError:
                return
            raise Violation(f"save({step}) on rank {self.me} was taken, although storage holds that step of another past")
        repeated = step == line.newest
        every = self.manager.config.save_every_steps or 1
        due = step // every > max(line.newest, 0) // every
        expected = not repeated and (force or due)
        if not repeated:
            self.truth.save(self.me, step, token)
        got = self._save(step, token, force)
        if got != expected:
            raise Violation(f"save({step}, force={force}) on rank {self.me} says {got}, expected {expected}")
        if not repeated:
            self.line = Line(newest=step, token=token, promised=expected, saved=True)
        if got:
            self.promises.append((step, token))
            self.last_true, self.flushed = step, False

    def _items_of(self, token: float) -> dict[str, Any]:
        """The step's items: one row more, and the next batch, of the next epoch where this one is at its end."""
        rows, batches = self.items["rows"], self.items["batches"]
        if next(batches, None) is None:
            next(iter(batches))
        rows.state = [*rows.state, (token, batches.epoch, "x" * 50)]
        self.items["data"].state = str(token).encode()
        self.truth.items[token, self.me] = rows.state, batches.get_state()
        return self.items

    def _save(self, step: int, token: float, force: bool, items: dict[str, Any] | None = None) -> bool:
        state, items = self.state(token), items or self._items_of(token)
        large = self.large and step != self.line.newest  # a later call may not bring more than the first
        custom = {"token": token, "log": "x" * (LARGE_CHARS if large else 0)}
        nothing_yet = not self.truth.published
        began_s = self.rank.world.clock()
        got = self.manager.save(step, state, items=items, metrics={"loss": token}, custom=custom, force=force)
        took_s = self.rank.world.clock() - began_s
        if not force and self.sequence.ranks == 1 and took_s > MOST_WAIT_S * self.rank.world.paces[0]:
            # The first package may have been on its way, or somebody had only just come back.
            starts = nothing_yet or any(line.endswith((" s: coordinator", " s: host")) for line in self.sequence.told)
            if not starts or took_s > MOST_AWAY_S * self.rank.world.paces[0]:
                raise Violation(f"save({step}) without force took {took_s:.1f} s")
        self.note(f"save({step}, token {token}, force={force}) -> {got}")
        if self.sequence.donates:
            for part in self.parts:
                state[part].delete()
        self.rank.rest(0.01)
        return got

    def do_bad(self, call: Call) -> None:
        """A mistake leaves no trace."""
        step, state = self.line.newest + 1, self.state(0.0)
        mistakes: list[tuple[Any, dict[str, Any]]] = [
            (step, {"custom": {1, 2}}),
            (step, {"metrics": {"loss": "low"}}),
            (step + 0.5, {}),
            (step, {"items": [1]}),
        ]
        number, arguments = mistakes[call.number % len(mistakes)]
        try:
            self.manager.save(number, state, force=True, **arguments)
        except ConfigError:
            return
        raise Violation(f"save({number}, {arguments}) was taken")

    def do_exhausted(self, call: Call) -> None:
        """The devices have no room for a copy: the save is refused, and the next one does what it would have done."""
        step = self.line.newest + 1
        line: Any = self.manager._pipeline

        def refuse(*_: Any, **__: Any) -> Any:
            raise CapacityError("no room on the devices")

        line._ways.hold = refuse
        try:
            self.manager.save(step, self.state(0.0), items=self.items, force=True)
        except CapacityError:
            pass
        except StepOrderError:
            return
        else:
            raise Violation(f"save({step}) was taken although its bytes could not be kept")
        finally:
            del line._ways.hold
        if call.flag:
            self.save(step, self.token(call.number, 0), force=call.amount == 1)

    def do_deleted(self, call: Call) -> None:
        """A state whose arrays are gone, donated by mistake."""
        if self.sequence.ranks > 1:
            return
        state = self.state(0.0)
        state["w"].delete()
        try:
            self.manager.save(self.line.newest + 1, state, force=True)
        except (RaystateError, RuntimeError):
            return
        raise Violation("a state without its bytes was taken")

    def do_order(self, call: Call) -> None:
        """An older step is refused, and changes nothing."""
        if self.line.newest < 1:
            return
        try:
            self.manager.save(self.line.newest - 1, self.state(0.0), items=self.items, force=True)
        except StepOrderError:
            return
        raise Violation(f"save({self.line.newest - 1}) after save({self.line.newest}) was taken")

    def do_grow(self, call: Call) -> None:
        self.size = min(self.size * 40 * call.amount, MOST_FLOATS)

    def do_change(self, call: Call) -> None:
        """The state gets another array, or loses one."""
        self.parts = ("w",) if len(self.parts) > 1 else ("w", "extra")

    def do_dtype(self, call: Call) -> None:
        """As many bytes, of another meaning; or others."""
        self.dtype = {np.float32: np.int32, np.int32: np.uint16, np.uint16: np.float32}[self.dtype]

    def do_shape(self, call: Call) -> None:
        self.columns = () if self.columns else (1,)

    def do_beside(self, call: Call) -> None:
        """Another thread of each rank saves, while this one asks."""
        other = self.rank.beside(lambda _: self.do_save(call))
        while not other.finished:
            with contextlib.suppress(StorageError):  # a restore before may have given up what was promised
                self.manager.check_for_errors()
            self.rank.rest(0.01)
        if other.error is not None:
            raise other.error

    def do_fail(self, call: Call) -> None:
        """The training raises."""
        with self._saving(call):
            self.manager.__exit__(ValueError, ValueError("wrong"), None)
        raise Ended("the training has failed: the launcher starts this script again")

    @contextlib.contextmanager
    def _saving(self, call: Call) -> Iterator[None]:
        """Another thread saves meanwhile, until it is refused."""
        sequence = self.sequence
        if not sequence.mood.threads or sequence.ranks > 1 or (sequence.seed + call.number) % 2:
            yield
            return
        other = self.rank.beside(lambda _: self._save_until_refused(call))
        self.rank.rest(0.02 * call.amount)
        try:
            yield
        finally:
            self.rank.rest_until(lambda: other.finished)
        if other.error is not None:
            raise other.error

    def _save_until_refused(self, call: Call) -> None:
        for turn in range(10, 19):  # no other turn of this call has such tokens
            step, token = self.line.newest + 1, self.token(call.number, turn)
            self.truth.save(self.me, step, token)
            try:
                if not self.manager.save(step, self.state(token), items=self._items_of(token), force=True):
                    raise Violation(f"save({step}, force=True) of another thread says False")
            except RaystateError as error:
                self.note(f"another thread's save({step}): {error}")
                return
            self.line = Line(newest=step, token=token, promised=True, saved=True)
            self.promises = [*self.promises, (step, token)]
            self.last_true, self.flushed = step, False
            self.rank.rest(0.01)

    def do_large(self, call: Call) -> None:
        """More is written down beside the arrays from now on; or no more."""
        self.large = not self.large

    def do_flush(self, call: Call) -> None:
        promises = self.promises
        try:
            self.manager.wait_until_finished()
        except StorageError as error:
            self.promises = []
            self.note(f"wait_until_finished: {error}")
            self.excuse(error, promises)
            self.last_true = -1
            return
        self.promises = []
        self.note("wait_until_finished")
        self.truth.durable(f"wait_until_finished on rank {self.me}", promises)
        self.still_there("wait_until_finished")
        self.flushed = True

    def do_flush_one(self, call: Call) -> None:
        """Waiting is each rank's own affair: here only one does."""
        if self.me == call.amount % self.sequence.ranks:
            self.do_flush(call)

    def still_there(self, where: str) -> None:
        """Retention has not taken the newest promised step."""
        if self.last_true >= 0 and self.last_true not in {*self.sequence.stored(), *self.sequence.deleted}:
            raise Violation(f"{where} on rank {self.me}: step {self.last_true} is not in storage any more")

    def excuse(self, error: Exception, promises: list[tuple[int, float]]) -> None:
        """Where nothing was in the way, only what a restore has given up may be lost, and what gave way to newer steps because storage is
        slow: while all ranks wait, time goes faster. What is in storage, or was, is not lost."""
        errors = getattr(error, "errors", None) or (str(error),)
        gave_way = {f"the snapshot of step {step} {why}" for step, _ in promises if step < self.last_true for why in SLOW_STORAGE}
        lost = [text for text in errors if "restore" not in text and not any(why in text for why in gave_way)]
        if self.sequence.calm and lost:
            raise Violation(f"rank {self.me}: {error}")
        self.truth.told_lost(f"rank {self.me}", str(error), promises)

    def do_latest(self, call: Call) -> None:
        steps = self.manager.all_steps()
        latest = self.manager.latest_step()
        self.truth.latest(latest)
        if latest != (steps[-1] if steps else None):
            raise Violation(f"all_steps() says {steps} on rank {self.me}, and latest_step() {latest}")

    def do_delete(self, call: Call) -> None:
        """Rank 0 deletes the oldest step, if there is another."""
        steps = self.sequence.stored()
        if self.me == 0 and len(steps) > 1:
            try:
                self.sequence.deleted.add(steps[0])
                self.manager.delete(steps[0])
                self.note(f"delete({steps[0]})")
            except (StorageError, StepNotFoundError) as error:
                self.note(f"delete({steps[0]}): {error}")

    # ------------------------------------------------------------ restores

    def do_restore(self, call: Call) -> None:
        self.restore(None)

    def do_older(self, call: Call) -> None:
        self._older(call, rollback=False)

    def do_rollback(self, call: Call) -> None:
        self._older(call, rollback=True)

    def _older(self, call: Call, *, rollback: bool) -> None:
        """All ranks have to want the same step: one that no retention takes meanwhile."""
        self.do_flush(call)
        steps = self._agreed(("steps", self.sequence.group, call.number), self.sequence.stored)
        if steps:
            self.restore(steps[-1 - call.amount % len(steps)], rollback=rollback)

    def _agreed(self, key: Any, make: Callable[[], Any]) -> Any:
        """What the first rank that comes here finds."""
        shared = self.sequence.__dict__.setdefault("agreed", {})
        if key not in shared:
            shared[key] = make()
        return shared[key]

    def do_missing(self, call: Call) -> None:
        try:
            self.manager.restore(None, step=987_654)
        except StepNotFoundError:
            return
        raise Violation("a step that nobody has saved was restored")

    def restore(self, wanted: int | None, *, rollback: bool = False) -> None:
        truth, sequence = self.truth, self.sequence
        items, reference = _items(), None
        if rollback and wanted is not None:
            sequence.rolling_back[self.me] = wanted
        try:
            restored = self.manager.restore(reference, step=wanted, rollback=rollback, items=items)
        except StepNotFoundError as error:
            if wanted is None:
                raise
            self.note(f"restore(step={wanted}): {error}")
            return
        sequence.rolling_back.pop(self.me, None)
        step = restored.step if restored is not None else -1
        token = truth.token_of("restore", restored.state) if restored is not None else None
        self.note(f"restore(step={wanted}, rollback={rollback}) -> step {step}, token {token}")
        self.lines += 1
        key = ("line", self.group, self.lines)
        truth.restored(self.me, hash(key), wanted, step, token)
        if token is not None:
            truth.has_items(self.me, token, items["rows"].state, items["batches"].get_state())

        def begin() -> list[int]:
            # Newer ones than the newest are on their way out: a crash met the rollback that retires them.
            stored = [one for one in sequence.stored() if wanted is not None or one <= step]
            truth.begin(step, token, rollback=rollback, stored=stored)
            sequence.met = None
            return stored

        stored = self._agreed(key, begin)
        self.ahead = {one for one in stored if one > step}
        machine = self.manager._pipeline.machine
        safe = machine.is_safe
        if safe and not machine.promises.made and token is not None:  # else its save is under way
            truth.durable(f"restore on rank {self.me}, where step {step} counts as durable,", [(step, token)])
        self.line = Line(newest=step, token=token, promised=safe, saved=False)
        self.last_true, self.flushed = -1, False
        self.promises = []  # a restore ends them
        self.items = items

    # ------------------------------------------------------------ ends

    def do_reopen(self, call: Call) -> None:
        if not self.close(call):
            raise Ended("close has failed, and said so: the launcher starts this script again")
        self.reopened += 1
        world = self.rank.world
        world.config = world.config.replace(keep_last=(1, 2, None)[call.amount - 1])  # the next launch's own configuration
        self.group = f"{self.group}r{self.reopened}"
        self.open()

    def leave(self, call: Call) -> None:
        """By the end of a `with` block: of the script, or of a generator that is closed."""

        def trains() -> Generator[None, None, None]:
            with self.manager:
                yield

        with self._saving(call):
            if self.sequence.mood.threads and (self.sequence.seed + call.number) % 3 == 0:
                loop = trains()
                next(loop)
                loop.close()
            else:
                self.manager.close()

    def close(self, call: Call) -> bool:
        try:
            self.leave(call)
        except (StorageError, BarrierTimeoutError, StaleAttemptError) as error:
            if isinstance(error, StaleAttemptError) and not (error.replaced and self.sequence.close_failed):
                raise
            promises = self.promises
            self.promises = []
            self.sequence.close_failed = True  # another rank may hear of that in its own close
            self.note(f"close: {type(error).__name__}: {error}")
            if isinstance(error, StorageError):
                self.truth.ended_in_vain(f"close on rank {self.me}", str(error), self.line.newest, promises)
            self.excuse(error, promises)
            return False
        line, promises = self.line, self.promises
        self.promises = []
        self.note("close")
        self.truth.ended(f"close on rank {self.me}", promises)
        if self.truth.newest <= self.last_true:
            self.still_there("close")
        if line.token is not None and not (line.saved and self.sequence.donates):
            self.truth.durable(f"close on rank {self.me}", [(line.newest, line.token)])
        return True


def play(seed: int) -> str:
    """ "" if everything held, else what did not."""
    try:
        Sequence(seed).play()
    except Violation as error:
        return str(error)
    except (RaystateError, AssertionError, CapacityError) as error:
        return f"seed {seed}: {type(error).__name__}: {error}"
    return ""


jax.config.update("jax_platforms", "cpu")
