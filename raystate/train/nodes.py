"""Where a worker group's ranks should run next: on the nodes that hold their snapshots, as far as those are still there."""

from __future__ import annotations

import logging
import os
import socket
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray

from raystate.actors.draining import draining_nodes
from raystate.actors.rays import state
from raystate.machine.own_time import own_time
from raystate.machine.threads import map_in_threads
from raystate.waits import NODE_REACHED_S, SOON_S

logger = logging.getLogger(__name__)

_NO_PROXY, _NO_GRPC_PROXY = "no_proxy", "no_grpc_proxy"
NODE_LABEL = "ray.io/node-id"  # Ray sets this label on every node


def reach_directly() -> None:
    """Let this process reach the cluster's nodes past the proxies that its environment names: gRPC, which JAX speaks with its
    coordinator, would ask them for it, and wait. All else goes on as the environment says."""
    if not urllib.request.getproxies_environment():
        return
    addresses = [str(info["NodeManagerAddress"]) for info in ray.nodes() if info["Alive"]]
    there = os.environ.get(_NO_PROXY) or os.environ.get(_NO_PROXY.upper()) or ""
    os.environ[_NO_GRPC_PROXY] = ",".join(filter(None, [os.environ.get(_NO_GRPC_PROXY, there), *addresses]))
    for name in (_NO_PROXY, _NO_PROXY.upper()):
        if (named := os.environ.get(name) or there) != "*":  # which means all, if it stands alone
            os.environ[name] = ",".join(filter(None, [named, *addresses]))


def selectors(pinned: Sequence[str | None], *, own: Any, avoid: frozenset[str]) -> list[dict[str, str]]:
    """A label selector for each worker.

    Args:
        pinned: node id by rank; None: any but those to avoid.
        own: the user's label selector: a dict for all workers, a list of dicts, or None. Kept, and stronger than ours.
        avoid: nodes that are gone, or go away.
    """
    result: list[dict[str, str]] = []
    for rank, node in enumerate(pinned):
        # Ray may take seconds to notice that a node is gone, and until then would still place workers there.
        elsewhere = {NODE_LABEL: f"!in({','.join(sorted(avoid))})"} if avoid else {}
        ours = {NODE_LABEL: node} if node is not None else elsewhere
        theirs = own[rank] if isinstance(own, list) else own
        result.append({**ours, **(theirs or {})})
    return result


def places(per_worker: Mapping[str, float], *, held: Sequence[str], own: Any, most: int) -> dict[str, int]:
    """For how many workers there is room on each node that Ray calls alive.

    Args:
        per_worker: amounts by resource name.
        held: node id of each worker that runs: its resources are room, too.
        own: the user's label selector, as for `selectors`: a node has to match it, or one of them.
        most: no more than so many on a node.
    """
    free, holding = state.available_resources_per_node(), Counter(held)
    wanted = {name: amount for name, amount in per_worker.items() if amount > 0}
    found: dict[str, int] = {}
    for info in ray.nodes():
        node = info["NodeID"]
        if not info["Alive"] or not _matches(info["Labels"], own):
            continue
        has = {
            name: min(info["Resources"].get(name, 0.0), free.get(node, {}).get(name, 0.0) + holding[node] * amount)
            for name, amount in wanted.items()
        }
        found[node] = min([most, *(int(has[name] / amount + 1e-6) for name, amount in wanted.items())])
    return found


def places_elsewhere(per_worker: Mapping[str, float], *, group: Sequence[str], own: Any) -> dict[str, int]:
    """`places` on the nodes that are to stay and have none of the group's workers, which run on these nodes."""
    away = frozenset(group) | draining_nodes().keys()
    return {node: count for node, count in places(per_worker, held=group, own=own, most=len(group)).items() if node not in away}


def _matches(labels: Mapping[str, str], own: Any) -> bool:
    """Ray's own matching of label selectors has no Python call."""
    if not own:
        return True
    if isinstance(own, list):
        return any(_matches(labels, one) for one in own)
    return all(_has(labels.get(name), wanted) for name, wanted in own.items())


def _has(value: str | None, wanted: str) -> bool:
    negated, wanted = wanted.startswith("!"), wanted.removeprefix("!")
    inside = wanted[3:-1].split(",") if wanted.startswith("in(") and wanted.endswith(")") else [wanted]
    return (value in [one.strip() for one in inside]) != negated


def reachable(node_ids: frozenset[str]) -> frozenset[str]:
    """Those of the nodes that Ray calls alive and whose raylet takes a connection now."""
    known = {info["NodeID"]: info for info in ray.nodes() if info["Alive"] and info["NodeID"] in node_ids}

    def answers(info: dict[str, Any]) -> bool:
        return _answers(info["NodeManagerAddress"], info["NodeManagerPort"])

    found = map_in_threads(answers, [*known.values()], threads=32, name="raystate-probe")
    return frozenset(node for node, answer in zip(known, found, strict=True) if answer)


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=NODE_REACHED_S).close()
    except OSError:
        return False
    return True


def wait_for_room(rank_nodes: Iterable[str], resources_per_worker: Mapping[str, float], *, deadline_s: float) -> bool:
    """Wait until the nodes have what the group before held: a request made earlier is refused once and tried again up to 1 s later.

    Args:
        rank_nodes: the node that each worker is to be on.
        resources_per_worker: amounts by resource name.
        deadline_s: then False; the request will wait for the rest.
    """
    needed = {
        node: {name: each * count for name, each in resources_per_worker.items()} for node, count in Counter(rank_nodes).items()
    }
    end_s = own_time() + deadline_s
    while True:
        free = state.available_resources_per_node()
        if all(free.get(node, {}).get(name, 0) >= amount for node, wanted in needed.items() for name, amount in wanted.items()):
            return True
        if own_time() > end_s:
            return False
        time.sleep(SOON_S)
