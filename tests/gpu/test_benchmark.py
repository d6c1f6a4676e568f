"""The part of benchmarks/accelerator.py that is for GPUs alone runs on the stand-in: it has to work at the first try on a lent device."""

from __future__ import annotations

import json
from typing import Any

import jax
import pytest

from benchmarks.device import by_driver, staging
from benchmarks.side.figures import Teller
from benchmarks.side.states import Case
from raystate.arrays import device_copies
from raystate.arrays.gpus import Gpus
from tests.gpu.conftest import ONTO, StandIn


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["note"] for row in rows if "note" in row] == []
    return {row["name"]: row["value"] for row in rows}


def test_registration_and_the_drivers_copies(gpus: Gpus, standin: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    by_driver.by_driver(Teller(600), slot_mib=300, mib=2)
    found = told(capsys)
    assert gpus.lost == "" and standin.registered_bytes == 0 and standin.calls(ONTO)
    for how in ("at once", "in pieces of 256 MiB", "in pieces of 64 MiB", "in pieces of 256 MiB, with pauses"):
        assert {f"registering a slot {how}", f"longest launch of a small program, registering {how}"} <= found.keys()
    assert {"device -> slot, by the driver", "slot -> device, by the driver"} <= found.keys()


def test_saves_of_a_device_that_is_full(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    def room(_device: Any) -> int:
        return (64 << 20) - sum(array.nbytes for array in jax.live_arrays())

    monkeypatch.setattr(gpus, "_room", room)
    monkeypatch.setattr(staging, "is_cuda", lambda _device: True)
    monkeypatch.setattr(device_copies, "GROUP_BYTES", 1 << 20)
    in_turns: list[str] = []
    monkeypatch.setattr(gpus, "say", lambda what, *_: in_turns.append(what))
    case = Case(mib=8, without=("Orbax v0", "Orbax v1", "raystate.save_async"))
    staging.Staging(Teller(600), case, step_s=0.02, quick=True).run(tmp_path, None)
    found = told(capsys)
    assert gpus.lost == "" and all("for a copy of the whole state" in one for one in in_turns) and in_turns
    assert "blocked by the first save, no room on the device" in found
    assert sum(array.nbytes for array in jax.live_arrays()) < 32 << 20, "the device is left full"
