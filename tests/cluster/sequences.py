"""Sequences of the model of the public API (tests/model), played by two processes on a real Ray cluster.

Each rank is a Ray actor that has a StateManager; the test makes all ranks call, and checks what they did against the same truth.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from random import Random
from typing import Any

import ray
from ray.exceptions import RayActorError

from raystate.actors.link import RayLink
from raystate.actors.naming import coordinator_name, find_actor, find_hosts, host_name, wait_until_gone
from raystate.config import StateConfig
from raystate.core.formats.errors import RaystateError
from raystate.manager import StateManager
from raystate.reader import Reader
from raystate.storage import RunLog, open_storage, run_hash
from tests.model.script import ANY, Call, Player, draw
from tests.model.truth import Truth
from tests.model.world import Ended, Violation, open_over

RANKS = 2
CALLS = 10
CALL_S = 300.0
GONE_S = 120.0


class _Told:
    """Stands for the truth where a rank is: what it is told goes to the test."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.published: dict[int, set[float]] = {}
        self.newest = float("inf")  # of all ranks: not known here

    token_of = staticmethod(Truth.token_of)

    def told_lost(self, *_: Any) -> None:
        """Whether it was in storage by then is not known, neither here nor to the test."""

    def named(self, *_: Any) -> None:
        """What groups before were promised is not known here."""

    def __getattr__(self, name: str) -> Any:
        if name not in ("save", "durable", "restored", "begin", "latest", "answered"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


class _World:
    paces = (float("inf"),) * RANKS  # nothing is too slow

    def __init__(self, config: StateConfig):
        self.config = config

    @property
    def now_s(self) -> float:
        return time.monotonic()


class RankActor:
    """One rank's process, in place of `world.Rank` and `script.Sequence`."""

    def __init__(self, number: int, config: StateConfig, launch: str, group_number: int):
        self.number = number
        self.config = config
        self.launch = launch
        self.world = _World(config)
        self.manager: StateManager | None = None
        self.player: Player | None = None
        # What a Player sees of its sequence.
        self.ranks = RANKS
        self.mood = ANY
        self.seed = 0
        self.donates = False
        self.calm = False
        self.rolling_back: dict[int, int] = {}
        self.deleted: set[int] = set()
        self.group = group_number
        self.told: list[str] = []
        self.truth = _Told()

    def stored(self) -> list[int]:
        return Reader(self.config.storage).all_steps()

    def rest(self, seconds: float) -> None:
        time.sleep(seconds)

    def open(self, group: str) -> StateManager:
        config = self.world.config
        link = RayLink(config, run_hash(config.storage, config.run), self.launch, self.number)
        self.manager = open_over(link, config, rank=self.number, world=RANKS, group=group)
        return self.manager

    def begin(self, group: str) -> tuple[list[Any], list[str]]:
        self.player = Player(self, self, group)  # pyright: ignore[reportArgumentType] - it has what a Player uses
        return self._heard()

    def do(self, call: Call) -> tuple[list[Any], list[str]]:
        assert self.player is not None
        self.player.do(call)
        return self._heard()

    def close(self) -> tuple[list[Any], list[str]]:
        assert self.player is not None
        self.player.close(Call(name="close", number=CALLS))
        return self._heard()

    def _heard(self) -> tuple[list[Any], list[str]]:
        heard, self.truth.calls = self.truth.calls, []
        notes, self.told = self.told, []
        return heard, notes


class RaySequence:
    """One seed's calls.

    Args:
        seed: of the calls and of who is killed.
        storage, run: fresh.
    """

    def __init__(self, seed: int, storage: str, run: str):
        self.rng = Random(seed)
        self.seed = seed
        self.config = StateConfig(
            storage=storage,
            run=run,
            save_every_steps=self.rng.choice((1, 2, 3, 100)),
            snapshot_every_steps=self.rng.choice((0, 1, 1, 2)),
            keep_last=self.rng.choice((1, 2, None)),
        )
        self.hash = run_hash(self.config.storage, run)
        self.calls = [draw(self.rng, number) for number in range(CALLS)]
        self.truth = Truth(ranks=RANKS, storage=storage, clock=time.monotonic)
        self.launch = secrets.token_hex(4)
        self.starts = 0
        self.actors: list[Any] = []
        self.told: list[str] = []
        self.read = 0  # entries of the log

    def play(self) -> None:
        """Raises Violation."""
        try:
            self._start()
            for call in self.calls:
                self._call(call)
            self._all("close")
            assert wait_until_gone(self.hash, GONE_S), "actors are left"
        except Violation as error:
            raise Violation(f"seed {self.seed}: {error}\n  " + "\n  ".join(self.told[-40:])) from None
        finally:
            self._kill()

    def _call(self, call: Call) -> None:
        if call.name == "crash":
            self._kill()
            self.told.append("all trainers are killed")
            self._start()
            return
        strike = self.rng.random()
        if call.name in ("older", "rollback"):  # all ranks have to see the same steps
            self._all("do", Call(name="flush", number=call.number))
        self._all("do", call, kill="coordinator" if strike < 0.06 else "host" if strike < 0.12 else "")

    def _start(self) -> None:
        self.starts += 1
        make = ray.remote(RankActor).options(num_cpus=0, max_concurrency=1)
        self.actors = [make.remote(rank, self.config, self.launch, self.starts) for rank in range(RANKS)]
        self.truth.crashed(Reader(self.config.storage).all_steps() if self.starts > 1 else [])
        self._all("begin", f"g{self.starts}")

    def _all(self, method: str, *args: Any, kill: str = "") -> None:
        refs = [getattr(actor, method).remote(*args) for actor in self.actors]
        if kill:
            self._strike(kill)
        try:
            answers = ray.get(refs, timeout=CALL_S)
        except (RayActorError, Ended) as error:  # ended by raystate, or by an error that it was right to raise
            self.told.append(f"{method} {args}: {type(error).__name__}: {str(error).splitlines()[0]}")
            self._kill()
            self._start()
            return
        except RaystateError as error:
            raise Violation(f"{method} {args}: {type(error).__name__}: {error}") from None
        self._read_log()
        begun = False
        for heard, notes in answers:
            self.told += notes
            for name, given, more in heard:
                if name == "begin" and begun:
                    continue
                begun = begun or name == "begin"
                getattr(self.truth, name)(*given, **more)

    def _strike(self, kind: str) -> None:
        """SIGKILL, while the ranks are in their call."""
        names = (
            [coordinator_name(self.hash)] if kind == "coordinator" else [host_name(self.hash, one) for one in find_hosts(self.hash)]
        )
        for name in names[:1]:
            actor = find_actor(name)
            if actor is None:
                continue
            with contextlib.suppress(RayActorError, ProcessLookupError):
                os.kill(ray.get(actor.pid.remote(), timeout=CALL_S), signal.SIGKILL)
                self.told.append(f"{kind} is killed")

    def _read_log(self) -> None:
        """Each entry names the steps that were in storage, and their metrics tell from which calls they are."""
        tail = RunLog(open_storage(self.config.storage)).tail()
        log = RunLog(open_storage(self.config.storage))
        for seq in range(self.read + 1, (tail.seq if tail is not None else 0) + 1):
            entry = log.read(seq)
            for step in entry.live if entry is not None else ():
                self.truth.published.setdefault(step.step, set()).add(step.metrics["loss"])
            self.read = seq

    def _kill(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []
