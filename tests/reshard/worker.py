"""One process of a JAX job that saves or restores what it is told, a line of JSON at a time: `python worker.py PROCESSES INDEX PORT`."""

from __future__ import annotations

import json
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

import jax


def main() -> None:
    processes, index, port = map(int, sys.argv[1:])
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, index)
    from tests.reshard import cases

    def obey(order: dict[str, Any]) -> Any:
        cases.small_chunks(order["chunk_bytes"])
        case = cases.Case.from_json(order["case"])
        if order["do"] == "restore":
            return cases.restore_share(case, order["root"])
        if order["do"] == "reshard":
            return cases.reshard_share(case, order)
        if order["do"] == "hold":
            (Path(order["parts"]) / f"{index}.held").write_bytes(pickle.dumps(cases.hold_share(case)))
            return {}
        part = cases.save_share(case, order["root"])
        (Path(order["parts"]) / str(index)).write_bytes(pickle.dumps(part))
        return {}

    for line in sys.stdin:
        try:
            answer = obey(json.loads(line))
        except Exception:
            answer = {"error": traceback.format_exc()}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


main()
