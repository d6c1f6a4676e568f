"""Compiled programs that outlive the process that compiled them: a restarted trainer loads them instead of compiling again."""

from raystate.compilation.jax_cache import keep_programs, why_not
from raystate.compilation.store import ProgramStore, node_folder

__all__ = ["ProgramStore", "keep_programs", "node_folder", "why_not"]
