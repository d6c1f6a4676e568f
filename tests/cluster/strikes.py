"""Killing things: whatever kind of process it is, in whatever phase of a save the run is held."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from ray._private import worker

from jobs.striking import lose_node, place_of, raylet_of
from raystate.actors.naming import coordinator_name, find_hosts, host_name
from raystate.arena import SlotSet, default_root
from raystate.core.formats.errors import RaystateError
from raystate.machine.fault_points import FOLDER
from raystate.storage import run_hash
from tests.cluster.training import SAVES_EVERY, Training, wait_for

PHASES = ("training", "staging", "writing", "publishing")
SEED = int(os.environ["RAYSTATE_SEED"])  # drawn by tests/conftest.py, which prints it

ROUNDS = range(len(PHASES)) if os.environ.get("RAYSTATE_ALL") else [SEED % len(PHASES)]

played: dict[tuple[str, str], str] = {}  # (victim, phase) -> what came of it


@contextlib.contextmanager
def held(phase: str, training: Any, *, before: Callable[[], Any] | None = None) -> Iterator[None]:
    """Inside the block at least one process waits in that phase of a save or restore; "training" holds nothing.

    Args:
        training: whatever has an `error`, None while all is well.
        before: what makes processes come there, called once the hold is set.
    """
    if phase == "training":
        yield
        return
    folder = Path(os.environ[FOLDER])
    for old in folder.glob(f"{phase}.*"):
        old.unlink()
    hold = folder / f"{phase}.hold"
    hold.touch()
    try:
        if before is not None:
            before()
        wait_for(lambda: list(folder.glob(f"{phase}.*.reached")), f"a process in phase {phase}", failed=lambda: training.error)
        yield
    finally:
        hold.unlink()


def newest_in_memory(run: Any, *, nodes: int = 1) -> int:
    """The newest step whose pieces all lie in this machine's shared memory, each in the arenas of so many nodes; -1 if there is none.

    On a busy machine it is older than the newest step trained, and nobody can say by how much: snapshots are skipped there.
    """
    places: dict[tuple[str, int], dict[int, set[str]]] = {}
    complete = [-1]
    for path in default_root().glob(f"raystate-{run_hash(run.storage, run.run)}-*/set-*"):
        try:
            opened = SlotSet.open(path)
        except RaystateError:  # removed or not yet finished
            continue
        for header in filter(None, [slot.read_header() for slot in opened.slots]):
            ranks = places.setdefault((header.lineage, header.step), {})
            ranks.setdefault(header.rank, set()).add(path.parent.name)
            if len(ranks) == header.world and all(len(found) >= nodes for found in ranks.values()):
                complete.append(header.step)
        opened.close()
    return max(complete)


def strike(training: Training, victim: str, phase: str, cluster: Any) -> tuple[int, int]:
    """Kill `victim` in `phase`; (newest step trained, newest step in memory) before that. Returns when the training has got further."""
    starts = training.events.starts()
    with held(phase, training, before=lambda: training.go_on(SAVES_EVERY + 1)):
        in_memory = newest_in_memory(training.config)
        before = training.events.newest_step()
        _KILL[victim](training, cluster)
    if victim in ("trainer", "all trainers", "node"):
        wait_for(lambda: training.events.starts() > starts, f"a start after the death of {victim}", failed=lambda: training.error)
    training.wait_step(before + 3)
    return before, in_memory


def _kill_trainer(training: Training, _cluster: Any) -> None:
    os.kill(training.events.pids()[1], signal.SIGKILL)


def _kill_all_trainers(training: Training, _cluster: Any) -> None:
    for pid in training.events.pids().values():
        os.kill(pid, signal.SIGKILL)


def _kill_host(training: Training, _cluster: Any) -> None:
    name = run_hash(training.config.storage, training.config.run)
    _kill_actor(training, host_name(name, sorted(find_hosts(name))[0]))


def _kill_coordinator(training: Training, _cluster: Any) -> None:
    _kill_actor(training, coordinator_name(run_hash(training.config.storage, training.config.run)))


def _kill_actor(training: Training, actor: str) -> None:
    pid = wait_for(lambda: pid_of(actor), f"the pid of {actor}")
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: pid_of(actor) not in (None, pid), f"a new {actor}", failed=lambda: training.error)


def raylet_of_a_trainer(training: Training, cluster: Any) -> tuple[int, Any]:
    """(pid of the raylet, node) of a node with a trainer. Not the head."""
    raylets = {raylet_of(node): node for node in cluster.list_all_nodes() if not node.is_head()}
    for pid in training.events.pids().values():
        raylet = psutil.Process(pid).ppid()
        if raylet in raylets:
            return raylet, raylets[raylet]
    raise AssertionError("no trainer outside the head node")


def kill_node(training: Training, cluster: Any) -> None:
    lose_node(cluster, raylet_of_a_trainer(training, cluster)[1])


_KILL = {
    "trainer": _kill_trainer,
    "all trainers": _kill_all_trainers,
    "HostActor": _kill_host,
    "Coordinator": _kill_coordinator,
    "node": kill_node,
}
VICTIMS = tuple(_KILL)
KINDS = (*VICTIMS, "driver", "cluster")


def phase_of(victim: str, turn: int) -> str:
    """Each turn has every kind of death in another phase."""
    return PHASES[(KINDS.index(victim) + turn) % len(PHASES)]


def pid_of(name: str) -> int | None:
    """Of a named actor of raystate's, if it answers."""
    place = place_of(name)
    return place and place[1]


def wait_for_line(told: str, *, failed: Callable[[], Any]) -> None:
    """Until a process of this process's Ray has said it, in the log of a worker."""
    assert worker._global_node is not None
    logs = Path(worker._global_node.get_logs_dir_path())
    wait_for(
        lambda: any(told in log.read_text(errors="replace") for log in logs.glob("worker-*.err")),
        f"line {told!r} in Ray's logs",
        failed=failed,
    )


def came_of(training: Training, before: int) -> str:
    """In one line: how the run went on after the newest death."""
    start = training.events.newest_start()
    return f"killed after step {before}, newest start at {start['step']} from {start['tier']}"


def table() -> list[str]:
    rows = [f"{victim:14} in {phase:11} {came}" for (victim, phase), came in sorted(played.items())]
    return [*rows, f"{len(rows)} of {len(KINDS) * len(PHASES)} cells (make test-all plays all; RAYSTATE_SEED={SEED} these)"]
