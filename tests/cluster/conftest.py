"""One Ray cluster for the whole session: three simulated nodes on this machine, each with room for one trainer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

import raystate
from jobs.striking import start_ray
from raystate.arena.locks import FileLock
from raystate.machine.fault_points import FOLDER
from raystate.testing.gcs import GcsServer
from tests.cluster import strikes, toy
from tests.cluster.training import NODE, NODES, STEPS, Training, pausing
from tests.patience import PATIENCE_S


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[GcsServer]:
    """A strict GCS server that everything uses which Ray starts."""
    with GcsServer(buckets=["runs"]) as server:
        os.environ.update(server.environment())
        yield server


@pytest.fixture(scope="module")
def by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ray's processes get this test module's classes and functions themselves: they can't import it."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


def _cluster() -> Any:
    """Of NODES nodes."""
    from ray.cluster_utils import Cluster

    # A dead node is noticed within a second or two, not fifteen.
    noticed = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
    # No process that looks ten times a second for what others have printed, and is read by no test here.
    head = {"include_dashboard": False, "include_log_monitor": False}
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, **head, "_system_config": noticed})
    for _ in range(NODES - 1):
        cluster.add_node(**NODE)
    return cluster


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory, gcs_server: GcsServer) -> Iterator[Any]:
    import ray
    from ray import cloudpickle

    os.environ[FOLDER] = str(tmp_path_factory.mktemp("fault-points"))  # everything that Ray starts inherits it
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"
    cluster = start_ray(_cluster)
    ray.init(address=cluster.address, namespace="tests", log_to_driver=False)
    cluster.wait_for_nodes(PATIENCE_S)
    cloudpickle.register_pickle_by_value(toy)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="session")
def undisturbed(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The digests of the end, by rank, of a run of STEPS steps that nobody disturbed."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "undisturbed"  # one for all processes of xdist
    folder.mkdir(exist_ok=True)
    digests = folder / "digests.json"
    lock = FileLock.take(folder, shared=False, directory=True, timeout_s=PATIENCE_S)
    assert lock is not None, "another process of these tests still trains the undisturbed run"
    with lock:
        if not digests.exists():
            config = raystate.StateConfig(storage=str(folder / "run"), run=f"calm-{os.getpid()}", save_every_steps=30)
            training = Training(config, folder / "out", steps=STEPS, step_s=0.0)
            training.finish()
            digests.write_text(json.dumps(training.digests()))
    return json.loads(digests.read_text())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    """A test that has failed leaves its training paused: that ends before the fixtures wait for what it has in memory."""
    while pausing:
        pausing.pop().go_to_end()


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:  # a process of xdist: what was killed here goes to the one that prints
        output["strikes"] = [[*cell, came] for cell, came in strikes.played.items()]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for victim, phase, came in getattr(node, "workeroutput", {}).get("strikes", ()):
        strikes.played[victim, phase] = came


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not strikes.played:
        return
    terminalreporter.section("kill -9, all ended bit-equal to the undisturbed run", sep="-")
    for line in strikes.table():
        terminalreporter.write_line(line)
