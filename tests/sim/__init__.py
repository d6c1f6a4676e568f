"""A seeded simulator of a whole run: the real decisions of core, with every process, message and storage operation played.

`simulate(seed)` plays one schedule in virtual time: messages late, lost, doubled and out of order, processes that die or sleep at any
point, a second Coordinator beside the first, storage that loses acknowledgements. The invariants are checked after every event, and
at the end, once the faults have stopped, that the run goes on and finishes. The same seed gives the same schedule.
"""

from tests.sim.run import Result, simulate

__all__ = ["Result", "simulate"]
