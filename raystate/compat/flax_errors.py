"""Errors that code written for flax catches, and code written for raystate, too."""

from __future__ import annotations

from typing import Any

from flax import errors

from raystate.core.formats.errors import ConfigError, RaystateError, ReferenceMismatchError, StepNotFoundError


class OutdatedCheckpointError(RaystateError, errors.InvalidCheckpointError, ValueError):
    """There is a checkpoint of this step already, or the new one would not outlive its own save."""

    def __init__(self, message: str, **details: Any):
        Exception.__init__(self, message)  # not flax's own, which makes its message of other arguments
        self.details = details


class CheckpointNotFoundError(StepNotFoundError, ValueError):
    """There is no checkpoint of the step that was asked for."""


class TargetError(ConfigError, ValueError):
    """The target can't be saved."""


class TargetMismatchError(ReferenceMismatchError, ValueError):
    """The target and the checkpoint do not fit."""
