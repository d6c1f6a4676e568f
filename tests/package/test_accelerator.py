"""benchmarks/accelerator.py is ready when an accelerator is lent: each figure is told, whatever ends the run, and it can travel."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.side.figures import Figures, shown
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "benchmarks" / "accelerator.py")
PACK = str(ROOT / "benchmarks" / "device" / "pack.py")
STORED = {"Orbax v0", "Orbax v1"}
OTHERS = {*STORED, "raystate.save_async"}
NOTES = ["what NVIDIA's driver can do is left out"]  # on CPU devices; tests/gpu has it on a stand-in

GENERAL = {
    "dtypes equal bit for bit beside other work": "of 6",
    "snapshots equal bit for bit under donation": "of 5",
    "device -> pinned memory": "GB/s",
    "pinned memory -> device": "GB/s",
    "pinned memory -> numpy": "GB/s",
    "memory -> /dev/shm, one thread": "GB/s",
    "crc32c, one thread": "GB/s",
}
OF_A_STATE: dict[str, tuple[str, set[str]]] = {  # unit, peers
    "step alone": ("ms", set()),
    "blocked by the first save": ("s", OTHERS),
    "blocked in save, the state computed": ("ms", OTHERS),
    "slowest step beside the save / step alone": ("x", OTHERS),
    "seconds until the slot (others: the folder) has it": ("s", OTHERS),
    "copy of a snapshot": ("GB/s", set()),
    "copy of a snapshot / limit of pinned copies": ("x", set()),
    "throughput with a snapshot of each step / without": ("x", set()),
    "steps that had a slot": ("of all", set()),
    "steps from one snapshot to the next by default": ("steps", set()),
    "throughput with snapshots by default / without": ("x", set()),
    "blocked by a snapshot, p50": ("ms", set()),
    "blocked by a snapshot, p99": ("ms", set()),
    "restore slot -> device": ("s", set()),
    "restore slot -> device, rate": ("GB/s", set()),
    "restore storage -> device": ("s", STORED),
    **{f"{what} after {n} snapshots": ("MiB", set()) for n in (1, 3)
       for what in ("host memory beside the slots", "private memory of the process")},
    **{f"snapshots one after the other, {n}": ("s", set()) for n in (1, 3)},
}  # fmt: skip


def start(*options: str, python: str = sys.executable, **environment: str) -> "subprocess.Popen[str]":
    users = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu", **environment}
    return subprocess.Popen([python, SCRIPT, *options], env=users, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def ended(running: "subprocess.Popen[str]", status: int) -> str:
    """What it printed, once it and all of its processes have ended."""
    out, errors = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == status, f"{out[-2000:]}\n{errors[-3000:]}"
    return out + errors


def test_each_figure_has_its_name_its_unit_and_its_peers(tmp_path: Path):
    out = tmp_path / "figures.json"
    ended(start("--quick", "--parts", "driver", "correct", "limits", "states", "--out", str(out)), 0)
    content = json.loads(out.read_text())
    assert (content["finished"], content["failed"]) == (True, [])
    assert [one.partition(":")[0] for one in content["notes"]] == NOTES
    assert content["machine"]["platform"] == "cpu" and content["machine"]["versions"]["jax"]
    assert [row["at_s"] for row in content["figures"]] == sorted(row["at_s"] for row in content["figures"])
    names: list[str] = list(dict.fromkeys(row["of"] for row in content["figures"] if "arrays" in row["of"]))
    assert names == ["8 MiB in 16 arrays, float32", "8 MiB in 50 arrays, bfloat16"]
    of_states = {row["name"]: (row["unit"], set(row["beside"])) for row in content["figures"] if row["of"] == names[0]}
    assert of_states == OF_A_STATE
    alone = {row["name"] for row in content["figures"] if row["of"] == names[1] and not row["beside"]}
    assert alone == OF_A_STATE.keys() - {"restore storage -> device"}, "a state that Orbax doesn't save"
    assert GENERAL.items() <= {row["name"]: row["unit"] for row in content["figures"]}.items()
    equal = [row for row in content["figures"] if "equal bit for bit" in row["name"]]
    assert all(f"of {row['value']}" == row["unit"] for row in equal)
    told = ended(start("--table", str(out)), 0)
    assert all(f"| {row['name']} | {shown(row['value'])} {row['unit']} |" in told for row in content["figures"])


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_keeps_what_it_has_and_ends_its_processes(sent: signal.Signals, tmp_path: Path):
    out = tmp_path / "figures.json"
    running = start("--quick", "--parts", "limits", "states", "--out", str(out), TMPDIR=str(tmp_path))
    assert running.stdout is not None
    assert any("crc32c" in line for line in running.stdout), "it ended before its last limit"
    running.send_signal(sent)
    ended(running, 143 if sent == signal.SIGTERM else -sent)
    content = json.loads(out.read_text())
    assert not content["finished"]
    assert "device -> pinned memory" in {row["name"] for row in content["figures"]}


def test_a_part_that_hangs_or_dies_or_has_no_time_left_is_told_and_the_next_one_runs(tmp_path: Path):
    figures = Figures(tmp_path / "figures.json", 60.0)

    def part(name: str, script: str, *, least_s: float = 1, most_s: float = 60) -> bool:
        return figures.part(name, [sys.executable, "-c", f"import time; {script}"], least_s=least_s, most_s=most_s)

    assert not part("hangs", "time.sleep(1000)", most_s=1)
    assert not part("dies", "1 / 0")
    assert not part("long", "", least_s=61)
    assert part("fine", """print('{"note": "here"}'); print('{"done": true}')""")
    content: Any = json.loads((tmp_path / "figures.json").read_text())
    assert content["notes"] == ["here"]
    told = {row["part"]: row["why"].split(":")[0] for row in content["failed"]}
    assert told == {"hangs": "killed after 1 s", "dies": "ended early, exit status 1", "long": "not begun"}


def test_without_an_accelerator_only_small_states_are_measured(tmp_path: Path):
    assert "JAX sees no accelerator" in ended(start("--out", str(tmp_path / "figures.json")), 2)


def test_what_is_packed_trains_something(tmp_path: Path):
    """A wheel as Ray's: its Java parts and its tests don't travel, and pip asks no registry."""
    wheels, packed = tmp_path / "wheels", tmp_path / "packed.tar.xz"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "ray-1.0-py3-none-any.whl", "w") as wheel:
        for name in ("ray/__init__.py", "ray/jars/ray.jar", "ray/rllib/x.py", "ray/tests/test_x.py", "pyarrow/libarrow_s3.so.1"):
            wheel.writestr(name, "x = 1\n")
        wheel.writestr("ray-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: ray\nVersion: 1.0\n")
        wheel.writestr("ray-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("ray-1.0.dist-info/RECORD", "")
    script = f"import argparse; from benchmarks.device import pack; pack.ROOT = pack.Path({str(tmp_path)!r}); "
    script += f"pack.pack(argparse.Namespace(python='3.11', machine='x86_64', out=pack.Path({str(packed)!r})), dict(ray='1.0'))"
    (tmp_path / "constraints.txt").touch()
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, check=True, timeout=PATIENCE_S)
    with tarfile.open(packed) as archive:
        names = [name for name in archive.getnames() if name.endswith((".py", ".jar", ".1"))]
    assert names == ["ray/__init__.py"]


# ---------------------------------------------------------------- as it travels

THERE = ("jax", "jaxlib", "numpy", "scipy", "ml_dtypes", "opt_einsum")  # on the machine that is lent


@pytest.mark.long
def test_all_of_it_runs_from_what_is_packed_beside_a_bare_jax(tmp_path: Path):
    """Packs with pip, as for a machine that has JAX and what JAX needs, and runs all parts there. Minutes; Ray too."""
    packed, out = tmp_path / "packed.tar.xz", tmp_path / "figures.json"
    subprocess.run([sys.executable, PACK, str(packed), "--have", "jax", "--limit-mib", "100"], check=True, timeout=PATIENCE_S)
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path / "site", filter="tar")
    venv.create(tmp_path / "bare", with_pip=False)
    (site,) = (tmp_path / "bare" / "lib").glob("python*/site-packages")
    here = Path(pytest.__file__).parents[1]
    for name in THERE:
        for path in (*here.glob(name), *here.glob(f"{name}.libs"), *here.glob(f"{name}-*.dist-info")):
            (site / path.name).symlink_to(path)
    python = str(tmp_path / "bare" / "bin" / "python")
    subprocess.run(
        [python, "-m", "compileall", "-q", str(tmp_path / "site")], check=False, stdout=subprocess.DEVNULL, timeout=PATIENCE_S
    )
    ended(start("--quick", "--out", str(out), python=python, PYTHONPATH=str(tmp_path / "site"), PIP_NO_INDEX="1"), 0)
    content = json.loads(out.read_text())
    assert (content["failed"], content["machine"]["missing"]) == ([], {})
    assert [one.partition(":")[0] for one in content["notes"]] == NOTES
    assert {"kill -9 -> next new step", "kill -9 -> next new step, no process waits", *OF_A_STATE, *GENERAL} <= {
        row["name"] for row in content["figures"]
    }
