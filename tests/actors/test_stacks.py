"""A process says where its Python is when it can't be asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from raystate.core.formats.messages import EndTrainers, HostId
from raystate.runtime.host import stacks
from raystate.runtime.host.doorbell import Hello
from tests.arena.sets import open_loop
from tests.patience import PATIENCE_S
from tests.processes import run_python

PROGRAM = """
import sys, threading
from pathlib import Path
from raystate.runtime.host import stacks

def waits_for_ever(lock):
    print("ready", flush=True)
    lock.acquire()

take_back = stacks.offer(Path(sys.argv[1]))
if sys.argv[2:] == ["take back"]:
    take_back()
lock = threading.Lock()
lock.acquire()
threading.Thread(target=waits_for_ever, args=(lock,), daemon=True).start()
lock.acquire()
"""


@pytest.fixture
def hangs(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_it_says_where_and_goes_on(hangs: subprocess.Popen[str], tmp_path: Path):
    for _ in range(2):
        told = stacks.take(tmp_path, hangs.pid, timeout_s=PATIENCE_S)
        first, _, others = told.partition("\n\n")
        assert "in <module>" in first, "the main thread comes first"
        assert "in waits_for_ever" in others
    assert hangs.poll() is None


def test_a_process_that_is_stopped_writes_nothing(hangs: subprocess.Popen[str], tmp_path: Path):
    os.kill(hangs.pid, signal.SIGSTOP)
    assert stacks.take(tmp_path, hangs.pid, timeout_s=0.3) == ""


def test_a_process_that_offers_none_gets_no_signal(tmp_path: Path):
    """It would be its end."""
    program = [sys.executable, "-c", PROGRAM, str(tmp_path), "take back"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert stacks.take(tmp_path, process.pid) == ""
        assert process.poll() is None
        assert list(tmp_path.iterdir()) == []
        process.kill()


def test_a_program_that_uses_the_signal_keeps_it(tmp_path: Path):
    mine = signal.signal(stacks.SIGNAL, lambda *_: None)
    try:
        stacks.offer(tmp_path)()
        assert list(tmp_path.iterdir()) == []
    finally:
        signal.signal(stacks.SIGNAL, mine)


def test_what_killed_processes_left_is_swept_and_of_living_ones_kept(hangs: subprocess.Popen[str], tmp_path: Path):
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    (tmp_path / f"stacks-{gone.pid}").touch()
    (tmp_path / "stacks-of-somebody").touch()
    stacks.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([f"stacks-{hangs.pid}", "stacks-of-somebody"])


FAULTHANDLER = """
import faulthandler, os, sys
from pathlib import Path
from raystate.runtime.host import stacks

with open(Path(sys.argv[1], "mine"), "w") as file:
    faulthandler.register(stacks.SIGNAL, file=file)
    stacks.offer(Path(sys.argv[1]))()
    os.kill(os.getpid(), stacks.SIGNAL)
print("alive")
"""


def test_a_programs_own_faulthandler_stays(tmp_path: Path):
    """It was replaced, and at the end unregistered: the next signal ended the process."""
    assert run_python("-c", FAULTHANDLER, tmp_path).stdout == "alive\n"
    assert "<module>" in (tmp_path / "mine").read_text()


TWO = """
import os, signal, sys
from pathlib import Path
from raystate.runtime.host import stacks

first, second = Path(sys.argv[1], "first"), Path(sys.argv[1], "second")
first.mkdir(), second.mkdir()
end_first, end_second = stacks.offer(first), stacks.offer(second)
if sys.argv[2] == "a program's own":
    signal.signal(stacks.SIGNAL, lambda *_: print("mine", flush=True))
    end_first()
    os.kill(os.getpid(), stacks.SIGNAL)
else:
    end_first()
    assert stacks.take(second, os.getpid(), timeout_s=1.0) == "", "nobody offers them, so nobody sends the signal"
    end_second()
    stacks.offer(second)
    assert "<module>" in stacks.take(second, os.getpid(), timeout_s=60.0)
print("alive")
"""


@pytest.mark.parametrize(("case", "said"), [("two managers", "alive\n"), ("a program's own", "mine\nalive\n")])
def test_the_signal_ends_no_process(tmp_path: Path, case: str, said: str):
    assert run_python("-c", TWO, tmp_path, case).stdout == said


@pytest.mark.parametrize("leaves", [True, False])
def test_a_trainer_that_leaves_while_it_is_looked_at_is_not_killed(leaves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its number may be another process's by then."""
    killed: list[int] = []
    loop = open_loop(tmp_path, tell=lambda _: None, kill=lambda pid, _: killed.append(pid))
    hello = Hello(rank=1, world=2, lineage="1.1.g", incarnation="t", set_index=-1)

    def take(*_: object) -> str:
        if leaves:
            loop.part(3, hello, said_bye=True)
        return ""

    monkeypatch.setattr(stacks, "take", take)
    try:
        loop.meet(3, 77, hello)
        loop.order(EndTrainers(host=HostId("h"), lineage="1.1.g", reason="it hangs", attempt=1, hanging=(1,)))
        for thread in threading.enumerate():
            if thread.name == "raystate-stacks":
                thread.join(PATIENCE_S)
        assert killed == ([] if leaves else [77])
    finally:
        loop.close(remove_arena=True)
