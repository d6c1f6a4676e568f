"""One process of a JAX job that starts from a source: `python source_worker.py PROCESSES INDEX PORT FOLDER`."""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np
import pytest


def main() -> None:
    processes, index, port = map(int, sys.argv[1:4])
    folder = sys.argv[4]
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, index)
    import raystate
    from raystate.manager.sourcing import restore_from_source
    from raystate.restored import ReadOptions

    reference = {"w": np.zeros(3)}

    def start(source: Any) -> Any:
        return restore_from_source(source, None, reference, lambda: reference, options=ReadOptions(), items=None)

    def broken() -> str:
        raise ZeroDivisionError("a bug in the caller's function")

    assert start(folder).state["w"][0] == 2.0, "the newest"
    assert start((folder, 1)).state["w"][0] == 1.0
    assert start(lambda: None) is None
    # What goes wrong on one process ends the others, too, instead of letting them wait for it.
    with pytest.raises(
        ZeroDivisionError if index == 0 else raystate.StorageError, match=r"a bug|processes \[0\] could not find it"
    ):
        start(broken if index == 0 else folder)
    with pytest.raises(raystate.RaystateError, match=r"has no step|processes \[1\] could not find it"):
        start(folder if index == 0 else f"{folder}-other")
    with pytest.raises(raystate.ConfigError, match=r"process 0 and processes \[1\] gave different sources"):
        start((folder, 1 + index))
    with pytest.raises(raystate.ConfigError, match=r"process 0 and processes \[1\] gave different sources"):
        start(folder if index == 0 else lambda: None)
    print("done")  # noqa: T201


main()
