"""`rehearse`: would a restart work? Found out before the training begins."""

from __future__ import annotations

from raystate.rehearsal.rehearse import rehearse, rehearse_command
from raystate.rehearsal.verdict import Rehearsal

__all__ = ["Rehearsal", "rehearse", "rehearse_command"]
