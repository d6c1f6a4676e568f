"""Which faults, in which order: named by a seed, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PHASES = ("idle", "staging", "saving", "committing", "recovering")  # of the Coordinator
ANY = "any"
_AIMED = 0.5  # share of faults that wait for a phase
GAP_S = 1.0  # at most so long after the run has come back the next fault is struck
JUMPS_S = (-86_400.0, -600.0, 600.0, 86_400.0)
RANKS = 2
FEWEST = 1  # of an elastic run


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of fault.

    Attributes:
        name: as in `--kinds` and in the table.
        what: what happens, for people.
        restarts: the worker group starts again.
        spares_memory: what all hosts hold in memory survives it.
        own_machine: why it can't be done on somebody else's cluster; "": it can.
        elastic: only an elastic run comes back from it.
    """

    name: str
    what: str
    restarts: bool = False
    spares_memory: bool = True
    own_machine: str = ""
    elastic: bool = False


_STORAGE = "the storage is not the drill's to break"
_NODE = "nobody would bring another node in its place"

KINDS = (
    Kind(name="trainer", what="SIGKILL of one rank", restarts=True),
    Kind(name="host", what="SIGKILL of a HostActor"),
    Kind(name="coordinator", what="SIGKILL of the Coordinator"),
    Kind(
        name="node",
        what="a node is lost: its raylet and all on it, and its shared memory",
        restarts=True,
        spares_memory=False,
        own_machine=_NODE,
    ),
    Kind(
        name="drain",
        what="a node's end is announced; it is gone once the run has moved on",
        restarts=True,
        own_machine="a node that drains can't be taken back, and " + _NODE,
    ),
    Kind(name="outage", what="every access to storage fails for a while", own_machine=_STORAGE),
    Kind(name="stall", what="every write to storage hangs for longer than a save may take", own_machine=_STORAGE),
    Kind(name="stop-trainer", what="SIGSTOP of one rank for longer than a step may take, then SIGCONT", restarts=True),
    Kind(name="stop-host", what="SIGSTOP of a HostActor until it counts as down, then SIGCONT"),
    Kind(name="stop-coordinator", what="SIGSTOP of the Coordinator for as long, then SIGCONT"),
    Kind(
        name="stop-node",
        what="SIGSTOP of a raylet and all on it until Ray has given the node up, then SIGCONT",
        restarts=True,
        spares_memory=False,
        own_machine=_NODE,
    ),
    Kind(
        name="clock",
        what="a node's wall clock jumps by ten minutes or a day, as its Python programs read it",
        own_machine="the nodes' clocks are not the drill's to set",
    ),
    Kind(
        name="shrink",
        what="with --elastic: a node is lost and none waits; others come once the run goes on with fewer ranks",
        restarts=True,
        spares_memory=False,
        own_machine=_NODE,
        elastic=True,
    ),
)  # fmt: skip
FIXED = tuple(kind for kind in KINDS if not kind.elastic)  # for a run that always has as many ranks
BY_NAME = {kind.name: kind for kind in KINDS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of the sequence.

    Attributes:
        number: from 1.
        aim: the Coordinator's phase that is waited for a while; "any": none.
        rank: whose process or node it hits, where it hits one of them.
        gap_s: seconds to wait before it.
        jump_s: of a clock.
    """

    number: int
    kind: Kind
    aim: str
    rank: int
    gap_s: float
    jump_s: float


def faults(seed: int, kinds: Sequence[Kind] = FIXED) -> Iterator[Fault]:
    """The sequence that a seed names, without end: in each round every kind has its turn once, in an order of its own.

    Args:
        seed: any int.
        kinds: what to choose from; another choice is another sequence.
    """
    drawn = random.Random(f"drill {seed}")
    number = 0
    while True:
        for kind in drawn.sample(kinds, len(kinds)):
            number += 1
            # While the ranks start nobody knows their processes.
            phases = PHASES[1:-1] if kind.name.endswith("trainer") else PHASES[1:]
            aim = drawn.choice(phases) if drawn.random() < _AIMED else ANY
            yield Fault(
                number=number,
                kind=kind,
                aim=aim,
                rank=drawn.randrange(RANKS),
                gap_s=drawn.uniform(0.0, GAP_S),
                jump_s=drawn.choice(JUMPS_S),
            )
