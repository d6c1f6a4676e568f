"""Two nodes with the same path on two disks: the run is refused before it trains, and leaves nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.striking import kill_family
from raystate.storage import run_hash
from tests.patience import PATIENCE_S
from tests.processes import REPO, job_environment

# A node of its own mounts, in which the run's folder lies on another disk.
ON_ANOTHER_DISK = 'mount -t tmpfs none "$0" && exec "$@"'
NEW_MOUNTS = ["unshare", "--map-root-user", "--mount", "bash", "-c", ON_ANOTHER_DISK]

DRIVER = """
import json, os, subprocess, sys, time
import ray
from ray.cluster_utils import Cluster
from ray.train import ScalingConfig
import raystate
from raystate.actors.naming import run_actors
from raystate.storage import run_hash
from jobs.striking import start_ray, kill_family
from tests.patience import PATIENCE_S
import psutil

disk, *new_mounts = json.loads(sys.argv[1])
node = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100 << 20}
cluster = start_ray(lambda: Cluster(initialize_head=True, head_node_args={**node, "resources": {"a": 1}}))
command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--address={cluster.address}", "--num-cpus=1"]
command += ["--resources", json.dumps({"b": 1}), f"--object-store-memory={100 << 20}"]
other = subprocess.Popen([*new_mounts, disk, *command], stdout=subprocess.DEVNULL)
try:
    ray.init(address=cluster.address, log_to_driver=False)
    end_s = time.monotonic() + PATIENCE_S
    while len([one for one in ray.nodes() if one["Alive"]]) < 2:
        assert time.monotonic() < end_s, "the second node does not come"
        time.sleep(0.1)

    def train():
        with raystate.StateManager() as manager:
            manager.restore_or_init(lambda: {"w": __import__("jax").numpy.zeros(3)})
            raise RuntimeError("it trains")

    @ray.remote(num_cpus=0, resources={"b": 0.1})
    def on_the_other():
        return {name: os.listdir(f"{disk}/{name}") if os.path.exists(f"{disk}/{name}") else [] for name in ("both", "other")}

    found = {"nodes": [one["NodeID"] for one in ray.nodes()]}
    for name, workers, resources in (("both", 2, {"CPU": 1}), ("other", 1, {"CPU": 1, "b": 0.5})):
        config = raystate.StateConfig(storage=f"{disk}/{name}", run=name, run_metadata={"git": "abc"})
        scaling = ScalingConfig(num_workers=workers, resources_per_worker=resources)
        try:
            raystate.fit(train, config, scaling_config=scaling)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        run = run_hash(config.storage, config.run)
        while run_actors(run):
            assert time.monotonic() < end_s, run_actors(run)
            time.sleep(0.1)
    found["there"] = ray.get(on_the_other.remote())
    with open(sys.argv[2], "w") as file:
        json.dump(found, file)
finally:
    kill_family(other.pid)
    ray.shutdown()
    cluster.shutdown()
"""


def test_two_disks_at_one_path_are_refused_with_both_hosts(tmp_path: Path) -> None:
    disk, result = tmp_path / "data", tmp_path / "found.json"
    disk.mkdir()
    if subprocess.run([*NEW_MOUNTS, str(disk), "true"], check=False, capture_output=True).returncode:
        pytest.skip("this system gives a process no mounts of its own: nothing can be another disk at the same path")
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, json.dumps([str(disk), *NEW_MOUNTS]), str(result)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPO, env=job_environment(1),
    )  # fmt: skip
    try:
        _, errors = driver.communicate(timeout=PATIENCE_S)
    finally:
        if driver.poll() is None:
            kill_family(driver.pid)
    assert driver.returncode == 0, errors[-3000:]
    found = json.loads(result.read_text())
    for name in ("both", "other"):
        assert found[name].startswith(f"ConfigError: storage: file://{disk}/{name} is not one place"), found
        assert all(node[:8] in found[name] for node in found["nodes"]), found
        assert not [*Path("/dev/shm").rglob(f"raystate-{run_hash(str(disk / name), name)}-*")], "an arena is left"
        assert not [*(disk / name).glob("*"), *found["there"][name]], "the refused run has begun"
