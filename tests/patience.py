"""How long a test waits for what is bound to come: never a judgment of speed, since the machine may do much else."""

from __future__ import annotations

PATIENCE_S = 1200.0  # below pytest's own limit, so that the one who waits can say what for
