"""The quickstart says what a person reads, and leaves nothing; README's script is short and needs raystate and JAX only."""

from __future__ import annotations

import ast
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from jobs.quickstart.__main__ import NO_RAY, SCRIPT
from tests.patience import PATIENCE_S

REPO = Path(__file__).parents[2]


LIBC = ctypes.CDLL(None)
PR_CAPBSET_DROP, CAPABILITIES = 24, 64


def start() -> subprocess.Popen[str]:
    """As somebody has it who isn't root, with a Ray as it comes."""
    environment = {**os.environ, "RAY_ADDRESS": "nobody.there:1"}  # which it has no use for
    environment.pop("RAY_worker_niceness", None)
    command = [sys.executable, "-m", "jobs.quickstart"]

    def begin() -> None:
        # What a shell starts in the background ignores Ctrl-C, and so would this.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for right in range(CAPABILITIES):
            LIBC.prctl(PR_CAPBSET_DROP, right, 0, 0, 0)

    return subprocess.Popen(command, cwd=REPO, env=environment, stdout=subprocess.PIPE, text=True, preexec_fn=begin)


def left(pid: int, started: list[psutil.Process]) -> list[str]:
    """Files of the quickstart that was this process, and what still runs of the processes that it had started."""
    return [str(path) for path in Path("/tmp").glob(f"raystate-{pid}-*")] + [str(one) for one in started if one.is_running()]


def test_six_lines_tell_of_a_kill_and_of_an_equal_end():
    deadline_s = time.monotonic() + PATIENCE_S
    lines: list[str] = [NO_RAY]
    while NO_RAY in lines[-1] and time.monotonic() < deadline_s:
        with start() as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(4)]
            started = psutil.Process(process.pid).children(recursive=True) if lines[3] else []
            lines += process.stdout.readlines()
    output = "".join(lines)
    assert process.returncode == 0, output
    assert len(lines) == 6
    assert all(re.match(r" *\d+\.\d s  \S", line) for line in lines)
    on_disk = re.search(r"kill -9 .*\. The newest step on disk is (\d+)\.", output)
    back = re.search(r"Started again, it stands at step (\d+), from memory, \d+\.\d s after the kill\.", output)
    assert on_disk and back
    assert int(on_disk[1]) < int(back[1]) < 300
    assert re.search(r"Both have done 300 steps; loss (0\.\d{4}) and \1\. Equal to the last bit: yes\.", output)
    assert len(started) > 5  # two trainings, and Ray
    assert left(process.pid, started) == []


def test_ctrl_c_leaves_nothing():
    with start() as process:
        assert process.stdout is not None
        lines = [process.stdout.readline(), process.stdout.readline()]  # by the second, both trainings hold shared memory
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        lines += process.stdout.readlines()
    assert process.returncode == 130 or NO_RAY in lines[1], lines
    assert left(process.pid, started) == []


def test_the_script_is_short_and_imports_nothing_but_jax_and_raystate():
    text = SCRIPT.read_text()
    assert len([line for line in text.splitlines() if line]) <= 27
    names = [one.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import) for one in node.names]
    assert {name.partition(".")[0] for name in names} == {"jax", "raystate", "time"}
