"""What a program calls after each save, for the test that runs it: (manager, step, state)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import raystate

AfterSave = Callable[[raystate.StateManager, int, Any], None]
