"""One schedule from its seed to its result."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tests.sim.storage import Violation
from tests.sim.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How one schedule went.

    Attributes:
        violation: "" if all invariants held; else what did not hold, with the seed.
        events, faults: how many were played.
        trace: the event log, oldest first; only kept with `trace=True` or after a violation.
    """

    seed: int
    violation: str
    events: int
    faults: int
    durable_step: int
    seconds: float
    trace: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.violation


def simulate(
    seed: int,
    *,
    events: int = 120,
    mutations: Collection[str] = (),
    trace: bool = False,
    replicas: int = 0,
    rivals: bool = False,
    is_still: bool = False,
) -> Result:
    """Play one schedule.

    Args:
        seed: names the schedule; the same one gives the same events.
        events: about how many events pass before the faults stop; the run then has to finish.
        mutations: bugs planted into the simulated shells, by name (see `tests.sim.mutations`).
        trace: keep the event log even if nothing is wrong.
        replicas: peer copies; with them there are up to four hosts (five with two copies), and more of them are lost.
        rivals: with peer copies, Coordinators are replaced while they live, too.
        is_still: nothing else goes wrong than that all processes stand still together, now and then.

    Returns:
        The result; after a violation the schedule is played again to give its event log.
    """
    world = World(seed, events, mutations, trace, replicas, rivals, is_still)
    violation = ""
    world.start_coordinator(world.dead_first)
    world.at(0.2, world.launch)
    world.plan()
    try:
        world.run()
    except Violation as error:
        violation = f"seed {seed}: {error}"
        if not trace:
            return simulate(
                seed, events=events, mutations=mutations, trace=True, replicas=replicas, rivals=rivals, is_still=is_still
            )
    lines = tuple(f"{when:8.3f} {name} {args}" for when, name, args in world.trace) if world.tracing else ()
    return Result(
        seed=seed,
        violation=violation,
        events=world.count,
        faults=world.fault_count,
        durable_step=world.storage.durable(),
        seconds=world.now_s,
        trace=lines,
    )
