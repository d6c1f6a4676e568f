"""Half a minute: kill -9 ends a training, and it comes back from host memory at the step where it died.

    python -m jobs.quickstart

It runs train.py, the script beside this file, on a small Ray of its own, kills it in mid-run and starts it again. Beside
it plain.py trains the same with JAX alone, and is left alone; both must end equal to the last bit.

Exit codes: 0 everything held, 1 something did not, 130 Ctrl-C. Nothing is left behind in any of these cases.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

import raystate
from jobs.arenas import remove_arenas
from jobs.quickstart.plain import digest_of

SCRIPT = Path(__file__).with_name("train.py")
PLAIN = Path(__file__).with_name("plain.py")
# Steps. The script makes each 150th durable: however seldom it snapshots, memory has a newer one by then.
KILL_AFTER = 200
DEADLINE_S = 600  # for all of it: a machine that does much else takes minutes
END_S = 5.0  # for processes to end by themselves
NO_RAY = "Ray did not start"  # it waits 30 s, which a machine that does much else may need


class QuickstartFailed(Exception):  # noqa: N818 - the quickstart's own verdict, shown to a person
    """Something did not hold."""


class Training:
    """A script that trains, in a folder of its own."""

    def __init__(self, folder: Path, script: Path):
        self._folder, self._log, self._script = folder, folder / "log", script
        folder.mkdir()
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            command = [sys.executable, self._script]
            self._process = subprocess.Popen(command, cwd=self._folder, stdout=subprocess.PIPE, stderr=log, text=True)

    def kill(self) -> None:
        self._process.kill()  # SIGKILL, which is -9
        self._process.wait()

    def wait_for(self, beginning: str) -> str:
        """The rest of the next line of its output that begins so."""
        assert self._process.stdout is not None
        found = next((line for line in self._process.stdout if line.startswith(beginning)), None)
        if found is None:
            raise QuickstartFailed(
                f"{self._script.name} did not come as far as {beginning!r}; its log:\n{self._log.read_text()[-2000:]}"
            )
        return found.removeprefix(beginning).strip()

    def finish(self) -> None:
        """Wait until it has trained to its end."""
        if self._process.wait():
            raise QuickstartFailed(f"{self._script.name} failed; its log:\n{self._log.read_text()[-2000:]}")

    def saved(self) -> raystate.Reader:
        return raystate.Reader(self._folder / "runs" / "spirals")


@contextlib.contextmanager
def local_ray(folder: Path) -> Iterator[None]:
    """A Ray of this process, which the scripts join. It leaves no process and no shared memory, whatever happens."""
    import ray

    try:
        where: dict[str, Any] = {"_temp_dir": str(folder), "include_dashboard": False, "object_store_memory": 100 << 20}
        try:
            ray.init("local", num_cpus=4, log_to_driver=False, logging_level=logging.ERROR, **where)
        except Exception as error:  # Ray has no class for it
            raise QuickstartFailed(f"{NO_RAY}: {error}") from error
        for number in (signal.SIGTERM, signal.SIGALRM):  # after Ray has set its own
            signal.signal(number, signal.default_int_handler)
        signal.alarm(DEADLINE_S)
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would leave things behind
        nodes = [node["NodeID"] for node in ray.nodes()] if ray.is_initialized() else []
        processes = psutil.Process().children(recursive=True)
        ray.shutdown()
        for process in psutil.wait_procs(processes, timeout=END_S)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=END_S)
        for node in nodes:
            remove_arenas(node)


def quickstart(console: Console, folder: Path) -> None:
    began_s = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - began_s:5.1f} s[/]  {text}", highlight=False)

    say("A small network learns to tell two spirals apart: 300 steps, once with raystate and once with JAX alone.")
    with local_ray(folder):
        killed, alone = Training(folder / "killed", SCRIPT), Training(folder / "alone", PLAIN)
        killed.saved()  # imports what it needs while the processes start
        killed.wait_for("at step 0, from init")
        say("Both train. Snapshots go to host memory, each 150th step to disk, too.")
        killed.wait_for(f"step {KILL_AFTER}:")
        while not (on_disk := killed.saved().latest_step()):
            time.sleep(0.05)  # it is on its way there
        killed.kill()
        killed_s = time.monotonic()
        say(f"[bold red]kill -9[/] for one of them. The newest step on disk is {on_disk}.")
        killed.start()
        step, tier = killed.wait_for("at step ").split(", from ")
        back_s = time.monotonic() - killed_s
        say(f"[bold green]Started again, it stands at step {step}, from {tier}[/], {back_s:.1f} s after the kill.")
        if tier != "memory" or int(step) <= on_disk:
            raise QuickstartFailed(f"it came back at step {step} from {tier}, not from memory at one after {on_disk}")
        loss, digest = alone.wait_for("loss ").split(", weights ")
        killed.finish()
        end = killed.saved().restore()
        said = f"Both have done {end.step} steps; loss {end.metrics['loss']:.4f} and {loss}."
        if digest != digest_of(end.state):
            raise QuickstartFailed(f"{said} The weights differ")
        say(f"{said} [bold]Equal to the last bit: yes.[/]")
    say("Nothing is left behind. What was run: jobs/quickstart/train.py")


def main() -> int:
    as_it_is = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(prog="python -m jobs.quickstart", description=__doc__, formatter_class=as_it_is).parse_args()
    os.environ.update(JAX_PLATFORMS="cpu", RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
    console = Console(soft_wrap=True)
    try:
        # In /tmp, as Ray's own files: the names of its sockets must be short.
        with tempfile.TemporaryDirectory(prefix=f"raystate-{os.getpid()}-", dir="/tmp", ignore_cleanup_errors=True) as folder:
            quickstart(console, Path(folder))
    except QuickstartFailed as error:
        console.print(f"[bold red]It did not work:[/] {error}")
        return 1
    except KeyboardInterrupt:
        console.print(f"Interrupted, or not done after {DEADLINE_S} s. Nothing is left behind.")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
