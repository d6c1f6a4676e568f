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

import pytest
from rich.console import Console

from jobs.striking import kill_family
from raystate.log_lines import OURS
from raystate.train.result import Recovery, RunResult
from raystate.train.terminal import Shown, calm, tell_end, tell_start, worker
from raystate.waits import SAID_AGAIN_S
from tests.cluster.training import REPO
from tests.patience import PATIENCE_S

OF_RANK_0 = """\
Starting JAX distributed service on [::]:42159
Connecting to JAX distributed service on 192.0.2.2:42159
[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1
loss 0.5
W1127 12:34:39.878165   23278 preemption_sync_manager.cc:147] Failed to retrieve preemption notice: UNAVAILABLE
Additional GRPC error information from remote target coordination_service while calling /xla.coordination
:UNKNOWN:Error received from peer  {grpc_message:"Socket closed", grpc_status:14}
W1127 12:34:39.878165   23278 my_loader.cc:7] a batch is short
F1127 12:34:39.878272   23278 client.h:80] Terminating process because the JAX distributed service detected fatal errors. This most
*** Check failure stack trace: ***
    @     0x7f3c1c0b8f0a  (unknown)
Fatal Python error: Aborted"""
OF_THE_COORDINATOR = """\
12:34:38 raystate lm: step 20 is durable
12:34:46 raystate lm: the process of rank 0 died; step 20 from memory, 1 step repeated, 1.2 s
12:34:47 raystate lm: WARNING: storage is slow"""

SLOW = re.compile(r"; this machine has a load of |; starting again$")  # of a busy machine


def test_what_processes_say_as_they_die_of_another_is_left_out() -> None:
    shown = Shown()
    assert shown.of(1, OF_RANK_0.splitlines()) == ["loss 0.5", "W1127 12:34:39.878165   23278 my_loader.cc:7] a batch is short"]
    assert shown.of(1, ["still dying"]) == []
    assert shown.of(2, ["lives"]) == ["lives"]
    told = ["A worker died or was killed while executing a task by an unexpected system error. To", "Workers killed: out of memory"]
    assert shown.of("raylet", told) == told[1:]


def test_the_pieces_of_gloos_line_are_left_out() -> None:
    pieces = ("[Gloo] Rank ", "0", " is connected to ", "1", " peer ranks. ", "Expected number of connected peer ranks is : ", "1")
    for cut in (1, 2, 3, 4, 5):
        assert Shown().of(1, ["".join(pieces[:cut]), "".join(pieces[cut:])]) == []


def test_a_process_with_the_number_of_a_dead_one_is_shown() -> None:
    now_s = 100.0
    shown = Shown(lambda: now_s)
    assert shown.of(1, OF_RANK_0.splitlines()[-4:]) == []
    assert shown.of(1, ["its last"]) == []
    now_s += SAID_AGAIN_S
    assert shown.of(1, ["loss 0.4"]) == ["loss 0.4"]


def test_raystates_own_lines_need_no_prefix_and_afterwards_rays_are_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, bool]] = []

    def theirs(data: dict[str, Any], file: Any, ignore_prefix: bool = False) -> None:
        shown.extend((line, ignore_prefix) for line in data["lines"])

    monkeypatch.setattr(worker, "print_worker_logs", theirs)
    ours, noise = OF_THE_COORDINATOR.splitlines(), OF_RANK_0.splitlines()[0]
    data: Any = {"pid": 1, "lines": ["loss 0.5", *ours, noise, "loss 0.4"]}
    for _ in range(2):
        with calm():
            worker.print_worker_logs(data, sys.stderr, False)
        assert shown == [("loss 0.5", False), *((line, True) for line in ours), ("loss 0.4", False)]
        shown.clear()
    worker.print_worker_logs(data, sys.stderr, False)
    assert shown == [(line, False) for line in data["lines"]]


@pytest.mark.parametrize(("workers", "told"), [(1, "1 worker"), (2, "2 workers"), ((1, 4), "1 to 4 workers")])
def test_the_first_line_tells_of_the_workers(workers: int | tuple[int, int], told: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="raystate"):
        tell_start("lm", workers)
    (line,) = caplog.records
    assert line.getMessage().startswith(f"{told} will start, which takes some seconds") and vars(line)["run"] == "lm"


def test_the_closing_table(caplog: pytest.LogCaptureFixture) -> None:
    known = Recovery(attempt=2, cause="rank 1 raised E: \x1b[31m", step=28, tier="memory", seconds=1.234, steps_repeated=0)
    file = io.StringIO()
    rays: Any = None
    ends = (known, Recovery(attempt=3, cause="died"))
    result = RunResult(step=60, path="/runs/lm", metrics={}, return_value=None, recoveries=ends, ray=rays)
    with caplog.at_level("INFO", logger="raystate"):
        tell_end(result, "lm", Console(file=file))
    assert caplog.messages == ["finished with step 60 in /runs/lm, after 2 restarts:"]
    table = file.getvalue().splitlines()
    assert [re.sub(" +", " ", line).strip() for line in table] == [
        "start why step from repeated seconds",
        r"2 rank 1 raised E: \x1b[31m 28 memory 0 1.2",
        "3 died ? ? ? ?",
    ]


