"""A server for the length of a `with` block, in a process of its own on a free port."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from raystate.core.formats.errors import StorageError
from raystate.testing.gcs.control import GcsControl
from raystate.testing.gcs.faults import Rules, parse_rules
from raystate.waits import ENDS_S, STARTS_S


class GcsServer(GcsControl):
    """A strict local Cloud Storage server, in memory.

        with GcsServer(buckets=["experiments"]) as server:
            os.environ.update(server.environment())
            server.faults([{"mode": "reset_after_commit", "kinds": ["upload"], "times": 1}])

    It ends with the block, or with this process, however that ends, and leaves nothing behind. Any number may run at a time.

    Args:
        buckets: to create at the start; names of 3 to 63 characters.
        port: 0: a free one.
        faults: rules from the start.
        strict: whether preconditions count.
        writes_per_object_s: changes per second and name that are let through; None: all. Cloud Storage lets 1 through.

    Raises:
        ConfigError: a rule, a bucket's name or the port is bad.
    """

    def __init__(
        self,
        buckets: Sequence[str] = (),
        *,
        port: int = 0,
        faults: Rules | str = (),
        strict: bool = True,
        writes_per_object_s: float | None = None,
    ):
        super().__init__("")
        rules = [rule.model_dump(exclude_unset=True) for rule in parse_rules(faults)]
        self._command = [
            sys.executable,
            "-m",
            "raystate.testing.gcs",
            "--lifeline",
            "--port",
            str(port),
            "--faults",
            json.dumps(rules),
        ]
        for bucket in buckets:
            self._command += ["--bucket", bucket]
        if not strict:
            self._command.append("--lax")
        if writes_per_object_s is not None:
            self._command += ["--writes-per-object-s", str(writes_per_object_s)]
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Of the server's process; None: it doesn't run."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start it and wait until it answers. Sets `url`.

        Raises:
            StorageError: it doesn't start; says why.
        """
        # Its standard input is the lifeline: the system closes it when this process ends. Ctrl-C is for this process.
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0)
        assert self._process.stdout is not None
        too_late = threading.Timer(STARTS_S, self._process.kill)
        too_late.start()
        line = self._process.stdout.readline()
        too_late.cancel()
        said = json.loads(line) if line else {"error": f"it ended, or said nothing for {STARTS_S:g} s"}
        if "error" in said:
            self.close()
            raise StorageError(f"the local Cloud Storage server did not start: {said['error']}", operation="start")
        self.url = said["url"]

    def close(self) -> None:
        """End it, with all that it holds, and wait for it. Again: nothing."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        try:
            process.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
