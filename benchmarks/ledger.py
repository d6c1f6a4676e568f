"""Costs of a long run's ledger: objects, bytes and requests, and the seconds to read it, to say where the time went, and to write
the page of `raystate report` and its numbers.

    python benchmarks/ledger.py [--quick] [--steps N] [--step-s SECONDS] [--json FILE]

The lines are made up, as those of a run whose steps take so long, with a durable save each 500 steps and a restart each 20,000. They go
through the writer of a Coordinator, on this thread and without its pauses, into a directory in memory, beside a log with an entry for
each of these saves. `raystate report` runs as a user starts it: its seconds have those of Python's start.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from raystate.core.formats.entries import LiveStep, key_of  # noqa: E402
from raystate.core.formats.log import claim_entry, next_entry  # noqa: E402
from raystate.core.formats.names import SaveId  # noqa: E402
from raystate.observe.goodput import goodput  # noqa: E402
from raystate.observe.ledger.lines import (  # noqa: E402
    EVENTS,
    AttemptBegan,
    GroupEnded,
    GroupJoined,
    GroupRestored,
    Line,
    LoggedRecovery,
    LoggedSave,
    Noted,
    RunLeft,
    Sampled,
    line_of,
)
from raystate.observe.ledger.reader import read_ledger  # noqa: E402
from raystate.observe.ledger.writer import LedgerWriter  # noqa: E402
from raystate.observe.timeline import sampled_every_s, timeline_of  # noqa: E402
from raystate.storage import RunLog, Storage, open_storage  # noqa: E402

SAVED_EVERY, LIVES, AGAIN, START_S = 500, 20_000, 3, 12.0  # steps, steps, steps, seconds
KEPT = 3  # durable steps
REQUESTS = {"read": 9, "write": 20, "list": 1, "delete": 6, "retries": 1}  # to storage, for a save
MOST_MIB, MOST_S = 50, 10  # of the ledger; for a report


def lines_of_steps(steps: int, step_s: float = 1.0) -> Iterator[list[Noted]]:
    """A Coordinator's lines of so many steps, in batches as its writer would make them."""
    n = step = 0
    now_s = 1.7e9

    def noted(*lines: Line) -> list[Noted]:
        nonlocal n
        n += len(lines)
        return [Noted(1, n - len(lines) + number, now_s, what) for number, what in enumerate(lines, 1)]

    yield noted(AttemptBegan(reason="the run starts", host="node-0"))
    while step < steps:
        group = f"g{step:08x}{'0' * 24}"
        first, begun_s = step, now_s + START_S
        now_s = begun_s
        yield noted(
            GroupJoined(group=group, world=8, hosts=("a" * 56, "b" * 56), ages={"asked": 11.0, "placed": 9.0, "process": 8.0})
        )
        yield noted(GroupRestored(group=group, step=step, tier="memory"))
        if step:
            cause = "the process of rank 3 died"
            yield noted(
                LoggedRecovery(attempt=1, group=group, cause=cause, step=step, tier="memory", seconds=15.0, steps_repeated=AGAIN)
            )
        sampled_s = now_s
        last = min(steps, first + LIVES)
        while step < last:
            due_s = sampled_s + sampled_every_s(now_s - begun_s)
            due = first + math.ceil((due_s - begun_s) / step_s)
            step = min(last, max(step + 1, due), step + SAVED_EVERY - step % SAVED_EVERY)
            now_s = begun_s + (step - first) * step_s
            batch: list[Noted] = []
            if step % SAVED_EVERY == 0:
                save = f"a1k{step // SAVED_EVERY}"
                batch += noted(LoggedSave(attempt=1, step=step, save=save, seconds=41.25, writing_s=38.5, nbytes=7 << 35))
            if step >= due or step == last:
                sampled_s, spent_s = now_s, (step - first) * step_s
                spent = {"saves": 0.0012 * spent_s, "restore": 2.5, "compilation": 3.25, "section:data": 0.01 * spent_s}
                batch += noted(
                    Sampled(
                        group=group,
                        step=step,
                        steps=step - first,
                        step_s=0.98 * step_s,
                        lived=now_s - begun_s,
                        spent=spent,
                        requests={name: float(many * step // SAVED_EVERY) for name, many in REQUESTS.items()},
                    )
                )
            yield batch
        if step < steps:
            yield noted(GroupEnded(group=group, how="died", cause="the process of rank 3 died"))
            step -= AGAIN
    yield noted(RunLeft(reason="all ranks have closed"))


def write_log(storage: Storage, steps: int, step_s: float = 1.0) -> int:
    """A log with an entry for each save; how many it has."""
    log = RunLog(storage)
    entry = claim_entry(None, "bench", "bench")
    log.append(entry)
    for number in range(1, steps // SAVED_EVERY + 1):
        step = number * SAVED_EVERY
        commit = LiveStep(
            step=step, save=SaveId(f"a1k{number}"), lineage="1.1.g", time_s=1.7e9 + step * step_s, metrics={"loss": 1000 / step}
        )
        gone = [(one.step, False, f"keep_last={KEPT}") for one in entry.live[: 1 - KEPT]] if len(entry.live) >= KEPT else []
        entry = next_entry(
            entry, attempt=1, writer="bench", carried=[key_of(one) for one in entry.intents], dead=(), commit=commit, retires=gone,
            reason="it was due",
        )  # fmt: skip
        done = log.append(entry)
        assert done.outcome == "ok", done
    return entry.seq


def reported(folder: str, *how: str) -> tuple[float, float, bytes]:
    """Seconds of `raystate report`, those that it computed, which a busy machine stretches less, and what it printed."""
    begin_s, before_s = time.perf_counter(), computed_s()
    done = subprocess.run([sys.executable, "-m", "raystate", "report", folder, *how], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    return time.perf_counter() - begin_s, computed_s() - before_s, done.stdout


def computed_s() -> float:
    """Processor time of the processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    """Exit status 0: within `MOST_MIB` and `MOST_S`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps: shows that it runs")
    parser.add_argument("--steps", type=int, default=10_000_000)
    parser.add_argument("--step-s", type=float, default=1.0, help="seconds of a step")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    asked = parser.parse_args()
    steps = 50_000 if asked.quick else asked.steps
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="raystate-bench-") as folder:
        storage = open_storage(folder)
        writer = LedgerWriter(storage, pause_s=0.0)
        writer.begin(1)
        lines = batches = 0
        begin_s = time.perf_counter()
        for batch in lines_of_steps(steps, asked.step_s):
            batches, lines = batches + 1, lines + len(batch)
            writer.put([line_of(one) for one in batch])
        wrote_s = time.perf_counter() - begin_s
        infos = storage.list(EVENTS)
        begin_s = time.perf_counter()
        content = read_ledger(storage)
        read_s = time.perf_counter() - begin_s
        begin_s = time.perf_counter()
        found = goodput(timeline_of(content.lines))
        told_s = time.perf_counter() - begin_s
        entries = write_log(storage, steps, asked.step_s)
        with tempfile.TemporaryDirectory() as beside:
            page = Path(beside) / "page.html"
            page_s, page_cpu_s, _ = reported(folder, "--out", str(page))
            page_bytes = page.stat().st_size
        json_s, json_cpu_s, told = reported(folder, "--json")
    figures = {
        "steps": steps, "lines": lines, "batches": batches, "objects": len(infos), "MiB": sum(info.size for info in infos) / 2**20,
        "lines left": len(content.lines), "seconds of writing": wrote_s, "ms a batch": 1000 * wrote_s / batches,
        "seconds of reading": read_s, "seconds of goodput": told_s, "goodput": found.ratio,
        "log entries": entries, "seconds of the page": page_s, "computed": page_cpu_s, "MiB of the page": page_bytes / 2**20,
        "seconds of --json": json_s, "computed for it": json_cpu_s, "MiB of --json": len(told) / 2**20,
        "unknown": found.seconds_by_cause["unknown"] / found.wall_s, "days": found.wall_s / 86400,
    }  # fmt: skip
    for name, value in figures.items():
        print(f"{name:>20} {value:,.3f}" if isinstance(value, float) else f"{name:>20} {value:,}")
    if asked.json:
        asked.json.write_text(json.dumps(figures))
    is_met = figures["MiB"] <= MOST_MIB and max(page_s, json_s) <= MOST_S
    print(f"goal: a ledger of at most {MOST_MIB} MiB, a report in at most {MOST_S} s: {'met' if is_met else 'MISSED'}")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
