"""What the demo runs on: a Ray cluster of several nodes, and a bucket, both on this machine."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import tenacity

from jobs.arenas import remove_arenas

NODES = 2  # beside the head, which runs no trainer
BUCKET = "demo"
START_TIMEOUT_S = 180.0  # two minutes of a machine that does much else
LAST_EXPORT = "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"


class DemoFailed(Exception):  # noqa: N818 - the demo's own verdict, shown to a person
    """Something did not hold."""


@contextlib.contextmanager
def local_bucket(say: Callable[[str], None]) -> Iterator[str]:
    """A strict GCS server on this machine, which all that is started meanwhile uses; yields the name of a bucket."""
    command = [sys.executable, "-m", "raystate.testing.gcs", "--port", "0", "--bucket", BUCKET]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            exports = (re.match(r"\s*export (\w+)=(\S+)", line) for line in iter(server.stdout.readline, ""))
            for name, value in (found.groups() for found in exports if found):
                os.environ[name] = value
                if name == LAST_EXPORT:
                    break
            else:
                raise DemoFailed("the local GCS server did not start")
            say(f"A GCS server is up on this machine: {os.environ['STORAGE_EMULATOR_HOST']}, bucket {BUCKET}.")
            yield BUCKET
        finally:
            server.send_signal(signal.SIGINT)


@contextlib.contextmanager
def local_cluster(*, jobs: bool = True) -> Iterator[str]:
    """Ray nodes on this machine, ended with all their processes at the end.

    Args:
        jobs: a head and `NODES` more, of a Ray that takes jobs. Else a head and one more, with no dashboard.

    Yields:
        The dashboard's address, or without `jobs` that of Ray.

    Raises:
        DemoFailed: Ray did not start.
    """
    import ray
    from ray.cluster_utils import Cluster

    # Else Ray's processes have niceness 15, and next to nothing beside the run that is plain JAX.
    os.environ.setdefault("RAY_worker_niceness", "0")
    port = free_port()
    node: dict[str, Any] = {"num_cpus": 2, "resources": {"trainer": 1}, "object_store_memory": 100 << 20}
    head = {**node, "include_dashboard": False}
    if jobs:
        # The agent takes the jobs; by itself it has the same port in each Ray.
        takes_jobs = {"include_dashboard": True, "dashboard_port": port, "dashboard_agent_listen_port": free_port()}
        head = {**node, "resources": {}, **takes_jobs}
    cluster = Cluster()
    try:
        try:
            cluster.add_node(**head)
            for _ in range(NODES if jobs else 1):
                cluster.add_node(wait=False, **node)
            if jobs:
                ray.init(address=cluster.address, namespace="demo", log_to_driver=False, logging_level=logging.ERROR)
            cluster.wait_for_nodes()
        except Exception as error:  # Ray has no class for it, and its text may be a whole log
            why = str(error).strip().partition("\n")[0]
            raise DemoFailed(f"Ray did not start, for which it has 30 s. Try again when the machine does less. {why}") from error
        yield f"http://127.0.0.1:{port}" if jobs else str(cluster.address)
    finally:
        nodes = [one.node_id for one in cluster.list_all_nodes()]
        ray.shutdown()
        cluster.shutdown()
        for one in nodes:
            remove_arenas(one)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def submit(client: Any, entrypoint: str) -> str:
    """Submit a job to the cluster that this process has joined; it takes none until its dashboard's agent answers.

    Args:
        client: a JobSubmissionClient.

    Returns:
        The job's submission id.

    Raises:
        DemoFailed: it never takes one.
    """
    import ray

    # Ray tells a job the address that lies in its common folder, which may be that of another cluster of this machine.
    entrypoint = f"env RAY_ADDRESS={ray.get_runtime_context().gcs_address} {entrypoint}"
    no_agent_yet = tenacity.retry_if_exception(lambda error: "No available agent" in str(error))
    retrying = tenacity.Retrying(
        retry=no_agent_yet, wait=tenacity.wait_fixed(0.5), stop=tenacity.stop_after_delay(START_TIMEOUT_S), reraise=True
    )
    try:
        return retrying(client.submit_job, entrypoint=entrypoint, runtime_env={"working_dir": None})
    except RuntimeError as error:
        raise DemoFailed(f"Ray takes no job: {error}") from error
