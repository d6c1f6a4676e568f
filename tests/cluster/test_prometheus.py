"""A real Prometheus scrapes a run."""

from __future__ import annotations

import os
from pathlib import Path

from tests.debian import REPO, debian_program
from tests.processes import run_python


def test_each_metric_is_scraped_and_each_query_is_answered(tmp_path: Path) -> None:
    """And `on_event` of `fit` hears of it. In a process with a Ray of its own, which exports: see `scraped`."""
    debian_program("prometheus", package="prometheus")  # skipped here, where it can't be had
    environment = {**os.environ, "RAY_enable_metrics_collection": "1", "PYTHONPATH": str(REPO)}
    environment.pop("RAY_ADDRESS", None)
    run_python("-m", "tests.cluster.scraped", tmp_path / "scraped", env=environment, cwd=REPO)
