"""JAX jobs of several processes that wait for orders: this process, and groups of others."""

from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.processes import free_port, job_environment
from tests.reshard import cases as sizes
from tests.reshard.cases import Case, hold_share, reshard_share, restore_share, save_share


class Here:
    """This process: 8 devices."""

    devices = 8

    def save(self, case: Case, root: str, parts: Path) -> None:
        (parts / "0").write_bytes(pickle.dumps(save_share(case, root)))

    def restore(self, case: Case, root: str) -> list[dict[str, int]]:
        return [restore_share(case, root)]

    def hold(self, case: Case, parts: Path) -> None:
        (parts / "0.held").write_bytes(pickle.dumps(hold_share(case)))

    def reshard(self, case: Case, order: dict[str, Any]) -> list[dict[str, int]]:
        return [reshard_share(case, order)]

    def close(self) -> None:
        pass


class Group:
    """A JAX job of several processes, waiting for orders."""

    def __init__(self, processes: int, devices: int, log: Path):
        self.devices = processes * devices
        port, environment = free_port(), job_environment(devices)
        script = str(Path(__file__).with_name("worker.py"))
        self._log = open(log, "wb")  # noqa: SIM115 - closed with the group
        self._processes = [
            subprocess.Popen(
                [sys.executable, script, str(processes), str(index), str(port)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment,
            )
            for index in range(processes)
        ]  # fmt: skip

    def _order(self, **order: Any) -> list[dict[str, Any]]:
        line = json.dumps({"chunk_bytes": sizes.CHUNK_BYTES, **order}).encode() + b"\n"
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()
        answers: list[dict[str, Any]] = []
        for process in self._processes:
            assert process.stdout is not None
            got = process.stdout.readline()
            assert got, f"a process has ended: {Path(self._log.name).read_text()[-3000:]}"
            answers.append(json.loads(got))
        errors = [answer["error"] for answer in answers if "error" in answer]
        assert not errors, errors[0]
        return answers

    def save(self, case: Case, root: str, parts: Path) -> None:
        self._order(do="save", case=dataclasses.asdict(case), root=root, parts=str(parts))

    def restore(self, case: Case, root: str) -> list[dict[str, int]]:
        return self._order(do="restore", case=dataclasses.asdict(case), root=root)

    def hold(self, case: Case, parts: Path) -> None:
        self._order(do="hold", case=dataclasses.asdict(case), parts=str(parts))

    def reshard(self, case: Case, order: dict[str, Any]) -> list[dict[str, int]]:
        return self._order(case=dataclasses.asdict(case), **order)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._log.close()
