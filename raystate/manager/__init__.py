"""What a training script holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raystate.config.rehearsing import play
from raystate.manager.facade import StateManager
from raystate.public_calls import public_class

public_class(StateManager)
if not TYPE_CHECKING and play() is not None:
    from raystate.manager.rehearsed import RehearsedManager as StateManager

__all__ = ["StateManager"]
