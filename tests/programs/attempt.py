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
            deaths before it: ranks may run apart.
    """
    import jax

    from tests.programs.digest import digests

    program = importlib.import_module(f"tests.programs.{given['program']}")
    out, rank = Path(given["out"]), jax.process_index()
    died = [(out / f"killed-{death['step']}").exists() for death in given["deaths"]]
    deaths = [death["step"] for number, death in enumerate(given["deaths"]) if death["rank"] == rank and all(died[:number])]
    begun: list[int] = []

    def after_save(manager: raystate.StateManager, step: int, state: Any) -> None:
        if not begun:
            begun.append(step - 1)
            with open(out / f"begun-{rank}", "a") as file:
                file.write(f"{step - 1}\n")
        if step == given["config"]["steps"]:
            (out / f"end-{rank}.json").write_text(json.dumps(digests(state)))
        every = manager.config.save_every_steps
        if jax.process_count() == 1 and every and step % every == 0:
            _wait_until_durable(manager, step)
        if step + 1 in deaths:
            _wait_until_durable(manager, 1)
        if step in deaths and _first(out / f"killed-{step}"):
            os.kill(os.getpid(), signal.SIGKILL)

    program.train(given["config"], after_save)


def _first(mark: Path) -> bool:
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _wait_until_durable(manager: raystate.StateManager, step: int) -> None:
    """Steps of a millisecond are faster than storage: due ones would give way, and a kill would find no step to come back to."""
    deadline_s = time.monotonic() + PATIENCE_S
    while (manager.latest_step() or 0) < step:
        assert time.monotonic() < deadline_s, f"step {step} is not durable after {PATIENCE_S:.0f} s"
        time.sleep(0.01)


def main() -> None:
    """As a plain script: the configuration is made here, as a user's script would."""
    given = json.loads(sys.argv[1])
    given["config"]["state"] = raystate.StateConfig(**given["state"])
    attempt(given)


if __name__ == "__main__":
    main()
