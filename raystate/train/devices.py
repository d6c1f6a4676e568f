"""Which GPUs a worker uses, and a process that waits to become a worker on a GPU.

Ray's JaxTrainer shows each worker of a node the GPUs 0 to n-1, so that several workers of a node all
get the first. Here a worker is shown those that Ray gave its process. A process that has waited holds
none, and is shown those of its place in the group's placement group.

NVIDIA's driver starts at `cuInit`: then it reads which devices it may use, and its context takes memory
of them. A process that waits loads CUDA's libraries and JAX's plugin, which takes most of the time,
and does not start the driver. So it has no device's memory, and any device may become its own.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import ray
from ray.train.v2.jax import config as jax_setup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raystate.patching import patch
from raystate.train.device_memory import wait_until_free
from raystate.waits import ANSWER_S

GPU = "GPU"  # the resource, as Ray calls it
_VISIBLE, _PLATFORMS, _CHECKED = "CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
_loaded: list[Any] = []  # in a process that waits: the plugin's library
_own: list[str] = []  # of a process that has waited


def prepare_worker(ended: Sequence[int]) -> None:
    """Let Ray's set-up of JAX, which runs in this process later, show JAX this worker's own GPUs, and wait for their memory.

    Args:
        ended: pids of the workers that this node had in the group before.
    """

    def set_up(*args: Any, **kwargs: Any) -> None:
        theirs(*args, **kwargs)  # it sets the variable, too, and doesn't start the driver
        if _is_cuda() and (own := _own or given()):
            os.environ[_VISIBLE] = ",".join(own)
            wait_until_free(ended, own)

    theirs = patch(jax_setup, "_setup_jax_distributed_environment", set_up)  # tests/cluster/test_train_internals.py


def given() -> list[str]:
    """The GPUs that Ray gave this process: numbers or names, in order."""
    names = [str(one) for one in ray.get_runtime_context().get_accelerator_ids().get(GPU, [])]
    return sorted(names, key=lambda name: (len(name), name))


def _is_cuda() -> bool:
    return "cuda" in os.environ.get(_PLATFORMS, "").lower().split(",")


# ---------------------------------------------------------------- a process that waits


def choose_cuda() -> None:
    """As Ray's set-up of JAX does later, where the environment names no platform."""
    os.environ[_PLATFORMS] = os.environ.get(_PLATFORMS) or "cuda"


def load_plugin() -> None:
    """Load what JAX loads before it starts the driver. The plugin's `initialize` is JAX's own, which can't call it a second time."""
    for name in _PLUGINS if _is_cuda() else ():
        try:
            plugin: Any = importlib.import_module(name)
        except ImportError:
            continue
        plugin._load_nvidia_libraries()
        plugin._import_extensions()
        _loaded.append(ctypes.CDLL(str(plugin._get_library_path())))
        return


def shown() -> list[str] | None:
    """The devices that this process's node shows it, by its environment; None: all.

    Raises:
        RuntimeError: it can't become a worker on a GPU: it has not loaded the plugin, or may see no device.
    """
    names = os.environ.get(_VISIBLE)
    if not _loaded or names == "":
        raise RuntimeError("Ray shows it no device" if _loaded else "it has no plugin of JAX's for CUDA")
    return None if names is None else names.split(",")


def become(names: Sequence[str]) -> None:
    """In a process that has waited: these devices are its own. JAX's versions were checked when the training began."""
    _own[:] = names
    os.environ.update({_VISIBLE: ",".join(names), _CHECKED: "1"})


# ---------------------------------------------------------------- in the controller


def give(actors: Sequence[Any], metadata: Sequence[Any], each: int, placement_group: Any) -> list[Any]:
    """Give processes that have waited the devices of their places.

    Args:
        actors: by place.
        metadata: Ray Train's, of each.
        each: devices of a place.
        placement_group: the group's.

    Returns:
        The metadata, with the devices.

    Raises:
        RayError: one of them can't become a worker on a GPU, has died, or has not answered in time.
    """
    visible = ray.get([actor.execute.remote(shown) for actor in actors], timeout=ANSWER_S)
    names = of_places([one.node_id for one in metadata], visible, each, placement_group)
    ray.get([actor.execute.remote(become, those) for actor, those in zip(actors, names, strict=True)], timeout=ANSWER_S)
    return [
        dataclasses.replace(one, accelerator_ids={**one.accelerator_ids, GPU: those})
        for one, those in zip(metadata, names, strict=True)
    ]


def of_places(nodes: Sequence[str], visible: Sequence[list[str] | None], each: int, placement_group: Any) -> list[list[str]]:
    """The devices of each place. Where a node's are all the group's, its places share them out; else Ray is asked there.

    Args:
        nodes: of the places.
        visible: what the place's node shows a process; None: all.
        each: devices of a place.
        placement_group: whose bundles the places are.
    """
    there = {info["NodeID"]: int(info["Resources"].get(GPU, 0)) for info in ray.nodes()}
    held, begun = Counter(nodes), Counter[str]()
    found: list[list[str]] = []
    asked: dict[int, Any] = {}
    for place, (node, some) in enumerate(zip(nodes, visible, strict=True)):
        names = [str(number) for number in range(there[node])] if some is None else some
        found.append(names[begun[node] : begun[node] + each])
        begun[node] += each
        if held[node] * each != there[node] or len(names) < there[node]:
            where = PlacementGroupSchedulingStrategy(placement_group, placement_group_bundle_index=place)
            asked[place] = ray.remote(num_cpus=0, num_gpus=each)(given).options(scheduling_strategy=where).remote()
    for place, names in zip(asked, ray.get([*asked.values()], timeout=ANSWER_S), strict=True):
        found[place] = names
    return found
