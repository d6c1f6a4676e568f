"""What the hosts of `harness.Process` write: small, and all of it follows from the save and the name."""

from __future__ import annotations

from raystate.storage.names import MARKER, METADATA

HOSTS = 3
PARTS = (2, 1, 1)  # data objects that each host writes for a save


def payload(step: int, save: str, name: str) -> bytes:
    """What lies in a data object."""
    return f"{step} {save} {name}\n".encode() * 3


def fixed_files(step: int, save: str) -> dict[str, bytes]:
    """Files of a step that have the same names in every save of it."""
    return {
        METADATA: b'{"step": %d}' % step,
        MARKER: f"step {step}, save {save}\n".encode(),
        "state/_METADATA": f"tree of {save}".encode(),
        "state/manifest.ocdbt": f"manifest of {save}".encode(),
        f"state/{MARKER}": b"",
    }
