"""What the terminal of `fit` shows of a run whose ranks die."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from raystate.train.result import Recovery, RunResult
from raystate.train.terminal import Shown, calm, tell_end, tell_start, worker
from tests.cluster.training import REPO
from tests.patience import PATIENCE_S
from tests.processes import kill_family

OF_RANK_0 = """\
Starting JAX distributed service on [::]:42159
Connecting to JAX distributed service on 192.0.2.2:42159
[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1
loss 0.5
rank 0 has restored step 20: 3.9 KiB from this node's memory
W1127 12:34:39.878165   23278 preemption_sync_manager.cc:147] Failed to retrieve preemption notice: UNAVAILABLE
Additional GRPC error information from remote target coordination_service while calling /xla.coordination
:UNKNOWN:Error received from peer  {grpc_message:"Socket closed", grpc_status:14}
W1127 12:34:39.878165   23278 my_loader.cc:7] a batch is short
F1127 12:34:39.878272   23278 client.h:80] Terminating process because the JAX distributed service detected fatal errors. This most
*** Check failure stack trace: ***
    @     0x7f3c1c0b8f0a  (unknown)
Fatal Python error: Aborted"""
OF_THE_COORDINATOR = """\
raystate INFO attempt 1 of run 'lm' on file:///runs/lm
raystate INFO all 2 ranks have joined: lineage 1.1.38713715, on hosts ['1d5c1c24']
raystate INFO lineage 1.2.38713715 restores step 10 from storage: newest durable step: 10
raystate INFO step 20 is durable (save a1k1)
raystate WARNING lineage 1.2.38713715 has ended: rank 0 on host 1d5c1c24 exited: trainer rank 0 (pid 21382) died
raystate INFO lineage 1.4.14c85fd7 restores step 20 from memory: step 20 is complete in memory
raystate INFO all 2 ranks have restored step 20 from memory
raystate INFO the process of rank 0 died; step 20 from memory, 1 step repeated, 1.2 s
raystate WARNING storage is slow"""


def test_what_processes_say_as_they_die_of_another_is_left_out() -> None:
    shown = Shown()
    assert shown.of(1, OF_RANK_0.splitlines()) == ["loss 0.5", "W1127 12:34:39.878165   23278 my_loader.cc:7] a batch is short"]
    assert shown.of(1, ["still dying"]) == []
    assert shown.of(2, ["lives"]) == ["lives"]
    told = ["A worker died or was killed while executing a task by an unexpected system error. To", "Workers killed: out of memory"]
    assert shown.of("raylet", told) == told[1:]


def test_a_recovery_is_one_line() -> None:
    kept = [line.partition(" ")[2] for line in Shown().of(3, OF_THE_COORDINATOR.splitlines())]
    assert kept == [
        "INFO lineage 1.2.38713715 restores step 10 from storage: newest durable step: 10",
        "INFO step 20 is durable (save a1k1)",
        "INFO the process of rank 0 died; step 20 from memory, 1 step repeated, 1.2 s",
        "WARNING storage is slow",
    ]


def test_a_process_with_the_number_of_a_dead_one_is_shown() -> None:
    shown = Shown()
    assert shown.of(1, OF_RANK_0.splitlines()[-4:]) == []
    shown.of(3, OF_THE_COORDINATOR.splitlines()[1:2])
    assert shown.of(1, ["loss 0.4"]) == ["loss 0.4"]


def test_each_fit_begins_anew_and_leaves_rays_lines_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def theirs(data: dict[str, Any], file: Any) -> None:
        shown.extend(data["lines"])

    monkeypatch.setattr(worker, "print_worker_logs", theirs)
    begins, ended = OF_THE_COORDINATOR.splitlines()[2::2][:2]
    data: Any = {"pid": 1, "lines": [begins, ended]}
    for _ in range(2):
        with calm():
            worker.print_worker_logs(data, sys.stdout)
    worker.print_worker_logs(data, sys.stdout)
    assert shown == [begins, begins, begins, ended]


@pytest.mark.parametrize(("workers", "told"), [(1, "1 worker"), (2, "2 workers"), ((1, 4), "1 to 4 workers")])
def test_the_first_line_tells_of_the_workers(workers: int | tuple[int, int], told: str) -> None:
    file = io.StringIO()
    tell_start("lm", workers, Console(file=file))
    assert file.getvalue() == f"raystate: run 'lm' begins; {told} will start, which takes some seconds\n"


def test_the_closing_table() -> None:
    known = Recovery(attempt=2, cause="rank 1 raised E: \x1b[31m", step=28, tier="memory", seconds=1.234, steps_repeated=0)
    file = io.StringIO()
    rays: Any = None
    ends = (known, Recovery(attempt=3, cause="died"))
    result = RunResult(step=60, path="/runs/lm", metrics={}, return_value=None, recoveries=ends, ray=rays)
    tell_end(result, "lm", Console(file=file))
    first, *table = file.getvalue().splitlines()
    assert first == "raystate: run 'lm' has finished with step 60 in /runs/lm, after 2 restarts:"
    assert [re.sub(" +", " ", line).strip() for line in table] == [
        "start why step from repeated seconds",
        r"2 rank 1 raised E: \x1b[31m 28 memory 0 1.2",
        "3 died ? ? ? ?",
    ]


JOB = """
import os, signal, sys
from pathlib import Path
import jax.numpy as jnp, jax, raystate

