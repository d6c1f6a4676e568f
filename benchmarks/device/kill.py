"""kill -9 of the one trainer that has the device, until its next new step: the demo's language model, beside JaxTrainer with Orbax."""

from __future__ import annotations

import statistics
import sys

from benchmarks.device.goals import held
from benchmarks.device.here import missing
from benchmarks.side.figures import Teller
from benchmarks.side.process import ROOT, json_of, on_cpu, on_gpu

QUICK = ["--width", "64", "--save-every", "6", "--settle-s", "1"]
FULL = ["--lm", "--settle-s", "10"]
SWITCH = "RAYSTATE_STANDBY"
ALONE_S = 45  # a start, a kill and an end


def kill(tell: Teller, *, quick: bool, gpu: bool) -> None:
    """One start of each, one kill in each; then without the processes that wait. This process leaves the device to the trainers."""
    if lacking := missing():
        tell.note(f"kill is left out: {', '.join(lacking)} missing")
        return
    command = [sys.executable, str(ROOT / "benchmarks" / "recovery.py"), "--json", "--workers", "1", "--ranks", "0"]
    command += [*(QUICK if quick else FULL), *(["--gpu"] if gpu else [])]
    here = on_gpu() if gpu else on_cpu()
    found = json_of(command, {**here, SWITCH: "1"})
    for key, name, unit in (
        ("to_new_step_s", "kill -9 -> next new step", "s"),
        ("repeated_steps", "steps done again", "steps"),
    ):
        middle = {way: statistics.median(row[key] for row in rows) for way, rows in found.items()}
        ours = middle.pop("raystate")
        tell.add(name, ours, unit, beside={"JaxTrainer + Orbax": middle["plain"]}, goals=held(name, ours) if gpu else [])
    if tell.left_s < ALONE_S:
        tell.note("a kill without waiting processes is left out: no time")
        return
    alone = json_of([*command, "--only", "raystate"], {**here, SWITCH: "0"})
    tell.add(
        "kill -9 -> next new step, no process waits", statistics.median(row["to_new_step_s"] for row in alone["raystate"]), "s"
    )
