"""raystate: the training state of JAX jobs on Ray, kept through crashes and preemptions as plain Orbax checkpoints.

Names load on first use (PEP 562), so `import raystate` is cheap and `raystate.core` needs nothing but the standard library.
"""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING, Any

from raystate import log_lines
from raystate.core.formats.errors import (
    BarrierTimeoutError,
    CapacityError,
    ConfigError,
    CorruptCheckpointError,
    Interrupted,
    ItemTopologyError,
    RaystateError,
    ReferenceMismatchError,
    RunFailedError,
    RunInUseError,
    StaleAttemptError,
    StepNotFoundError,
    StepOrderError,
    StorageError,
)

if TYPE_CHECKING:
    from raystate.config.state_config import StateConfig
    from raystate.items.counted import Counted
    from raystate.items.value import Value
    from raystate.manager import StateManager
    from raystate.reader import Reader, load, load_async, metadata, save, save_async
    from raystate.rehearsal import Rehearsal, rehearse
    from raystate.restored import Restored
    from raystate.train import RayTrainCallback, RunResult, fit

__version__ = "0.1.0"

__all__ = [
    "BarrierTimeoutError",
    "CapacityError",
    "ConfigError",
    "CorruptCheckpointError",
    "Counted",
    "Interrupted",
    "ItemTopologyError",
    "RayTrainCallback",
    "RaystateError",
    "Reader",
    "ReferenceMismatchError",
    "Rehearsal",
    "Restored",
    "RunFailedError",
    "RunInUseError",
    "RunResult",
    "StaleAttemptError",
    "StateConfig",
    "StateManager",
    "StepNotFoundError",
    "StepOrderError",
    "StorageError",
    "Value",
    "__version__",
    "fit",
    "load",
    "load_async",
    "metadata",
    "rehearse",
    "save",
    "save_async",
]

# Public name -> the module that defines it. Errors are not here: they are light and are imported above.
_LAZY = {
    "StateConfig": "raystate.config.state_config",
    "StateManager": "raystate.manager",
    "Restored": "raystate.restored",
    "Counted": "raystate.items.counted",
    "Reader": "raystate.reader",
    "save": "raystate.reader",
    "load": "raystate.reader",
    "load_async": "raystate.reader",
    "save_async": "raystate.reader",
    "metadata": "raystate.reader",
    "rehearse": "raystate.rehearsal",
    "Rehearsal": "raystate.rehearsal",
    "fit": "raystate.train",
    "RayTrainCallback": "raystate.train",
    "RunResult": "raystate.train",
    "Value": "raystate.items.value",
}


log_lines.set_up()


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'raystate' has no attribute {name!r}{_hint(name)}", name=name)
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value  # the next access doesn't come here
    return value


def _hint(name: str) -> str:
    from raystate.config.hints import MEMBERS

    if name in MEMBERS:
        return f": {MEMBERS[name]}"
    close = difflib.get_close_matches(name, __all__, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
