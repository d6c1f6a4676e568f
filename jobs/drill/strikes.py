"""How each kind of fault is done. A strike has a target, a beginning, and for some kinds an end that comes later."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jobs.drill.cluster import NODE_DEAD_S
from jobs.drill.plan import Fault
from jobs.drill.watch import Run, Watch

OUTAGE_S = 3.0
ENDED_TIMES = 5.0  # times hang_timeout_s: by then a stopped rank has been ended
ZOMBIES_S = 5.0  # that the processes of a node have which Ray has given up
BEYOND_S = 1.5  # a stop goes on so much longer than its deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Deadlines of the run, short enough that a drill can go beyond them, and long enough for the machine: see StateConfig.

    Attributes:
        hang_s: `hang_timeout_s`.
        host_s: `host_timeout_s`.
        save_s: `save_timeout_s`.
        patience_s: by which the run has to be back after a fault.
    """

    hang_s: float
    host_s: float
    save_s: float
    patience_s: float


def limits(ready_s: float, first_s: float, patience_s: float) -> Limits:
    """What fits a machine.

    Args:
        ready_s: from the start of a training to its first step.
        first_s: from a training function's start to its first step.
        patience_s: that somebody has asked for at least.
    """
    # A save has the time that its first package needs on a machine that does much else.
    return Limits(
        hang_s=max(8.0, 4 * first_s), host_s=max(3.0, first_s), save_s=max(20.0, 4 * first_s), patience_s=max(patience_s, 8 * ready_s)
    )  # fmt: skip


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A fault that is about to happen.

    Attributes:
        target: for people.
        node: of the target; "": none.
        is_alive: whether the target lives now.
        begin: does it; False: the target was gone.
        hold_s: seconds until `end`; 0: nothing has to be ended.
        until: ends it before.
        end: stops or undoes it.
        settle: once the run is back: puts things in the place of what was lost.
        durable: what shows that the run is safe again is a new durable step, not one in memory.
    """

    target: str
    is_alive: Callable[[], bool]
    begin: Callable[[], bool]
    node: str = ""
    hold_s: float = 0.0
    until: Callable[[], bool] = lambda: False
    end: Callable[[], object] = _nothing
    settle: Callable[[], None] = _nothing
    durable: bool = False


class Armoury:
    """Makes strikes for the run as it is now.

    Args:
        machines: `Simulated` or `Given`.
        watch: knows where the ranks are.
        run: knows where the run's actors are.
        deadlines: of the run.
    """

    def __init__(self, machines: Any, watch: Watch, run: Run, deadlines: Limits):
        self._limits = deadlines
        self._machines = machines
        self._watch = watch
        self._run = run

    def strike(self, fault: Fault) -> Strike | None:
        """For this fault; None: its target can't be found, so it isn't alive."""
        ranks = self._watch.of_ranks()
        rank = ranks[fault.rank % len(ranks)]
        node = rank["node"]
        name = fault.kind.name.removeprefix("stop-")
        if name == "trainer":
            # Until it is ended: its time does not run while the others' save is on its way to storage.
            return self._on_process(
                fault, f"rank {rank['rank']}", node, rank["pid"], ENDED_TIMES * self._limits.hang_s, until_dead=True
            )
        if name == "host":
            found = self._run.host(node)
            return found and self._on_process(fault, f"HostActor of rank {rank['rank']}", *found, self._limits.host_s + BEYOND_S)
        if name == "coordinator":
            found = self._run.coordinator()
            return found and self._on_process(fault, "Coordinator", *found, self._limits.host_s + BEYOND_S)
        if name == "clock":
            found = self._run.coordinator() if fault.rank else None
            return self._on_clock(fault, found[0] if found is not None and self._machines.has_clock(found[0]) else node)
        if name == "outage":
            return self._outage()
        if name == "stall":
            return self._stall()
        return self._on_node(fault, f"node of rank {rank['rank']}", node)

    def _on_process(self, fault: Fault, target: str, node: str, pid: int, hold_s: float, *, until_dead: bool = False) -> Strike:
        def alive() -> bool:
            return self._machines.is_alive(node, pid)

        def send(number: int) -> bool:
            return self._machines.send(node, pid, number)

        target = f"{target}, pid {pid}"
        if not fault.kind.name.startswith("stop-"):
            return Strike(target=target, node=node, is_alive=alive, begin=lambda: send(signal.SIGKILL))
        return Strike(
            target=target,
            node=node,
            is_alive=alive,
            begin=lambda: send(signal.SIGSTOP),
            hold_s=hold_s,
            until=lambda: until_dead and not alive(),
            end=lambda: send(signal.SIGCONT),
        )

    def _on_node(self, fault: Fault, target: str, node: str) -> Strike:
        machines = self._machines
        target = f"{target}, {node[:8]}"

        def alive() -> bool:
            return machines.has(node)

        def always(do: Callable[..., None], *given: Any) -> Callable[[], bool]:
            return lambda: do(node, *given) is None

        def lose() -> None:
            if machines.has(node):  # what Ray itself has not ended yet
                machines.lose(node)

        if fault.kind.name == "node":
            return Strike(target=target, node=node, is_alive=alive, begin=always(machines.lose), settle=machines.add_node)
        if fault.kind.name == "shrink":

            def lose_all() -> None:
                for spare in machines.spares(rank["node"] for rank in self._watch.of_ranks().values()):
                    lose_one(spare)
                lose_one(node)

            def lose_one(one: str) -> None:
                lost.append(one)
                machines.lose(one)

            lost: list[str] = []

            def replace_all() -> None:
                for _ in lost:
                    machines.add_node()

            return Strike(target=target, node=node, is_alive=alive, begin=lambda: lose_all() is None, settle=replace_all)
        if fault.kind.name == "drain":

            def replace() -> None:
                lose()
                machines.add_node()

            return Strike(target=target, node=node, is_alive=alive, begin=always(machines.announce), settle=replace)
        if fault.kind.name == "stop-node":

            def bury() -> None:
                machines.wait_gone(node, ZOMBIES_S)
                machines.lose(node)
                machines.add_node()

            return Strike(
                target=target,
                node=node,
                is_alive=alive,
                begin=always(machines.stop),
                hold_s=NODE_DEAD_S,
                until=lambda: machines.given_up(node),
                end=lambda: machines.resume(node),
                settle=bury,
            )
        raise AssertionError(fault.kind)

    def _on_clock(self, fault: Fault, node: str) -> Strike:
        machines, by_s = self._machines, fault.jump_s
        return Strike(
            target=f"clock of node {node[:8]}, {by_s:+.0f} s",
            node=node,
            is_alive=lambda: machines.has_clock(node),
            begin=lambda: machines.jump(node, by_s) is None,
        )

    def _outage(self) -> Strike:
        swap = self._machines.swap_storage
        return Strike(
            target="storage", is_alive=lambda: True, begin=lambda: swap() is None, hold_s=OUTAGE_S, end=swap, durable=True
        )  # fmt: skip

    def _stall(self) -> Strike:
        machines = self._machines
        return Strike(
            target="storage",
            is_alive=lambda: True,
            begin=lambda: machines.hold_writes() is None,
            hold_s=self._limits.save_s + BEYOND_S,
            end=machines.let_writes_go,
            durable=True,
        )
