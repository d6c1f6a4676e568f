"""Whether all hosts of a worker group are of use, and see the storage of their Coordinator: asked when the group has joined."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import ray
from ray.exceptions import RayError

from raystate.actors.calling import own_error
from raystate.actors.naming import find_actor, host_name
from raystate.config.state_config import StateConfig
from raystate.core.formats.messages import Failure, HostId, Joined
from raystate.runtime.coordinator.one_storage import Claim, not_one_storage


class Places:
    """Of one Coordinator. Each HostActor is asked once."""

    def __init__(self, config: StateConfig, run_hash: str):
        self._config = config
        self._run_hash = run_hash
        self._hosts: dict[str, set[HostId]] = {}  # by worker group
        self._sees: dict[HostId, asyncio.Task[bool | Failure]] = {}

    def joins(self, event: Joined) -> None:
        """A trainer is about to join from there."""
        self._hosts.setdefault(event.group, set()).add(event.host)

    async def refusal(self, group: str, claim: Claim) -> tuple[Failure | None, bool]:
        """Why a group, all of whose trainers have joined, can't train; and whether the run can't go on without another configuration."""
        hosts = self._hosts.get(group, set())  # empty: a newer group has joined meanwhile
        self._hosts = {group: hosts}
        for host in hosts - self._sees.keys():
            self._sees[host] = asyncio.create_task(self._host_sees(host, claim))
        blind: list[HostId] = []
        for host in sorted(hosts):
            sees = await self._sees[host]
            if isinstance(sees, Failure):
                self._sees.pop(host, None)  # the next start asks again
                return sees, False
            if not sees:
                blind.append(host)
        return refused(self._config, blind) if blind else None, bool(blind)

    async def _host_sees(self, host: HostId, claim: Claim) -> bool | Failure:
        """Also if it can't be asked: then no trainer gets slots from it, and the start says so. A Failure: it can't be a host."""
        actor = find_actor(host_name(self._run_hash, host))
        try:
            return actor is None or await asyncio.wait_for(actor.sees.remote(claim), self._config.start_timeout_s)
        except (RayError, TimeoutError) as error:
            own = own_error(error)
            if own is None:
                return True
            text = f"the HostActor of {_told_nodes([host])[host]} can't begin: {own.message}"
            return Failure(error=type(own).__name__, message=text, details=own.details)


def refused(config: StateConfig, blind: list[HostId], coordinator: str = "") -> Failure:
    """See `not_one_storage`. `coordinator`: its node; "": this one."""
    here = coordinator or ray.get_runtime_context().get_node_id()
    told = _told_nodes([*blind, here])
    return not_one_storage(config.storage, {host: told[host] for host in blind}, told[here])


def _told_nodes(nodes: Iterable[str]) -> dict[str, str]:
    """How each is named to people."""
    machines = {str(node["NodeID"]): str(node["NodeManagerHostname"]) for node in ray.nodes()}
    return {node: f"node {node[:8]} ({machines.get(node, 'gone')})" for node in nodes}
