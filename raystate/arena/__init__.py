"""Shared host memory that outlives the processes that fill it.

The HostActor opens a `HostArena` and allots slot sets; a trainer attaches to its set with `TrainerArena`, copies snapshots into
slots, and reads and writes control words. Slots describe themselves, so a new HostActor finds in the files
all that the old one knew:

    <arena_dir>/raystate-<user id>/           0700; locked while memory is promised
        raystate-<run hash>-<node>/           0700
            meta.json  host.lock              whose it is; held by the HostActor
            layouts/<hash>                    descriptions that slots refer to
            bell                              the HostActor's socket (runtime/doorbell.py)
            set-<n>/                          one trainer's
                set.json  trainer.lock.<hash> capacities and whose it is; held by that trainer
                trainer.cell  host.cell       the two control words
                layout.<hash>                 empty: its trainer has put that layout, and may name it
                slot-<i>                      header page, table, data
"""

from raystate.arena.capacity import used_bytes
from raystate.arena.files import arena_path, default_root
from raystate.arena.host import HostArena, TrainerState
from raystate.arena.meta import ArenaMeta
from raystate.arena.sizes import format_bytes, parse_memory
from raystate.arena.slot import Slot, SlotContent
from raystate.arena.slot_set import SlotSet, finished_sets
from raystate.arena.sweep import sweep
from raystate.arena.trainer import TrainerArena
from raystate.arena.word import MAX_WORD_BYTES, WordCell
from raystate.machine.checksum import crc32c
from raystate.machine.memory import NodeMemory, node_memory

__all__ = [
    "MAX_WORD_BYTES",
    "ArenaMeta",
    "HostArena",
    "NodeMemory",
    "Slot",
    "SlotContent",
    "SlotSet",
    "TrainerArena",
    "TrainerState",
    "WordCell",
    "arena_path",
    "crc32c",
    "default_root",
    "finished_sets",
    "format_bytes",
    "node_memory",
    "parse_memory",
    "sweep",
    "used_bytes",
]
