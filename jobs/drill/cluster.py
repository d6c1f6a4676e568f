"""Machines to break: several Ray nodes on this machine, with a storage and with clocks that can be broken, too."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import struct
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from jobs.arenas import arenas, remove_arenas
from jobs.striking import drain, family, kill_all, lose_node, raylet_of, start_ray

NODES = 3  # beside the head: one for each rank, and one that waits
TRAINER = "drill-trainer"  # the Ray resource that keeps trainers off the head
NODE = {"num_cpus": 2, "resources": {TRAINER: 1}, "object_store_memory": 100 << 20}
HEAD = {"num_cpus": 2, "object_store_memory": 100 << 20, "include_dashboard": False}
# A dead node is noticed within two or three seconds, not fifteen.
NOTICED = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
    "health_check_timeout_ms": 2000,  # of one that is stopped; 10 s by default, four times
}
NODE_DEAD_S = 60.0  # by which Ray has given up a node that doesn't answer
NOTICE_S = 60  # of a drain: so long that a run which waited for it would be late
RENAME_EXCHANGE, AT_FDCWD = 2, -100
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",  # nobody reads them
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # raystate has its own
    "RAY_worker_niceness": "0",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}  # fmt: skip


class Simulated:
    """A head and `NODES` nodes on this machine, ended with all their processes by `close`.

    Attributes:
        address: of the cluster.
        storage: the directory of the run.
        folder: of all that the drill writes.
    """

    simulated = True

    def __init__(self, folder: Path):
        self.folder = folder
        self.storage = str(folder / "storage" / "run")
        self._blocked = folder / "storage" / "blocked"
        self._points = folder / "points"
        self._clocks = folder / "clocks"
        self._nodes: dict[str, Any] = {}  # by Ray's node id
        self._clock_of: dict[str, Path] = {}
        self._stopped: dict[str, list[psutil.Process]] = {}  # the processes of a node, also once their raylet is gone
        self._made = 0
        for path in (Path(self.storage), self._points, self._clocks):
            path.mkdir(parents=True)
        self._blocked.write_text("storage is out\n")
        self._before = psutil.Process().children(recursive=True)

    def start(self) -> None:
        """Start the nodes; `address` is known then."""
        from ray.cluster_utils import Cluster

        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        os.environ["RAYSTATE_FAULT_POINTS"] = str(self._points)  # all that Ray starts inherits them
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(self.folder / "compiled")
        clock, variables = self._new_clock()
        head = {**HEAD, "_system_config": NOTICED, "env_vars": variables}
        self._cluster: Any = start_ray(lambda: Cluster(initialize_head=True, head_node_args=head))
        self._clock_of[self._cluster.head_node.node_id] = clock
        self.address = self._cluster.address
        for _ in range(NODES):
            self.add_node()

    def add_node(self) -> None:
        """One more node, with a clock of its own. It is ready some seconds later."""
        clock, variables = self._new_clock()
        node = start_ray(lambda: self._cluster.add_node(wait=False, env_vars=variables, **NODE))
        self._nodes[node.node_id] = node
        self._clock_of[node.node_id] = clock

    def _new_clock(self) -> tuple[Path, dict[str, str]]:
        """(its file, what makes Python programs read it)."""
        self._made += 1
        clock = self._clocks / str(self._made)
        clock.write_bytes(struct.pack("d", 0.0))
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent / "clock"), os.environ.get("PYTHONPATH")]))
        return clock, {"RAYSTATE_DRILL_CLOCK": str(clock), "PYTHONPATH": path}

    def processes(self, node: str) -> list[psutil.Process]:
        """The raylet and all that it has started; none if it is gone."""
        return family(raylet_of(self._nodes[node])) if node in self._nodes else []

    def has_clock(self, node: str) -> bool:
        """Whether this node's clock is the drill's to set."""
        return node in self._clock_of

    def has(self, node: str) -> bool:
        """Whether its raylet lives."""
        return bool(self.processes(node))

    def given_up(self, node: str) -> bool:
        """Whether Ray takes it for dead."""
        import ray

        return not any(one["NodeID"] == node and one["Alive"] for one in ray.nodes())

    def is_alive(self, _node: str, pid: int) -> bool:
        """Whether the process is there, and not one that nobody has buried yet."""
        try:
            return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        except psutil.NoSuchProcess:
            return False

    def send(self, _node: str, pid: int, number: int) -> bool:
        """A signal; False: there is no such process."""
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    # ------------------------------------------------------------ nodes

    def spares(self, used: Iterable[str]) -> list[str]:
        """The nodes that nobody trains on."""
        return sorted(self._nodes.keys() - set(used))

    def lose(self, node: str) -> None:
        """What a vanished machine takes with it: all processes, and what it had in shared memory."""
        lose_node(self._cluster, self._nodes.pop(node), self._stopped.pop(node, ()))

    def stop(self, node: str) -> None:
        """SIGSTOP to all of its processes."""
        self._stopped[node] = self.processes(node)
        for process in self._stopped[node]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)

    def resume(self, node: str) -> None:
        """SIGCONT to all of them: they go on where they were, until the raylet learns that Ray has given it up, and ends."""
        for process in self._stopped.get(node, ()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)

    def wait_gone(self, node: str, timeout_s: float) -> None:
        """Give those that were stopped the time to do what they would do, and to end."""
        psutil.wait_procs(self._stopped.get(node, ()), timeout=timeout_s)

    def announce(self, node: str) -> None:
        """What a preempted node's cloud has Ray do."""
        drain(self.address, node, within_s=NOTICE_S)

    def jump(self, node: str, by_s: float) -> None:
        """The node's wall clock, for the Python programs on it."""
        clock = self._clock_of[node]
        (ahead_s,) = struct.unpack("d", clock.read_bytes())
        with open(clock, "r+b") as file:  # in place: it is mapped
            file.write(struct.pack("d", ahead_s + by_s))

    # ------------------------------------------------------------ storage

    def swap_storage(self) -> None:
        """Put a plain file where the storage is, or the storage back, at once: meanwhile every access to it is an error."""
        libc = ctypes.CDLL(None, use_errno=True)
        here, there = os.fsencode(self.storage), os.fsencode(self._blocked)
        if libc.renameat2(AT_FDCWD, here, AT_FDCWD, there, RENAME_EXCHANGE):
            raise OSError(ctypes.get_errno(), "the storage can't be exchanged")

    def hold_writes(self) -> None:
        """Whoever is about to write a part of a step, or to publish one, stands still."""
        for point in ("writing", "publishing"):
            (self._points / f"{point}.hold").touch()

    def let_writes_go(self) -> None:
        for path in self._points.iterdir():
            path.unlink()

    # ------------------------------------------------------------ end

    def left_behind(self, run_hash: str) -> list[str]:
        """What a run that has ended has left in shared memory."""
        return [str(arena) for arena in arenas(run_hash=run_hash)]

    def keep_logs(self) -> None:
        """Put Ray's logs into the folder."""
        shutil.copytree(
            self._cluster.head_node.get_logs_dir_path(), self.folder / "logs", ignore_dangling_symlinks=True, dirs_exist_ok=True
        )

    def close(self) -> None:
        """End all that was started."""
        import ray

        ray.shutdown()
        with contextlib.suppress(Exception):  # what is left is ended below
            self._cluster.shutdown()
        left = [process for process in psutil.Process().children(recursive=True) if process not in self._before]
        kill_all(left)
        for node in self._clock_of:
            remove_arenas(node)


@contextlib.contextmanager
def temporary_folder(keep: str | None) -> Any:
    """A folder for what the drill writes: removed at the end, unless somebody wants to keep it."""
    if keep is not None:
        folder = Path(keep).resolve() / time.strftime("drill-%Y%m%d-%H%M%S")
        folder.mkdir(parents=True)
        yield folder
        return
    folder = Path(tempfile.mkdtemp(prefix="raystate-drill-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
