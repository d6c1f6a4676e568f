"""Start jax.distributed without the one-second pause that Ray's own start often has.

Ray lets all processes connect at once. A process that is faster than rank 0 finds no listener, and
gRPC then waits a whole second before it tries again. Here the others connect when rank 0 listens.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from ray.train.v2.jax.config import JaxConfig

from raystate.machine.own_time import own_time
from raystate.waits import SOON_S, STARTS_S

_ADDRESS = "master_addr_with_port"  # the keyword by which Ray tells its set-up function rank 0's address


@dataclass
class QuickJaxConfig(JaxConfig):
    """`JaxConfig`, with the start in that order."""

    @property
    def backend_cls(self) -> type[Any]:
        return _QuickBackend


_RaysBackend: Any = JaxConfig().backend_cls


class _QuickBackend(_RaysBackend):
    def on_start(self, worker_group: Any, backend_config: JaxConfig) -> None:
        super().on_start(cast(Any, _InOrder(worker_group)), backend_config)


class _InOrder:
    """A worker group whose ranks other than 0 run Ray's jax set-up only once rank 0 listens; everything else is the group's own."""

    def __init__(self, group: Any):
        self._group = group

    def __len__(self) -> int:
        return len(self._group)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def execute_single_async(self, rank: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if rank > 0 and _ADDRESS in kwargs:
            return self._group.execute_single_async(rank, _when_listening, fn, *args, **kwargs)
        return self._group.execute_single_async(rank, fn, *args, **kwargs)


def _when_listening(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if os.environ.get("JAX_PLATFORMS"):  # else Ray's function sets it, and must do so before this import
        import jax  # noqa: F401 - the slow part, while rank 0 does the same
    host, _, port = kwargs[_ADDRESS].rpartition(":")
    wait_for_listener(host.strip("[]"), int(port), deadline_s=STARTS_S)
    return fn(*args, **kwargs)


def wait_for_listener(host: str, port: int, *, deadline_s: float) -> bool:
    """Wait until something listens there; False if nothing did within `deadline_s`."""
    end_s = own_time() + deadline_s
    while (left_s := end_s - own_time()) > 0:
        try:
            socket.create_connection((host, port), timeout=min(left_s, 1.0)).close()
            return True
        except OSError:
            time.sleep(SOON_S)
    return False