def train(config):
    with raystate.StateManager() as manager:
        restored = manager.restore_or_init(lambda: {"x": jnp.zeros(4)})
        for step in range(restored.step, 6):
            jax.experimental.multihost_utils.process_allgather(jnp.zeros(1))
            manager.save(step + 1, restored.state, force=step == 2)
            manager.wait_until_finished()
            mark = Path(config["out"]) / "killed"
            if step == 3 and jax.process_index() == 0 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
    print("trained by", jax.process_index())

import jax.experimental.multihost_utils
raystate.fit(train, raystate.StateConfig(storage=sys.argv[1] + "/run", run="shown"), train_loop_config={"out": sys.argv[1]})
"""


@pytest.mark.long
def test_a_death_on_a_real_terminal(tmp_path: Path) -> None:
    """A Ray of its own: the tests' one shows nothing in its driver."""
    (tmp_path / "job.py").write_text(JOB)
    mine, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"PYTHONPATH": str(REPO)}
    process = subprocess.Popen(
        [sys.executable, "job.py", str(tmp_path)], cwd=tmp_path, env=environment, stdin=theirs, stdout=theirs, stderr=theirs,
        process_group=0,
    )  # fmt: skip
    family = psutil.Process(process.pid)
    os.close(theirs)
    found: list[bytes] = []
    reader = threading.Thread(target=_read, args=(mine, found))
    reader.start()
    try:
        assert process.wait(PATIENCE_S) == 0, b"".join(found).decode()
        reader.join(PATIENCE_S)
    finally:
        kill_family(family)
    text = re.sub(r"\x1b\[[0-9;]*m", "", b"".join(found).decode())
    lines = text.splitlines()
    assert sum("trained by" in line for line in lines) >= 1, text
    (told,) = [line for line in lines if "the process of rank 0 died; step " in line]
    assert re.search(r"step \d from \w+, \d steps? repeated, \d+\.\d s$", told)
    for noise in ("Gloo", "Traceback", "coordination", "JAX distributed", "A worker died", "has ended", "    @ "):
        assert noise not in text, text
    assert "raystate: run 'shown' has finished with step 6" in text
    assert len(lines) < 40, text


def _read(terminal: int, found: list[bytes]) -> None:
    while True:
        try:
            data = os.read(terminal, 4096)
        except OSError:  # the other end is closed
            data = b""
        if not data:
            os.close(terminal)
            return
        found.append(data)
