"""One process's attempt at a program: it trains, may die once on the way, and leaves word of how it began and what came of it.

    python -m tests.programs.attempt '{"program": "ppo", …}'

trains in that process; under `raystate.fit` `attempt` is the training function.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import raystate
from tests.patience import PATIENCE_S


def attempt(given: dict[str, Any]) -> None:
    """Train.

    Args:
        given: "program": module of tests.programs; "config": for its `train`; "out": folder for what is told; "deaths": of
            {"rank", "step"}: that rank ends itself with SIGKILL after that step's save, once, in an attempt that began after the
            deaths before it: ranks may run apart; "stop": after that step's save rank 0 sends SIGTERM, once; "script": the process
            that gets it.
    """
    import jax

    from tests.programs.digest import digests

    program = importlib.import_module(f"tests.programs.{given['program']}")
    out, rank = Path(given["out"]), jax.process_index()
    died = [(out / f"killed-{death['step']}").exists() for death in given["deaths"]]
    deaths = [
        death["step"]
        for number, death in enumerate(given["deaths"])
        if death["rank"] == rank and died[: number + 1] == [True] * number + [False]
    ]
    begun: list[int] = []

    def after_save(manager: raystate.StateManager, step: int, state: Any) -> None:
        if not begun:
            begun.append(step - 1)
            with open(out / f"begun-{rank}", "a") as file:
                file.write(f"{step - 1}\n")
        if step == given["config"]["steps"]:
            (out / f"end-{rank}.json").write_text(json.dumps(digests(state)))
        if step + 1 in deaths:
            _wait_until_durable(manager, begun[0] + 1)
        if step in deaths and _first(out / f"killed-{step}"):
            os.kill(os.getpid(), signal.SIGKILL)
        if step == given.get("stop") and rank == 0 and _first(out / "stopped"):
            os.kill(given["script"], signal.SIGTERM)
            time.sleep(PATIENCE_S)  # the signal ends it

    program.train(given["config"], after_save)


def _first(mark: Path) -> bool:
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _wait_until_durable(manager: raystate.StateManager, step: int) -> None:
    """Steps of a millisecond are faster than any copy: a kill would find no newer step to come back to."""
    deadline_s = time.monotonic() + PATIENCE_S
    while (manager.latest_step() or 0) < step:
        assert time.monotonic() < deadline_s, f"step {step} is not durable after {PATIENCE_S:.0f} s"
        time.sleep(0.01)


def main() -> None:
    """As a user's script: the configuration is made here, and a group of workers is launched from here."""
    given = {**json.loads(sys.argv[1]), "script": os.getpid()}
    config = raystate.StateConfig(**given["state"])
    if given["ranks"] > 1:
        raystate.fit(attempt, config, num_workers=given["ranks"], train_loop_config=given, run_config=run_config(given))
    else:
        given["config"]["state"] = config
        attempt(given)


def run_config(given: dict[str, Any]) -> Any:
    """Ray Train's: its own files lie beside the run's, and its workers are on as many CPU devices as this process."""
    from ray.train import RunConfig

    environment = {name: os.environ[name] for name in ("JAX_PLATFORMS", "XLA_FLAGS", "PYTHONPATH")}
    return RunConfig(storage_path=f"{given['out']}/ray", worker_runtime_env={"env_vars": environment})


if __name__ == "__main__":
    main()
