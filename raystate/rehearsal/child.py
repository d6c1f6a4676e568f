"""The processes that a rehearsal starts for itself: `fit` with a function that was given, and the end of what a killed play left."""

from __future__ import annotations

import contextlib
import pickle
import socket
import sys
from pathlib import Path

from raystate.waits import CONNECT_S, ENDS_S


def fit_given(file: str) -> None:
    """Run `raystate.fit` with the arguments in a file that `rehearse` wrote."""
    import raystate

    raystate.fit(**pickle.loads(Path(file).read_bytes()))


def release_left(address: str, hashes: list[str]) -> None:
    """End the actors of these runs, if their Ray is still there."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except OSError:
        return
    import ray

    from raystate.actors.release import release_by_hash
    from raystate.core.formats.errors import RaystateError

    ray.init(address=address, log_to_driver=False)
    for name in hashes:
        with contextlib.suppress(RaystateError):
            release_by_hash(name, "the rehearsal has ended", ENDS_S)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["fit", file]:
            fit_given(file)
        case ["release", address, *hashes]:
            release_left(address, hashes)
        case _:
            sys.exit(2)
