"""What users need to test with raystate, and what raystate is tested with.

`simulate(seed)` plays one schedule of a whole run in virtual time and checks the invariants (see `raystate.testing.sim`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raystate.testing.sim import Result, simulate

__all__ = ["Result", "simulate"]


def __getattr__(name: str) -> Any:
    """Loaded when it is used: other parts of this package need none of it."""
    if name in __all__:
        from raystate.testing import sim

        return getattr(sim, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
