"""A training on a Ray of its own, scraped by a Prometheus: with a kill, an outage of storage, a Reader, and a listener.

    python -m tests.cluster.scraped FOLDER

Ends well if each metric was scraped, each query of the dashboard is answered, and the listener heard of all. In a process of its own: the
other tests' Ray exports nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
import yaml
from ray import cloudpickle

import raystate
from raystate.observe.metrics import ALL, Metric
from raystate.testing.gcs import FaultRule, GcsServer
from tests.cluster import toy
from tests.cluster.training import Training, wait_for
from tests.debian import debian_program
from tests.docs.test_deploy import RULES, alerts, queries
from tests.processes import free_port

RUN = "scraped"
OUTAGE = FaultRule(status=503, kinds=("upload", "upload_start"))
REFUSED = FaultRule(status=403, kinds=("list",))
# This training does not have them: its rule for durable saves is a number. `tests/record/test_metrics.py` has them.
ELSEWHERE = {"raystate_durable_cost_seconds"}


class Prometheus:
    """Asks it."""

    def __init__(self, url: str):
        self.url = url

    def get(self, path: str, **parameters: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=30) as answer:
            return json.load(answer)["data"]

    def ask(self, query: str) -> list[dict[str, Any]]:
        """The series that the query gives now."""
        return self.get("query", query=query)["result"]

    def missing(self) -> set[str]:
        """Metrics of the table that it has no sample of."""
        found = {one["__name__"] for one in self.get("series", **{"match[]": f'{{run=~"{RUN}|",__name__=~"ray_raystate_.*"}}'})}
        return {metric.name for metric in ALL if shown(metric) not in found} - ELSEWHERE


def shown(metric: Metric) -> str:
    return f"ray_{metric.name}{'_count' if metric.kind == 'histogram' else ''}"


@contextlib.contextmanager
def prometheus(folder: Path) -> Iterator[Prometheus]:
    """Scrapes each node of this process's Ray every second, and has the rules that we ship."""
    program = debian_program("prometheus", package="prometheus")
    nodes = [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes() if node["Alive"]]
    given = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "ray", "static_configs": [{"targets": nodes}]}],
    }
    folder.mkdir(parents=True)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(given))
    address = f"127.0.0.1:{free_port()}"
    command = [program, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with open(folder / "prometheus.log", "wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: _is_ready(address), "Prometheus", failed=process.poll)
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait()


def _is_ready(address: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{address}/-/ready", timeout=5) as answer:
        return answer.status == 200
    return False


def more_until(training: Training, condition: Callable[[], Any], what: Callable[[], str]) -> None:
    """The training goes on as long as it takes until something was scraped: Ray sends what it has every ten seconds."""

    def look() -> Any:
        training.go_on(1)
        time.sleep(0.3)  # slow steps: they are to last
        return condition()

    try:
        wait_for(look, "what is to be scraped", failed=lambda: training.error)
    except AssertionError as error:
        raise AssertionError(f"{error}: {what()}") from None


def reads(storage: str) -> bool:
    reader = raystate.Reader(storage)
    if reader.latest_step() is None:
        return False
    reader.restore()
    return True


def check(asked: Prometheus) -> None:
    hosts = {node["NodeID"] for node in ray.nodes()}
    for metric in ALL:
        found = asked.ask(f'{shown(metric)}{{run="{RUN}"}}')
        assert all(one["metric"].get("host", "") in {"", *hosts} for one in found), found
        assert all(one["metric"].get(label) for one in found for label in metric.labels), found
    (recovery,) = asked.ask(f'ray_raystate_recoveries_total{{run="{RUN}"}}')
    assert (recovery["metric"]["cause"], recovery["metric"]["tier"], recovery["value"][1]) == ("died", "memory", "1"), recovery
    rules = [one for group in asked.get("rules")["groups"] for one in group["rules"]]
    assert {one["name"] for one in rules} == {one["alert"] for one in alerts()}
    assert {one["health"] for one in rules} == {"ok"}, rules
    for panel, query in queries():
        filled = query.replace("$run", RUN).replace("$__rate_interval", "2m")
        if "storage_failures" in query:
            filled = filled.replace(f'run=~"{RUN}"', 'run=""')  # the Reader's
        found = asked.ask(filled)
        assert found or any(name in query for name in ELSEWHERE), f"{panel}: {filled}"
        if "in the last" in panel:  # all that this training had, the first of each kind, too
            whole = {frozenset(one["metric"].items()): one["value"][1] for one in asked.ask(filled.partition(" - (")[0] + ")")}
            assert {frozenset(one["metric"].items()): one["value"][1] for one in found} == whole, panel


def measured(train_fn: Any, config: raystate.StateConfig, **more: Any) -> Any:
    """As users have it: what a step and a snapshot take is measured where the interval is automatic."""
    return raystate.fit(train_fn, config.replace(snapshot_every_steps=None), **more)


def main() -> None:
    folder = Path(sys.argv[1])
    heard: list[raystate.train.RunEvent] = []
    with GcsServer(buckets=["runs"]) as server:
        os.environ.update(server.environment())
        ray.init("local", num_cpus=4, resources={"trainer": 2}, include_dashboard=False, log_to_driver=False)
        cloudpickle.register_pickle_by_value(toy)
        config = raystate.StateConfig(storage=f"gs://runs/{RUN}", run=RUN, save_every_steps=2)
        with prometheus(folder / "prometheus") as asked:
            training = Training(
                config, folder / "out", steps=1000, step_s=0.01, pause_at=10, launch=measured, on_event=heard.append
            )
            training.wait_step(8)
            training.kill_trainer(1)
            training.wait_step(12)
            wait_for(lambda: reads(config.storage), "a step for a Reader", failed=lambda: training.error)
            server.faults([REFUSED])
            with contextlib.suppress(raystate.StorageError):
                raystate.Reader(config.storage).latest_step()
            server.faults([OUTAGE])
            more_until(training, lambda: "raystate_saves_lost_total" not in asked.missing(), lambda: str(asked.missing()))
            server.faults([])
            more_until(training, lambda: not asked.missing(), lambda: str(asked.missing()))
            more_until(
                training,
                lambda: asked.ask('ray_raystate_read_bytes_total{run="",tier="storage"}'),
                lambda: "what a Reader has read",
            )
            check(asked)
            training.finish()
            wait_for(
                lambda: not asked.ask(f'ray_raystate_training{{run="{RUN}"}}'), "the end of the run's gauges, though Ray goes on"
            )
        ray.shutdown()
    kinds = {event.kind for event in heard}
    assert {"durable", "recovery"} <= kinds, kinds
    assert len({event.step for event in heard if event.kind == "durable"}) == sum(one.kind == "durable" for one in heard)


if __name__ == "__main__":
    main()
