"""Where a trainer's compiled programs are kept: on its node, in Ray's session folder, which outlives the trainers."""

from __future__ import annotations

import logging
from pathlib import Path

import ray

from raystate.compilation import ProgramStore, keep_programs, node_folder
from raystate.config import StateConfig

logger = logging.getLogger("raystate")


def keep_compiled(config: StateConfig) -> None:
    """Let this trainer load what one before it compiled, unless `compilation_cache_bytes` is 0 or JAX has a folder of the user's.

    Programs are found by what they are made of, so all runs of a user on the node share them.
    """
    if config.compilation_cache_bytes == 0:
        return
    context = ray.get_runtime_context()
    folder = node_folder(Path(context.get_temp_dir()) / context.get_session_name())
    if folder is None:
        return
    reason = keep_programs(ProgramStore(folder, config.compilation_cache_bytes))
    if reason:
        logger.debug("compiled programs are not kept by raystate: %s", reason)
