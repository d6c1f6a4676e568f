"""The JAX side: flatten a state, who owns which piece of it, device -> slot, slot or storage -> device."""

from raystate.arrays.asked import check_asked
from raystate.arrays.checkpointables import is_checkpointable, load_files
from raystate.arrays.checks import check_custom, check_metrics, check_step, hold_metrics
from raystate.arrays.holdings import BytesTaken, Elsewhere, FarBox, Holding
from raystate.arrays.items import PackedItems, holds_arrays, is_iterator, is_state_of, pack_items, real_items, set_iterators
from raystate.arrays.memory import MemorySource, UncoveredError, common_values
from raystate.arrays.names import flatten_trees
from raystate.arrays.paths import path_key
from raystate.arrays.paths import shown as shown_path
from raystate.arrays.raw import array_bytes, check_asked_for, check_raw, check_spread, host_want, raw_wants
from raystate.arrays.reference import Matched, match_reference
from raystate.arrays.restore import HostArrays, PieceSource, ReadRequest, read_raw, restore_tree
from raystate.arrays.spare import Spare
from raystate.arrays.stage import HeldState, array_leaves, copy, hold, host_arrays, native, views
from raystate.arrays.stored import state_dict
from raystate.arrays.transforms import Rules, Transforms
from raystate.arrays.tree import Described, Plan, describe

__all__ = [
    "BytesTaken",
    "Described",
    "Elsewhere",
    "FarBox",
    "HeldState",
    "Holding",
    "HostArrays",
    "Matched",
    "MemorySource",
    "PackedItems",
    "PieceSource",
    "Plan",
    "ReadRequest",
    "Rules",
    "Spare",
    "Transforms",
    "UncoveredError",
    "array_bytes",
    "array_leaves",
    "check_asked",
    "check_asked_for",
    "check_custom",
    "check_metrics",
    "check_raw",
    "check_spread",
    "check_step",
    "common_values",
    "copy",
    "describe",
    "flatten_trees",
    "hold",
    "hold_metrics",
    "holds_arrays",
    "host_arrays",
    "host_want",
    "is_checkpointable",
    "is_iterator",
    "is_state_of",
    "load_files",
    "match_reference",
    "native",
    "pack_items",
    "path_key",
    "raw_wants",
    "read_raw",
    "real_items",
    "restore_tree",
    "set_iterators",
    "shown_path",
    "state_dict",
    "views",
]
