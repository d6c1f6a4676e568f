"""Each worker of a node uses its own GPUs, and a process that waits starts no driver."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raystate.train import device_memory, devices
from tests.gpu import on_ray
from tests.gpu.conftest import StandIn
from tests.patience import PATIENCE_S

REPO = Path(__file__).parents[2]
PLUGIN = """
    import ctypes, pathlib

    FOLDER = pathlib.Path(__file__).parent
    called = []

    def _load_nvidia_libraries():
        called.append("libraries")

    def _import_extensions():
        called.append("extensions")

    def _get_library_path():
        return FOLDER / "xla_cuda_plugin.so"

    def initialize():
        ctypes.CDLL("libcuda.so.1").cuInit(0)
"""


@pytest.fixture
def cuda(built: StandIn, tmp_path: Path) -> dict[str, str]:
    """The environment of a process that finds a stand-in of JAX's plugin for CUDA, and of NVIDIA's driver."""
    package, libraries = tmp_path / "site/jax_plugins/xla_cuda13", tmp_path / "lib"
    for folder in (package, libraries):
        folder.mkdir(parents=True)
    (package / "__init__.py").write_text(textwrap.dedent(PLUGIN))
    shutil.copy(built.path, package / "xla_cuda_plugin.so")
    shutil.copy(built.path, libraries / "libcuda.so.1")
    return {
        **os.environ,
        "PYTHONPATH": f"{tmp_path / 'site'}:{REPO}",
        "LD_LIBRARY_PATH": str(libraries),
        "JAX_PLATFORMS": "",
        "RAYSTATE_STANDBY": "1",
    }


def run(command: Sequence[str | Path], environment: dict[str, str]) -> None:
    subprocess.run([sys.executable, *command], check=True, env=environment, timeout=PATIENCE_S)


def test_a_process_that_waits_has_the_plugin_loaded_and_the_driver_not_started(cuda: dict[str, str]):
    program = """
        import ctypes, os
        from raystate.train import devices, standby
        driver = ctypes.CDLL("libcuda.so.1")
        devices.choose_cuda()
        standby._ahead(standby.preload, "file:///runs/a")
        try:
            devices.shown()
            raise AssertionError("it has loaded no plugin yet")
        except RuntimeError:
            pass
        standby._ahead(devices.load_plugin)
        from jax._src import xla_bridge
        from jax_plugins import xla_cuda13 as plugin
        assert os.environ["JAX_PLATFORMS"] == "cuda" and not xla_bridge.backends_are_initialized()
        assert plugin.called == ["libraries", "extensions"] and "xla_cuda_plugin.so" in open("/proc/self/maps").read()
        assert devices.shown() is None
        devices.become(["3", "5"])
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,5" and os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] == "1"
        assert driver.fake_calls(0) == 0, "nothing has started the driver, which reads that variable once"
        plugin.initialize()
        assert driver.fake_calls(0) == 1, "it would have been seen"
    """
    environment = {name: value for name, value in cuda.items() if name != "CUDA_VISIBLE_DEVICES"}
    run(["-c", textwrap.dedent(program)], environment)


@pytest.mark.parametrize("platforms", ["cpu", "cuda"])
def test_without_the_plugin_a_process_that_waits_is_of_no_use(platforms: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    devices.load_plugin()
    with pytest.raises(RuntimeError, match="no plugin"):
        devices.shown()


def test_the_places_of_a_whole_node_share_its_devices_out(monkeypatch: pytest.MonkeyPatch):
    nodes = [{"NodeID": "a", "Resources": {"GPU": 4.0}}, {"NodeID": "b", "Resources": {"GPU": 2.0}}]
    monkeypatch.setattr(devices, "ray", SimpleNamespace(nodes=lambda: nodes, get=lambda refs, timeout: refs))
    found = devices.of_places(["a", "b", "a"], [None, ["4", "7"], None], 2, None)
    assert found == [["0", "1"], ["4", "7"], ["2", "3"]]


@pytest.mark.long
def test_each_worker_of_a_node_is_shown_its_own_gpus_and_so_are_those_that_have_waited(cuda: dict[str, str], tmp_path: Path):
    """By Ray's own set-up of JAX, in a JaxTrainer with our callback."""
    plugin, driver = tmp_path / "site/jax_plugins/xla_cuda13/xla_cuda_plugin.so", tmp_path / "lib/libcuda.so.1"
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as short:  # the path of a socket has few characters
        run([on_ray.__file__, tmp_path, driver, plugin], {**cuda, "RAY_TMPDIR": short})
    groups: list[list[Any]] = [
        [json.loads((tmp_path / f"group-{group}-rank-{rank}").read_text()) for rank in range(2)] for group in range(2)
    ]
    for group in groups:
        assert [one["visible"] for one in group] == ["2,3", "5,7"], "no device is shown to both; the node's own names"
        assert [(one["jax"], one["platforms"]) for one in group] == [("0,1", "cuda")] * 2, "JAX counts those that are shown"
        assert [one["starts of the driver"] for one in group] == [0, 0]
    assert {one["pid"] for one in groups[1]} == {*json.loads((tmp_path / "waiting").read_text())}
    (held,), (asked,) = json.loads((tmp_path / "asked").read_text())
    assert asked != held and {asked, held} <= {*on_ray.GPUS.split(",")}, "on a part of a node Ray knows which"


