"""What is kept in Ray's key-value store: it outlives any process of the cluster, and goes with the cluster."""

from __future__ import annotations

import hashlib
import logging
import pickle
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ray import cloudpickle

from raystate.actors.naming import coordinator_name, find_actor
from raystate.actors.rays import internal_kv
from raystate.config.state_config import StateConfig
from raystate.core.formats.errors import ConfigError

logger = logging.getLogger("raystate")


def check_travels(config: StateConfig) -> StateConfig:
    """The config. Raises ConfigError: a policy of it can't go to another process; it decides in the Coordinator's."""
    for field in ("keep_policy", "save_policy"):
        try:
            cloudpickle.dumps(getattr(config, field))  # pyright: ignore[reportPrivateImportUsage]
        except Exception as error:
            text = f"{field} must pickle, since it decides in another process: {type(error).__name__}: {error}"
            raise ConfigError(text, field=field) from error
    return config


class Kept:
    """One value."""

    def __init__(self, key: str):
        self._key = key.encode()

    def get(self) -> Any | None:
        raw = internal_kv._internal_kv_get(self._key)
        return None if raw is None else pickle.loads(raw)

    def put(self, value: Any, *, overwrite: bool = True) -> bool:
        """Whether the value is there now; False: another one was, and `overwrite` is not set."""
        # As Ray passes arguments: a policy may have functions of the user's script in it, which is another program here.
        data = cloudpickle.dumps(value)  # pyright: ignore[reportPrivateImportUsage]
        existed = internal_kv._internal_kv_put(self._key, data, overwrite=overwrite)
        return overwrite or not existed

    def delete(self) -> None:
        internal_kv._internal_kv_del(self._key)


def cluster_token() -> str:
    """A random name of this Ray cluster incarnation, the same in all its processes.

    Ray has no public id of a cluster, so one is kept in its key-value store (tests/cluster notices if that changes).
    """
    kept = Kept("raystate:cluster")
    kept.put(secrets.token_hex(6), overwrite=False)
    return str(kept.get())


def is_dead(identity: str, config: StateConfig, writer: str) -> bool:
    """Whether it is known of the writer of the run's newest entry. An actor's name is unique in its cluster: who had it before is dead.

    Says it if the run lives under another name in this cluster, whose memory is out of reach then.

    Args:
        identity: of the Coordinator that asks: its cluster's token and its run's hash, with a "." between them.
    """
    cluster, mine = identity.split(".")
    before = [*writer.split("."), ""][1]
    if writer.startswith(f"{cluster}.") and before != mine and find_actor(coordinator_name(before)) is not None:
        logger.warning(
            "run %r is in %s now, and was at another path when it last trained on this cluster: the newest snapshots in memory stay "
            "with that path, and it goes on from its newest durable step. Stop a run before its folder is moved or linked",
            config.run, config.storage,
        )  # fmt: skip
    return writer.startswith(f"{identity}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """The run that has a storage in this cluster."""

    run: str
    run_hash: str


def take_storage(storage_url: str, mine: Tenant, is_alive: Callable[[Tenant], bool]) -> Tenant | None:
    """Make `mine` the only run of this cluster that has the storage; else the one that has it.

    Actors are named by storage and run, so two runs of different names would share a storage unnoticed. Each tenant creates an entry
    of the next number, once: of two that follow the same dead one, one gets it. The newest entry stays for ever, a few bytes for a
    storage; whether its run is alive, its Coordinator's name tells.

    Args:
        storage_url: canonical.
        mine: the run that asks.
        is_alive: whether a run's Coordinator is.
    """
    prefix = f"raystate:tenant:{hashlib.sha256(storage_url.encode()).hexdigest()[:32]}:"
    while True:
        numbers = sorted(int(key.decode().removeprefix(prefix)) for key in internal_kv._internal_kv_list(prefix.encode()))
        newest = numbers[-1] if numbers else 0
        tenant: Tenant | None = Kept(f"{prefix}{newest}").get() if newest else None
        if tenant == mine:
            return None
        if tenant is not None and is_alive(tenant):
            return tenant
        if Kept(f"{prefix}{newest + 1}").put(mine, overwrite=False):
            for old in numbers:
                Kept(f"{prefix}{old}").delete()
            return None