FIT = """
import os, signal, sys
from pathlib import Path
import jax.numpy as jnp, jax, raystate

def train(config):
    with raystate.StateManager() as manager:
        restored = manager.restore_or_init(lambda: {"x": jnp.zeros(4)})
        for step in range(restored.step, 60):
            jax.experimental.multihost_utils.process_allgather(jnp.zeros(1))
            manager.save(step + 1, restored.state)
            mark = Path(config["out"]) / "killed"
            if step == 33 and jax.process_index() == 1 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
    print("trained by", jax.process_index())

import jax.experimental.multihost_utils
config = raystate.StateConfig(storage=sys.argv[1] + "/run", run="lr-0.003", save_every_steps=10)
raystate.fit(train, config, train_loop_config={"out": sys.argv[1]})
"""
SCRIPT = """
import sys
import jax.numpy as jnp, raystate

config = raystate.StateConfig(storage=sys.argv[1] + "/run", run="lr-0.003", save_every_steps=int(sys.argv[2]))
with raystate.StateManager(config) as manager:
    restored = manager.restore_or_init(lambda: {"x": jnp.zeros(4)})
    print("begins at", restored.step, flush=True)
    for step in range(restored.step, 4):
        manager.save(step + 1, restored.state)
"""


def terminal_of(program: str, tmp_path: Path, *arguments: str) -> list[str]:
    """The lines that a program shows there, and a busy machine's. A Ray of its own: the tests' one shows nothing in its driver."""
    (tmp_path / "job.py").write_text(program)
    mine, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"} | {"RAY_ADDRESS": "local"}
    process = subprocess.Popen(
        [sys.executable, "job.py", str(tmp_path), *arguments], cwd=tmp_path, env=environment | {"PYTHONPATH": str(REPO)},
        stdin=theirs, stdout=theirs, stderr=theirs, process_group=0,
    )  # fmt: skip
    os.close(theirs)
    found: list[bytes] = []
    reader = threading.Thread(target=_read, args=(mine, found))
    reader.start()
    try:
        assert process.wait(PATIENCE_S) == 0, b"".join(found).decode()
        reader.join(PATIENCE_S)
    finally:
        kill_family(process.pid)
    text = re.sub(r"\x1b\[[0-9;]*m", "", b"".join(found).decode())
    sys.stdout.write(text)
    return [line for line in text.splitlines() if not SLOW.search(line)]


def test_sixty_steps_of_two_workers_and_a_death(tmp_path: Path) -> None:
    lines = terminal_of(FIT, tmp_path)
    others = [line for line in lines if "trained by" not in line]
    assert len(others) < len(lines)
    assert len(others) <= 25
    *said, table, row = others
    assert all(re.match(OURS, line) and " raystate lr-0.003: " in line for line in said[1:]), said
    (told,) = [line for line in said if "the process of rank 1 died; step " in line]
    assert re.search(r"step \d+ from \w+, \d+ steps? repeated, \d+\.\d s$", told)
    durable = [line.partition(": ")[2] for line in said if line.endswith(" is durable")]
    assert durable[-1] == "step 60 is durable" and len(durable) <= 6
    assert "finished with step 60" in said[-1]
    assert table.split()[0] == "start" and "the process of rank 1 died" in row


CALM_FIT = """
import sys
import jax.numpy as jnp, raystate

def train(config):
    with raystate.StateManager() as manager:
        restored = manager.restore_or_init(lambda: {"x": jnp.zeros(4)})
        for step in range(restored.step, 20):
            manager.save(step + 1, restored.state)

config = raystate.StateConfig(storage=sys.argv[1] + "/run", run="lr-0.003", save_every_steps=10)
raystate.fit(train, config, num_workers=1)
"""


@pytest.mark.more
def test_a_calm_fit_says_one_line_for_each_thing_that_happens(tmp_path: Path) -> None:
    lines = terminal_of(CALM_FIT, tmp_path)
    events = (
        "this Ray was started",
        "1 worker will start",
        "begins without a step",
        "step 10 is durable",
        "step 20 is durable",
        "finished",
    )
    assert len(lines) == len(events), lines
    assert all(any(event in line for line in lines) for event in events)


@pytest.mark.more
def test_a_plain_script_says_little_and_says_where_its_state_is_from(tmp_path: Path) -> None:
    """No step but its last is durable: what is shown is its start."""
    for begins, restores in ((0, "begins without a step"), (4, "restores step 4 from storage")):
        lines = terminal_of(SCRIPT, tmp_path, "100")
        assert f"begins at {begins}" in lines
        others = [line for line in lines if "begins at" not in line and not line.endswith(" is durable")]
        assert len(others) <= 3
        assert any(f" raystate lr-0.003: {restores}" in line for line in others), others
        assert "this Ray was started by this process" in others[0]


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
