"""JAX's persistent compilation cache, on every rank.

JAX lets only process 0 write, and writes in place. That is meant for one shared bucket. It doesn't help other ranks where their keys
differ: on CPU the key covers the process's place in the topology (`_hash_accelerator_config`), so rank 1 never finds rank 0's program.
On GPUs the keys agree, but process 0's file lies on another node. So here each process writes what it compiled, into its node's store.

JAX's key also covers the path of its folder, where XLA is to keep what it has tuned on GPUs. Another node may have another path, so
here the key has none.

No public setting does that. Three private functions of JAX are replaced, here and nowhere else, and act as before for any other folder;
tests/compilation/test_jax_internals.py notices when they change. With a JAX whose functions look otherwise, nothing is replaced: then
rank 0 alone keeps its programs, in JAX's own way, and a warning says so.
"""

# JAX's private modules are not typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import copy
import functools
import inspect
import logging
import os
from pathlib import Path
from typing import Any, Protocol

from raystate.patching import patch

logger = logging.getLogger("raystate")

TESTED = "0.10 to 0.12"
WRITE_ARGUMENTS = ["cache_key", "compile_time_secs", "module_name", "backend", "executable"]
CALLBACKS = "host_callbacks"  # one argument more until jax 0.11
PUT_ARGUMENTS = ["cache_key", "module_name", "executable", "backend", "compile_time"]
OPEN_ARGUMENTS = ["path"]
KEY_ARGUMENTS = ["module", "devices", "compile_options", "backend", "ignore_callbacks"]
PATHS = ("xla_gpu_per_fusion_autotune_cache_dir", "xla_gpu_kernel_cache_file")  # options of XLA that are below JAX's folder

_MIN_SECONDS = "jax_persistent_cache_min_compile_time_secs"
_MIN_SECONDS_BY_DEFAULT = 1.0


class Programs(Protocol):
    """Compiled programs by key, in a folder that JAX is told."""

    folder: Path

    def get(self, key: str) -> bytes | None: ...
    def put(self, key: str, value: bytes) -> bool: ...
    def trim(self) -> None: ...


_kept: Programs | None = None


class _KeptCache:
    """What is kept, as JAX's `CacheInterface`. JAX opens it once in a process's life."""

    def __init__(self, path: str):
        self._path = path

    def get(self, key: str) -> bytes | None:
        return None if _kept is None else _kept.get(key)

    def put(self, key: str, value: bytes) -> None:
        if _kept is not None:
            _kept.put(key, value)


def why_not() -> str:
    """Why this process's programs are not kept here; "": they can be."""
    import jax

    folder = jax.config.jax_compilation_cache_dir
    if not jax.config.jax_enable_compilation_cache:
        return "jax_enable_compilation_cache is off"
    if folder and (_kept is None or folder != str(_kept.folder)):
        return f"JAX keeps them in {folder}, as the user has set"
    return ""


def keep_programs(programs: Programs) -> str:
    """Let this process load the programs that it finds there, and keep there what it compiles. A later call is for what comes then.

    Call it before the first computation. Settings of the user's own are left alone: a folder (`JAX_COMPILATION_CACHE_DIR` or
    `jax_compilation_cache_dir`, also one that is set later), the shortest compilation that is worth keeping, and
    `jax_enable_compilation_cache`.

    Returns:
        "" if JAX asks for them there from now on, else why not.
    """
    global _kept
    import jax

    if reason := why_not():
        return reason
    known = _replace()
    if not known:
        logger.warning(
            "raystate does not know the compilation cache of JAX %s (it was tested with %s): only rank 0 keeps its compiled programs, "
            "and all other ranks compile theirs again after each restart",
            jax.__version__, TESTED,
        )  # fmt: skip
        programs.trim()  # in a folder of its own JAX keeps without end
    _kept = programs
    jax.config.update("jax_compilation_cache_dir", str(programs.folder))
    return "" if known else "JAX keeps them itself"


def _least_seconds() -> float:
    """Shorter compilations are not kept. JAX's default is meant for other folders: loading from ours is cheaper than compiling."""
    import jax

    given = getattr(jax.config, _MIN_SECONDS)
    untouched = given == _MIN_SECONDS_BY_DEFAULT and _MIN_SECONDS.upper() not in os.environ
    return 0.0 if untouched else given


def _compiler() -> Any:
    from jax._src import compiler

    return compiler


def known_internals() -> bool:
    """Whether the installed JAX has what is replaced here, with the arguments that are expected."""
    try:
        compiler = _compiler()
        return (
            _arguments(compiler._cache_write) in (WRITE_ARGUMENTS, [*WRITE_ARGUMENTS, CALLBACKS])
            and _arguments(compiler.compilation_cache.put_executable_and_time) == PUT_ARGUMENTS
            and _arguments(compiler.compilation_cache.get_file_cache) == OPEN_ARGUMENTS
            and _arguments(compiler.compilation_cache.get_cache_key) == KEY_ARGUMENTS
        )
    except (ImportError, AttributeError, TypeError, ValueError):
        return False


def _arguments(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


@functools.cache
def _replace() -> bool:
    if not known_internals():
        return False
    import jax

    compiler = _compiler()
    compilation_cache = compiler.compilation_cache

    def cache_write(
        cache_key: str, compile_time_secs: float, module_name: str, backend: Any, executable: Any, *callbacks: Any
    ) -> None:
        if _kept is None or jax.config.jax_compilation_cache_dir != str(_kept.folder):
            their_write(cache_key, compile_time_secs, module_name, backend, executable, *callbacks)
            return
        # As JAX does in process 0: a program that it names callbacks of has addresses of this process in it.
        if any(callbacks) or compile_time_secs < _least_seconds():
            return
        try:
            compilation_cache.put_executable_and_time(cache_key, module_name, executable, backend, int(compile_time_secs))
        except Exception as error:  # not every backend can serialize every program
            logger.debug("%s is not kept: %s: %s", module_name, type(error).__name__, error)

    def get_file_cache(path: str) -> Any:
        if _kept is not None and path == str(_kept.folder):
            return _KeptCache(path), path
        return their_open(path)

    def get_cache_key(module: Any, devices: Any, compile_options: Any, *more: Any, **named: Any) -> str:
        if _kept is not None and jax.config.jax_compilation_cache_dir == str(_kept.folder):
            compile_options = copy.deepcopy(compile_options)
            options = compile_options.executable_build_options.debug_options
            for name in PATHS:
                if getattr(options, name).startswith(f"{_kept.folder}{os.sep}"):
                    setattr(options, name, name)
        return their_key(module, devices, compile_options, *more, **named)

    # tests/compilation/test_jax_internals.py
    their_write = patch(compiler, "_cache_write", cache_write)
    their_open = patch(compilation_cache, "get_file_cache", get_file_cache)
    their_key = patch(compilation_cache, "get_cache_key", get_cache_key)
    return True
