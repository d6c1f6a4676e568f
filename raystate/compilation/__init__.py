"""Compiled programs that outlive their process, its node and its cluster: a restart loads them instead of compiling again."""

from raystate.compilation.jax_cache import keep_programs, why_not
from raystate.compilation.run_programs import RunPrograms
from raystate.compilation.shelf import Shelf
from raystate.compilation.store import ProgramStore, anybody_can_write, cpu, node_folder

__all__ = ["ProgramStore", "RunPrograms", "Shelf", "anybody_can_write", "cpu", "keep_programs", "node_folder", "why_not"]
