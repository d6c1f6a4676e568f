"""Where a trainer's compiled programs are kept: on its node, in a folder that outlives the trainers."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import ray

from raystate.compilation import ProgramStore, keep_programs, node_folder, why_not
from raystate.config.state_config import StateConfig

logger = logging.getLogger("raystate")


def keep_compiled(config: StateConfig) -> None:
    """Let this trainer load what one before it compiled, unless `compilation_cache_bytes` is 0 or JAX has a folder of the user's.

    Programs are found by what they are made of, so all runs of a user on the node share them.
    """
    if config.compilation_cache_bytes == 0:
        return
    reason = why_not()
    if reason is None:
        # Beside Ray's own folder, on the disk that was meant for it: in that one anybody may rename.
        folder = node_folder(Path(ray.get_runtime_context().get_temp_dir()).parent, Path(tempfile.gettempdir()))
        reason = keep_programs(ProgramStore(folder, config.compilation_cache_bytes)) if folder is not None else ""
    if reason:
        logger.debug("compiled programs are not kept by raystate: %s", reason)
