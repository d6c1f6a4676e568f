"""A run of four ranks loses a node or two and goes on with two, on another mesh, from what the other nodes have in memory."""

# Ray's lazily loaded submodules are unknown to type checkers.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest

import raystate
from jobs.striking import lose_node, start_ray
from raystate.actors.naming import run_actors
from raystate.storage import run_hash
from tests.cluster.strikes import newest_in_memory
from tests.cluster.training import NODE, wait_for
from tests.patience import PATIENCE_S
from tests.processes import free_port, xla_flags

SHAPE = (64, 48)
ARRAYS = 3
ARRAY_BYTES = 64 * 48 * 4
DEVICES = 2  # of each rank


pytestmark = pytest.mark.usefixtures("by_value")


class Trainer:
    """One rank of a JAX job, as a launcher would start it."""

    def __init__(self, config: Any, *, rank: int, world: int, group: str, port: int):
        import jax

        from raystate.actors.launch_context import LaunchContext, set_context

        jax.distributed.initialize(f"127.0.0.1:{port}", world, rank)
        set_context(LaunchContext(config=config, group=group, rank=rank, world=world, launch="launch"))
        self.manager = raystate.StateManager()

    def _shardings(self, mesh: tuple[int, int], whole: int) -> list[Any]:
        import jax
        import numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        over = Mesh(np.array(jax.devices()).reshape(mesh), ("x", "y"))
        return [NamedSharding(over, PartitionSpec() if number < whole else PartitionSpec("x", "y")) for number in range(ARRAYS)]

    def restore(self, mesh: tuple[int, int], whole: int = 0) -> tuple[int, str, dict[str, int], list[list[tuple[Any, Any]]]]:
        """(step, tier, bytes by tier, this rank's shards of each array). All devices have all of the first `whole` arrays."""
        import jax.numpy as jnp
        import numpy as np

        def init() -> Any:
            return [number + jnp.arange(SHAPE[0] * SHAPE[1], dtype=jnp.float32).reshape(SHAPE) for number in range(ARRAYS)]

        restored = self.manager.restore_or_init(init, self._shardings(mesh, whole))
        self.state = restored.state
        shards = [[(one.index, np.asarray(one.data)) for one in leaf.addressable_shards] for leaf in self.state]
        return restored.step, restored.tier, restored.bytes_from, shards

    def save(self, step: int, *, force: bool = False) -> None:
        import jax

        self.state = jax.tree.map(lambda array: array * 2, self.state)
        assert self.manager.save(step, self.state, force=force) == force
        if force:
            self.manager.wait_until_finished()

    def close(self) -> None:
        self.manager.close()


def start(config: Any, nodes: list[Any]) -> list[Any]:
    """One rank on each node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    group, port = secrets.token_hex(4), free_port()
    variables = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags(DEVICES)}
    return [
        ray.remote(Trainer)
        .options(
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node.node_id, soft=False),
            runtime_env={"env_vars": variables},
        )
        .remote(config, rank=rank, world=len(nodes), group=group, port=port)
        for rank, node in enumerate(nodes)
    ]


def all_of(answers: list[Any]) -> list[Any]:
    import ray

    return ray.get(answers, timeout=PATIENCE_S)


@pytest.mark.long
@pytest.mark.parametrize(("lost", "replicas"), [(1, 1), (2, 2), (2, 1)], ids=["a node", "two nodes", "a failure domain"])
def test_four_ranks_lose_nodes_and_go_on_as_two(ray_cluster: Any, tmp_path: Path, lost: int, replicas: int) -> None:
    """Step 2 is durable, step 4 is only in memory: with as many copies of each rank's part as nodes are lost at once; or with one, when
    these nodes have a Ray label that says that they are lost together."""
    import numpy as np
    import ray

    config = raystate.StateConfig(
        storage=str(tmp_path / "run"), run="reshard", save_every_steps=1000, replicas=replicas, domain_labels=("rack",)
    )
    name = run_hash(config.storage, config.run)
    labels = {"rack": "r1"} if replicas < lost else {}
    added = [start_ray(lambda: ray_cluster.add_node(**NODE, labels=labels)) for _ in range(lost)]
    ray_cluster.wait_for_nodes(PATIENCE_S)
    nodes = [*[node for node in ray_cluster.list_all_nodes() if node not in added][: 4 - lost], *added]
    trainers = start(config, nodes)
    try:
        all_of([one.restore.remote((2, 4)) for one in trainers])
        all_of([one.save.remote(2, force=True) for one in trainers])
        all_of([one.save.remote(4) for one in trainers])
        wait_for(lambda: newest_in_memory(config, nodes=1 + replicas) == 4, "copies of step 4")
        assert raystate.Reader(config.storage).all_steps() == [2]

        for node in added:
            lose_node(ray_cluster, node)
        for one in trainers:
            ray.kill(one)

        trainers = start(config, nodes[:2])
        came = all_of([one.restore.remote((4, 1), whole=1) for one in trainers])
        expected = 4 * np.arange(SHAPE[0] * SHAPE[1], dtype=np.float32).reshape(SHAPE)
        for step, tier, bytes_from, shards in came:
            assert step == 4
            assert bytes_from["storage"] == 0
            # All of one array and half of the others, each byte once.
            assert bytes_from["memory"] + bytes_from["peer"] == ARRAY_BYTES + (ARRAYS - 1) * ARRAY_BYTES // 2
            if lost == 1:
                # Of the first array, whose four parts have two copies each on three nodes, a node has at least its own part and not all,
                # however the Coordinator has placed and renewed the copies. Of two nodes that are left, each may have all.
                assert tier == "peer"
                assert min(bytes_from["memory"], bytes_from["peer"]) >= ARRAY_BYTES // 4
            for number, parts in enumerate(shards):
                for index, data in parts:
                    assert data.tobytes() == (expected + 4 * number)[index].tobytes()

        all_of([one.save.remote(6, force=True) for one in trainers])
        all_of([one.close.remote() for one in trainers])
        arrays = raystate.Reader(config.storage).restore().state
        assert all(array.tobytes() == (2 * expected + 8 * number).tobytes() for number, array in enumerate(arrays))
    finally:
        for one in trainers:
            ray.kill(one)
        for node in ray_cluster.list_all_nodes():
            if node in added:
                ray_cluster.remove_node(node, allow_graceful=False)
    assert not run_actors(name)
