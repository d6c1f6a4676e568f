"""What a step's barrier takes with many hosts on a real Ray: the last host reports, the Coordinator decides, every host has heard it.

    python benchmarks/barrier.py [--hosts 64] [--steps 20]

A real Coordinator, and an actor for each host that says what a HostActor says, and hears what it hears, with one rank each; without
memory of its own and without a trainer, so that many fit on one machine. All are to report each step at the same moment. `decided` is
the time from the last report to the moment when the last host knows that the step is complete everywhere; `all` begins when the first
was to report. Hosts of one machine share its cores: with 64 on a few cores, that is what takes the time, and Ray warns of
so many processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

START_S = 300.0  # of so many processes on few cores
STEP_S = 60.0
AHEAD_S = 0.3  # the word to report reaches every host within it
WARM_STEPS = 3


class Host:
    """A HostActor's part of the barrier: reports what it holds, at once when it is advised, as core/host/machine.py does."""

    def __init__(self, run_hash: str, host: str):
        from raystate.actors.naming import coordinator_name, find_actor

        self._coordinator: Any = find_actor(coordinator_name(run_hash))
        self._host, self._incarnation = host, secrets.token_hex(4)
        self._lock = threading.Condition()
        self._seq = 0
        self._seen: tuple[Any, ...] = ()
        self._held: tuple[Any, ...] = ()
        self._advice: Any = None
        self._base: Any = None
        self._complete_s: dict[int, float] = {}  # step -> when it was heard that all hold it

    def open(self) -> None:
        """There is nothing to open."""

    def pid(self) -> int:
        """Of this process."""
        return os.getpid()

    def show_to(self, job_id: str, level: int) -> None:
        """It prints no lines."""

    def close(self, remove_arena: bool) -> None:
        """There is nothing to close."""

    def _report(self) -> None:
        from raystate.core.formats.messages import HostId, HostReported, HostSummary

        self._seq += 1
        advice = self._advice
        summary = HostSummary(
            host=HostId(self._host), incarnation=self._incarnation, seq=self._seq, staged=self._held, trainers=self._seen,
            advised=None if advice is None else (advice.attempt, advice.seq), attempt=None if advice is None else advice.attempt,
            restore=self._base,
        )  # fmt: skip
        self._coordinator.tell.remote(HostReported(summary=summary))

    def order(self, order: Any) -> None:
        """Obey the Coordinator. Of restores it holds nothing that could go."""
        from raystate.core.formats.messages import Advice, Invalidate

        if isinstance(order, Advice):
            self._advise(order)
        elif isinstance(order, Invalidate):
            with self._lock:
                self._base = order
                self._report()

    def _advise(self, advice: Any) -> None:
        with self._lock:
            if self._advice is not None and (advice.attempt, advice.seq) <= (self._advice.attempt, self._advice.seq):
                return
            self._advice = advice
            self._complete_s.setdefault(advice.stable, time.time())
            self._lock.notify_all()
            self._report()

    def sees(self, claim: Any) -> bool:
        """It has no storage of its own, and one place is all that there is."""
        del claim
        return True

    def say(self, seen: tuple[Any, ...], held: tuple[Any, ...] = (), at_s: float = 0.0) -> float:
        """Report this, at that time. Returns when it was sent (seconds since 1970)."""
        time.sleep(max(0.0, at_s - time.time()))
        with self._lock:
            self._seen, self._held = seen, (*self._held[-2:], *held)
            self._report()
        return time.time()

    def complete_s(self, step: int) -> float:
        """When it was heard that all hold it."""
        with self._lock:
            if not self._lock.wait_for(lambda: step in self._complete_s, STEP_S):
                raise TimeoutError(f"host {self._host} has not heard of step {step} for {STEP_S:g} s")
            return self._complete_s[step]


