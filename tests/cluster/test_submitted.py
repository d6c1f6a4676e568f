"""`ray job submit`, as docs/start.md has it: from any folder, edited in between, the run goes on where it was."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import raystate
from tests.patience import PATIENCE_S
from tests.processes import REPO


def documented(page: str) -> str:
    """The lines of the page's block that submits."""
    blocks = (REPO / "docs" / page).read_text().split("```")
    return next(block for block in blocks if "\nray job submit" in block).strip()


# Two workers of a submitted job are in tests/jobs/test_demo.py.
SMALL = (
    "model.d_model=32", "model.d_ff=64", "model.n_layers=1", "model.ngram=1", "data.seq_len=16", "data.max_bytes=131072",
    "train.batch_size=8", "train.eval_bytes=1024", "train.sample_bytes=0", "ray.num_workers=1",
)  # fmt: skip

# Ray's processes have the folder and the environment of this one.
CLUSTER = """
import os, sys
from jobs.demo import cluster
cluster.NODES = 0  # beside the head: nodes of one machine would unpack the job's files into one folder at once
with cluster.local_cluster() as address:
    print(address, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("token", [pytest.param(False, marks=pytest.mark.long, id="no token"), pytest.param(True, id="a token")])
def test_the_documented_line_resumes_from_any_folder_after_an_edit(tmp_path: Path, token: bool) -> None:
    """Also in a home where a script has started a Ray before: Ray 2.60 leaves a token there, and each cluster asks for it then."""
    checkout, elsewhere, home = (tmp_path / name for name in ("checkout", "elsewhere", "home"))
    for folder in ("configs", "jobs", "raystate"):
        shutil.copytree(REPO / folder, checkout / folder, ignore=shutil.ignore_patterns("__pycache__"))
    events = tmp_path / "events.jsonl"
    elsewhere.mkdir()
    home.mkdir()
    if token:
        (home / ".ray").mkdir()
        (home / ".ray" / "auth_token").write_text(secrets.token_hex(32))
    environment = {
        **os.environ,
        "HOME": str(home),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    del environment["RAY_AUTH_MODE"]
    # Ray tells a job's driver the address that it finds in this folder. In the common one a cluster of another test, which begins or
    # ends at this moment, has left its own, or none. A socket's path has room for few letters.
    ray_files = tempfile.mkdtemp(prefix="rs-")
    cluster = subprocess.Popen(
        [sys.executable, "-c", CLUSTER], cwd=elsewhere, env={**environment, "PYTHONPATH": str(REPO), "RAY_TMPDIR": ray_files},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert cluster.stdin is not None and cluster.stdout is not None
    try:
        environment["RAY_API_SERVER_ADDRESS"] = cluster.stdout.readline().strip()

        def submit(*settings: str) -> subprocess.CompletedProcess[str]:
            given = " ".join(f"--set {one}" for one in (*SMALL, f"train.events={events}", *settings))
            return subprocess.run(
                f"{documented('start.md')} {given}", shell=True, cwd=checkout, env=environment, capture_output=True, text=True,
                timeout=PATIENCE_S, check=False,
            )  # fmt: skip

        first = submit("train.steps=2")
        assert "finished: step 2" in first.stdout, (first.stdout + first.stderr)[-3000:]
        with (checkout / "jobs" / "train_lm.py").open("a") as script:
            script.write("# edited\n")
        second = submit("train.steps=3")
        assert "finished: step 3" in second.stdout, (second.stdout + second.stderr)[-3000:]
    finally:
        cluster.stdin.close()
        cluster.wait(PATIENCE_S)
        cluster.stdout.close()
        shutil.rmtree(ray_files, ignore_errors=True)
    storage = home / "runs" / "lm_cpu"
    assert raystate.Reader(storage).all_steps() == [2, 3]
    trained = [json.loads(line) for line in events.read_text().splitlines()]
    assert [event["step"] for event in trained if event["rank"] == 0] == [1, 2, 3], "a step was repeated"


def test_each_page_that_submits_has_the_mode_of_the_home() -> None:
    mode = documented("start.md").splitlines()[0]
    assert documented("tutorial.md").splitlines()[0] == mode
