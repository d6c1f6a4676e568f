"""Pins: a step that somebody reads is not deleted under their hands.

The pin is created, *then* the log's tail is read; the deleter appends the retirement, *then* lists
the pins. So either the deleter sees the pin and waits, or the pinner sees the retirement and is
told that the step is gone.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import socket
import time
from collections.abc import Generator, Iterator
from typing import NamedTuple

from raystate.core.formats.errors import StepNotFoundError, StorageError
from raystate.storage.base import ObjectInfo, ObjectMissingError, Storage
from raystate.storage.log_reader import LogReader
from raystate.storage.names import PINS, step_of
from raystate.waits import CLOCKS_DIFFER_S


@contextlib.contextmanager
def pinned(storage: Storage, step: int, why: str, *, hold_s: float = 24 * 3600.0) -> Generator[None]:
    """Keep a live step from being deleted, by any attempt, until the end of the block.

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
        tail = LogReader(storage).tail()
        if tail is not None and all(one.step != step for one in tail.live):
            raise StepNotFoundError(f"step {step} of {storage.url} is not live (any more)", step=step, path=storage.url)
        yield
    finally:
        storage.delete(name)


def pinned_steps(storage: Storage) -> dict[int, str]:
    """Step -> why, of all pins that still count."""
    now_s = time.time()
    return {pin.step: pin.why for pin in _pins(storage) if pin.until_s > now_s}


def dead_pins(storage: Storage) -> list[ObjectInfo]:
    """Pins that have not counted for so long that this machine's clock can't be what says so. One that can't be read is none of them."""
    latest_s = time.time() - CLOCKS_DIFFER_S
    return [pin.info for pin in _pins(storage) if pin.until_s < latest_s]


class _Pin(NamedTuple):
    info: ObjectInfo
    step: int
    why: str
    until_s: float


def _pins(storage: Storage) -> Iterator[_Pin]:
    for info in storage.list(PINS, recursive=False):
        step = step_of(info.name.rpartition("/")[2].partition(".")[0])
        if step is None:
            continue
        try:
            note = json.loads(storage.read(info.name))
            yield _Pin(info, step, f"{note['why']} on {note['host']}", float(note["until_s"]))
        except ObjectMissingError:
            continue  # let go of since the listing
        except (ValueError, KeyError, TypeError, OverflowError, StorageError):
            yield _Pin(info, step, "a pin that can't be read", math.inf)
