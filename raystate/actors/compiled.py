"""Where a process's compiled programs are kept: on its node, in a folder that outlives it, and in the run's storage."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import ray

from raystate.compilation import ProgramStore, RunPrograms, Shelf, anybody_can_write, cpu, keep_programs, node_folder, why_not
from raystate.config.state_config import StateConfig
from raystate.storage import open_storage
from raystate.storage.names import COMPILED
from raystate.waits import PROGRAMS_GATHERED_S, PROGRAMS_S

logger = logging.getLogger("raystate")

_kept_for = ""  # the run's storage


def keep_compiled(config: StateConfig, *, rank: int, world: int) -> None:
    """Let this process load what one before it compiled, unless `compilation_cache_bytes` is 0 or JAX has a folder of the user's.

    Programs are found by what they are made of, so all runs of a user on the node share them. In storage each run has its own.

    Args:
        rank, world: of this process.
    """
    global _kept_for
    if config.compilation_cache_bytes == 0 or config.storage == _kept_for:
        return
    if reason := why_not():
        logger.debug("compiled programs are not kept by raystate: %s", reason)
        return
    # Beside Ray's own folder, on the disk that was meant for it: in that one anybody may rename.
    folder = node_folder(Path(ray.get_runtime_context().get_temp_dir()).parent, Path(tempfile.gettempdir()))
    if folder is None:
        return
    _kept_for = config.storage
    local = ProgramStore(folder, config.compilation_cache_bytes)
    storage = open_storage(config.storage, timeout_s=PROGRAMS_S)
    if storage.is_directory and anybody_can_write(storage.local_path(COMPILED)):
        logger.warning(
            "compiled programs stay on their node: other users could put theirs in the place of a folder of %s", storage.url
        )
        keep_programs(local)
        return
    shelf = Shelf(storage, config.compilation_cache_bytes, host=_kind(), rank=rank, world=world)
    # Where the keys of all ranks agree, as on GPUs, the others then find what rank 0 has put there.
    programs = RunPrograms(local, shelf, gathered_s=PROGRAMS_GATHERED_S * (1 if rank == 0 else 2))
    if not keep_programs(programs):
        programs.begin()


def _kind() -> str:
    """What hosts that exchange programs have in common. The rest, such as devices and their number, is in JAX's keys."""
    import jax

    return f"{cpu()}-jax-{jax.__version__}"
