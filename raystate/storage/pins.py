"""Pins: a step that somebody reads is not deleted under their hands.

The pin is created, *then* the log's tail is read; whoever deletes appends the retirement, *then* lists the pins. So either the
deleter sees the pin and waits, or the pinner sees the retirement and is told that the step is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Generator

from raystate.core.errors import StepNotFoundError
from raystate.storage.base import ObjectMissingError, Storage
from raystate.storage.log import RunLog
from raystate.storage.names import PINS, step_of


@contextlib.contextmanager
def pinned(storage: Storage, step: int, why: str, *, hold_s: float = 24 * 3600.0) -> Generator[None]:
    """Keep a live step from being deleted, by whatever attempt, until the end of the block.

    Args:
        storage: of the run.
        step: number of completed steps.
        why: for people.
        hold_s: seconds after which the pin no longer counts, by the clocks of this and the deleting machine: somebody who died with
            a pin must not keep a step for ever.

    Raises:
        StepNotFoundError: the step is not live (any more).
    """
    name = f"{PINS}/{step}.{secrets.token_hex(6)}"
    note = {"why": why, "host": socket.gethostname(), "pid": os.getpid(), "until_s": time.time() + hold_s}
    storage.create_or_same(name, json.dumps(note).encode())
    try:
        tail = RunLog(storage).tail()
        if tail is not None and all(one.step != step for one in tail.live):
            raise StepNotFoundError(f"step {step} of {storage.url} is not live (any more)", step=step, path=storage.url)
        yield
    finally:
        storage.delete(name)


def pinned_steps(storage: Storage) -> dict[int, str]:
    """Step -> why, of all pins that still count."""
    found: dict[int, str] = {}
    for info in storage.list(PINS, recursive=False):
        step = step_of(info.name.rpartition("/")[2].partition(".")[0])
        if step is None:
            continue
        try:
            note = json.loads(storage.read(info.name))
            if note["until_s"] > time.time():
                found[step] = f"{note['why']} on {note['host']}"
        except (ValueError, KeyError, TypeError):
            found[step] = "a pin that can't be read"
        except ObjectMissingError:
            continue  # let go of since the listing
    return found
