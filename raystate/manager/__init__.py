"""What a training script holds."""

from __future__ import annotations

from raystate.manager.facade import StateManager

__all__ = ["StateManager"]