class Run:
    """All hosts of a run that has begun, and its Coordinator."""

    def __init__(self, folder: Path, count: int):
        import ray

        import raystate
        from raystate.actors.admission import this_owner
        from raystate.actors.coordinator import ensure_coordinator
        from raystate.actors.naming import NAMESPACE, host_name
        from raystate.core.formats.messages import Ask, HostId, Joined, RestoreAsked, RestoreTried
        from raystate.storage import run_hash

        self._count, self._ids = count, [HostId(secrets.token_hex(28)) for _ in range(count)]
        config = raystate.StateConfig(
            storage=str(folder / "storage"), run="barrier", replicas=0, host_timeout_s=600.0, barrier_timeout_s=600.0
        )
        name = run_hash(config.storage, config.run)
        self.coordinator = ensure_coordinator(config, name, this_owner("barrier"))
        ray.get(self.coordinator.hello.remote(this_owner("barrier"), False), timeout=START_S)
        played: Any = ray.remote(Host)
        self.hosts = [
            played.options(
                name=host_name(name, host), namespace=NAMESPACE, lifetime="detached", num_cpus=0, max_concurrency=4
            ).remote(name, host)
            for host in self._ids
        ]
        ray.get([host.open.remote() for host in self.hosts], timeout=START_S)
        self._lineage = ""

        def asked(event: type, **fields: Any) -> list[Any]:
            asks = [
                event(ask=Ask(f"{event.__name__}{rank}"), rank=rank, **{key: of(rank) for key, of in fields.items()})
                for rank in range(count)
            ]
            return ray.get([self.coordinator.ask.remote(ask) for ask in asks], timeout=START_S)

        self._say(-1, number=0, lineage="")
        joined = asked(Joined, group=lambda _: "g", world=lambda _: count, host=lambda rank: self._ids[rank])
        self._lineage = joined[0].lineage
        self._say(-1, number=1)
        choice = asked(RestoreAsked, lineage=lambda _: self._lineage, word=lambda _: 1)[0]
        tried = {
            "step": lambda _: choice.step,
            "begins": lambda _: choice.begins,
            "ok": lambda _: True,
            "tier": lambda _: choice.tier,
        }
        asked(RestoreTried, lineage=lambda _: self._lineage, **tried)
        self._lineage = choice.begins

    def _say(
        self, newest: int, *, number: int = 2, lineage: str | None = None, held: bool = False, at_s: float = 0.0
    ) -> list[float]:
        import ray

        from raystate.core.formats.messages import Staged, TrainerWord

        of = self._lineage if lineage is None else lineage
        calls: list[Any] = []
        for rank, host in enumerate(self.hosts):
            seen = TrainerWord(rank=rank, world=self._count, lineage=of, newest_step=newest, number=number)
            piece = Staged(rank=rank, world=self._count, lineage=of, step=newest, layout="L", promised=False)
            calls.append(host.say.remote((seen,) if of else (), (piece,) if held else (), at_s))
        return ray.get(calls, timeout=START_S)

    def step(self, step: int) -> tuple[float, float]:
        """Seconds (from the last report, from when the first was to come) until every host knows that all hold the step."""
        import ray

        at_s = time.time() + AHEAD_S
        sent_s = self._say(step, held=True, at_s=at_s)
        heard_s = ray.get([host.complete_s.remote(step) for host in self.hosts], timeout=START_S)
        return max(heard_s) - max(sent_s), max(heard_s) - at_s

    def cpu_s(self) -> dict[str, float]:
        """Seconds of CPU that the Coordinator's process has taken, and the hosts' together."""
        import psutil
        import ray

        def spent(pid: int) -> float:
            times = psutil.Process(pid).cpu_times()
            return times.user + times.system

        pids: list[int] = ray.get([actor.pid.remote() for actor in (self.coordinator, *self.hosts)], timeout=START_S)
        return {"the Coordinator": spent(pids[0]), "all hosts": sum(map(spent, pids[1:]))}

    def close(self) -> None:
        """End its actors."""
        import ray

        for actor in (self.coordinator, *self.hosts):
            with contextlib.suppress(Exception):
                ray.kill(actor, no_restart=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # before the import of ray
    places = filter(None, [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join(places)
    load = os.getloadavg()[0]
    from benchmarks.side.measure import own_cluster

    with own_cluster(None) as folder, contextlib.closing(Run(folder, args.hosts)) as run:
        for step in range(1, WARM_STEPS + 1):
            run.step(step)
        began_s = run.cpu_s()
        found = [run.step(WARM_STEPS + number) for number in range(1, args.steps + 1)]
        cpu_ms = {name: 1e3 * (seconds - began_s[name]) / args.steps for name, seconds in run.cpu_s().items()}
    took = {"decided": [1e3 * one for one, _ in found], "all": [1e3 * one for _, one in found]}
    if args.json:
        print(json.dumps({"hosts": args.hosts, "ms": took, "cpu_ms": cpu_ms}))
        return
    print(f"{os.cpu_count()} cores, load {load:.1f} at the start; {args.hosts} hosts, {args.steps} steps")
    for name, values in took.items():
        print(f"{name:8} {statistics.median(values):.0f} ms ({min(values):.0f} to {max(values):.0f})")
    print("CPU time a step: " + ", ".join(f"{name} {value:.0f} ms" for name, value in cpu_ms.items()))


if __name__ == "__main__":
    main()
