"""A driver of its own, to be killed: runs the toy under `fit`.

    python -m tests.cluster.drive CONFIG.json

CONFIG has address (of a running cluster), storage, run, out, steps, step_s,
settings (of StateConfig). Writes `result.json` at the end.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import ray
from ray import cloudpickle

import raystate
from tests.cluster import toy
from tests.cluster.training import SAVES_EVERY, quiet_run_config, scaling
from tests.patience import PATIENCE_S


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    out = Path(given["out"])
    ray.init(address=given["address"], namespace=f"driver-{os.getpid()}", log_to_driver=False)
    cloudpickle.register_pickle_by_value(toy)
    settings = {
        "save_every_steps": SAVES_EVERY,
        "snapshot_every_steps": 1,
        "barrier_timeout_s": PATIENCE_S,
        "start_timeout_s": PATIENCE_S,
        **given["settings"],
    }
    config = raystate.StateConfig(storage=given["storage"], run=given["run"], **settings)
    result = raystate.fit(
        toy.train,
        config,
        train_loop_config={"out": str(out), "steps": given["steps"], "step_s": given["step_s"], "width": 32},
        scaling_config=scaling(2),
        run_config=quiet_run_config(out, 2),
    )
    (out / "result.json").write_text(json.dumps({"step": result.step}))
    ray.shutdown()


if __name__ == "__main__":
    main()
