"""Whether a node sees the storage of its run's Coordinator: the same path may be another disk there."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

from raystate.core.formats.errors import ConfigError, RaystateError
from raystate.core.formats.messages import Failure
from raystate.machine.own_time import own_time
from raystate.storage import LogReader, ObjectMissingError, Storage, open_storage
from raystate.storage.names import log_name
from raystate.waits import AGAIN_S, FILE_S, QUICK_STORAGE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The log entry with which a Coordinator has begun.

    Attributes:
        seq: its number.
        writer: the random id in it, which no other entry of any log has.
    """

    seq: int
    writer: str


def sees(storage_url: str, claim: Claim) -> bool:
    """Whether this process finds the entry in the storage. A failure of storage counts as seen."""
    storage = open_storage(storage_url, timeout_s=QUICK_STORAGE_S)
    log = LogReader(storage)
    end_s = own_time() + FILE_S
    while True:
        try:
            _forget_absence(storage, log_name(claim.seq))
            return log.read_header(claim.seq).writer == claim.writer
        except ObjectMissingError:
            if own_time() > end_s:
                return False
        except RaystateError:
            return True
        time.sleep(AGAIN_S)


def _forget_absence(storage: Storage, name: str) -> None:
    """An NFS mount goes on saying for up to a minute that a name is absent, unless its folder is opened: that asks the server."""
    if storage.is_directory:
        for folder in reversed(storage.local_path(name).parents):
            with contextlib.suppress(OSError):  # a file that can't be opened may still be read
                os.scandir(folder).close()


def not_one_storage(url: str, blind: Mapping[str, str], coordinator: str) -> Failure:
    """The refusal of a run whose nodes have different disks at its path.

    Args:
        url: the storage.
        blind: nodes that don't see what the Coordinator has written, with how they are named to people.
        coordinator: how its own node is named.
    """
    return Failure(
        error=ConfigError.__name__,
        message=(
            f"storage: {url} is not one place: what the Coordinator on {coordinator} has just written there does not appear on "
            f"{', '.join(blind.values())}. Mount one file system at that path on all nodes of the run, the driver's too, or give a "
            "bucket (gs://…, s3://…)"
        ),
        details={"field": "storage", "got": url, "hosts": list(blind), "begun": False},
    )
