"""`raystate.save` and `save_async`: any tree, one checkpoint, whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path
from typing import Any

import equinox
import flax.linen
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
from flax.core import freeze
from hypothesis import Phase, assume, given, settings
from orbax.checkpoint import v1

import raystate
from raystate.arrays.tree import STORABLE
from raystate.orbax.writer import write_item
from raystate.reader import assembling
from raystate.restored import STATE
from raystate.storage import open_storage
from raystate.testing.storage import faults
from tests.orbax.test_any_state import ONLY_STOCK_JAX, QUIET, plain, same, states, taken
from tests.patience import PATIENCE_S

Pair = namedtuple("Pair", ["left", "right"])


@flax.struct.dataclass
class Flaxen:
    w: Any
    name: str = flax.struct.field(pytree_node=False, default="static")


@jax.tree_util.register_dataclass
class Registered:
    def __init__(self, w: Any):
        self.w = w


jax.tree_util.register_pytree_with_keys_class
