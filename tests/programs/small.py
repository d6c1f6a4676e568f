"""Small plain scripts: python -m tests.programs.small NAME STORAGE RUN DIES_AFTER."""

from __future__ import annotations

import os
import random
import signal
import sys
from typing import Any

import jax.numpy as jnp

import raystate

EPOCHS, BATCHES = 3, 4


class Draws:
    """Python's random numbers: a tuple of tuples."""

    def get_state(self) -> Any:
        return random.getstate()

    def set_state(self, state: Any) -> None:
        random.setstate(state)


def epochs(manager: raystate.StateManager, dies_after: int) -> None:
    """As tutorials have it: epochs, batches, and Python's random numbers."""
    random.seed(7)
    batches = raystate.Counted(lambda: range(BATCHES))
    items = {"data": batches, "random": Draws()}
    restored = manager.restore_or_init(lambda: {"w": jnp.zeros(())}, items=items)
    state, step = restored.state, restored.step
    for epoch in range(batches.epoch, EPOCHS):
        for batch in batches:
            step += 1
            state = {"w": state["w"] * 0.9 + (batch + epoch + random.random())}
            manager.save(step, state, items=items)
            if step == dies_after:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.stdout.write(f"ended with {step} {float(state['w']).hex()}\n")


def another_dtype(manager: raystate.StateManager, dies_after: int) -> None:
    """No restart could take what its steps give."""
    state = manager.restore_or_init(lambda: {"n": jnp.zeros((), jnp.int32)}).state
    for step in range(1, 1 + dies_after):
        manager.save(step, {"n": state["n"] + 0.5})
    os.kill(os.getpid(), signal.SIGKILL)


def no_restore(manager: raystate.StateManager, dies_after: int) -> None:
    """It begins anew at each start."""
    for step in range(1, 1 + dies_after):
        manager.save(step, {"w": jnp.ones(())})
    manager.wait_until_finished()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    name, storage, run, number = sys.argv[1:]
    with raystate.StateManager(raystate.StateConfig(storage=storage, run=run, save_every_steps=2)) as opened:
        {"epochs": epochs, "another_dtype": another_dtype, "no_restore": no_restore}[name](opened, int(number))