# ---------------------------------------------------------------- the memory of a process that has ended


def test_a_device_is_used_once_its_last_process_has_ended(monkeypatch: pytest.MonkeyPatch):
    looks: list[str] = []
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    def pause(_: float) -> None:
        looks.append("runs" if process.poll() is None else "ended")
        if len(looks) == 3:
            process.kill()

    monkeypatch.setattr(device_memory, "time", SimpleNamespace(sleep=pause))
    monkeypatch.setattr(device_memory, "DEVICE_FREE_S", PATIENCE_S)
    monkeypatch.setattr(device_memory, "share_in_use", lambda _: shares.pop(0))
    shares = [0.9, 0.6, 0.2, 0.1]
    device_memory.wait_until_free([process.pid], ["0"])
    ended = process.poll() is not None
    process.kill()
    process.communicate()
    assert ended and looks[:3] == ["runs"] * 3
    assert shares == [0.1], "the memory has come back"
    device_memory.wait_until_free([], ["0"])
    assert shares == [0.1], "a first start waits for nobody"


def test_a_device_that_others_use_or_a_process_that_stays_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch):
    now_s = 0.0

    def pause(_: float) -> None:
        nonlocal now_s
        now_s += 0.25

    monkeypatch.setattr(device_memory, "time", SimpleNamespace(sleep=pause))
    monkeypatch.setattr(device_memory, "own_time", lambda: now_s)
    monkeypatch.setattr(device_memory, "share_in_use", lambda _: 0.9 if now_s < 0.75 else 0.8)
    device_memory.wait_until_free([2**22 + 1], ["0"])  # no such process: only what others hold
    assert now_s == 0.75 + device_memory.MOMENT_S, "since it fell last"
    now_s = 10.0
    device_memory.wait_until_free([os.getpid()], ["0"])
    assert now_s == 10.0 + device_memory.DEVICE_FREE_S


NVML = """
    #include <string.h>
    typedef struct { unsigned long long total, free, used; } Memory;
    static unsigned long long used[] = {10, 60, 30};
    static int begun;
    int nvmlInit_v2(void) { begun = 1; return 0; }
    int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) { *out = used + index; return index < 3 ? 0 : 2; }
    int nvmlDeviceGetHandleByUUID(const char *name, void **out) { *out = used + 2; return strcmp(name, "GPU-2") ? 6 : 0; }
    int nvmlDeviceGetMemoryInfo(void *device, Memory *out) {
      if (!begun) return 1;
      out->total = 100, out->used = *(unsigned long long *)device, out->free = out->total - out->used;
      return 0;
    }
"""


def test_the_fullest_device_by_nvidias_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source, library = tmp_path / "nvml.c", tmp_path / "libnvidia-ml.so.1"
    source.write_text(NVML)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=120)
    monkeypatch.setattr(device_memory, "_library", str(library))
    assert [device_memory.share_in_use(names) for names in (["0"], ["0", "1"], ["GPU-2", "0"])] == [0.1, 0.6, 0.3]
    assert device_memory.share_in_use(["1", "7"]) == device_memory.share_in_use(["MIG-1"]) == 0.0, "it can't tell"
    monkeypatch.setattr(device_memory, "_library", str(tmp_path / "nothing"))
    assert device_memory.share_in_use(["1"]) == 0.0
