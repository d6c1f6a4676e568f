"""Each worker of a node uses its own GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.gpu import on_ray
from tests.patience import PATIENCE_S

REPO = Path(__file__).parents[2]


@pytest.mark.long
def test_each_worker_of_a_node_is_shown_its_own_gpus(tmp_path: Path):
    """By Ray's own set-up of JAX, in a JaxTrainer with our callback."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as short:  # the path of a socket has few characters
        environment = {**os.environ, "JAX_PLATFORMS": "", "PYTHONPATH": str(REPO), "RAY_TMPDIR": short}
        subprocess.run([sys.executable, on_ray.__file__, tmp_path], check=True, env=environment, timeout=PATIENCE_S)
    seen = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
    shown = [one["visible"].split(",") for one in seen]
    assert [len(names) for names in shown] == [2, 2] and not {*shown[0]} & {*shown[1]}, "no device is shown to both"
    assert {*shown[0], *shown[1]} <= {*on_ray.GPUS.split(",")}, "the node's own names"
    assert [one["jax"] for one in seen] == ["0,1"] * 2, "JAX counts those that are shown"
