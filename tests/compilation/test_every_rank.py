"""A job of two JAX processes that runs again: no rank compiles anything, whatever became of the files in between."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from raystate.compilation.jax_cache import known_internals
from raystate.compilation.store import SUFFIX
from tests.processes import run_job

PROGRAM = """
import json, sys
import jax
rank, port, folder, way = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
from pathlib import Path
from raystate.compilation import ProgramStore, keep_programs
jax.distributed.initialize(f"localhost:{port}", 2, rank)
if way == "own" and rank == 0:
    jax.config.update("jax_compilation_cache_dir", folder + "-own")
if way == "own" and rank == 1:
    jax.config.update("jax_enable_compilation_cache", False)
counts = {}
jax.monitoring.register_event_listener(lambda name, **_: counts.update({name: counts.get(name, 0) + 1}))
reason = keep_programs(ProgramStore(Path(folder), 1 << 30))
if way == "later":
    jax.config.update("jax_compilation_cache_dir", folder + "-own")
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
split = NamedSharding(mesh, P("x"))
w = jax.make_array_from_callback((8, 8), split, lambda box: np.arange(64, dtype=np.float32).reshape(8, 8)[box] / 64)
step = jax.jit(lambda w: (jnp.tanh(w @ w.T) @ w, (w ** 2).sum()), donate_argnums=0)  # collectives, and a donated argument
for _ in range(3):
    w, loss = step(w)
own = jnp.arange(5.0) * 2 + rank  # programs of one process
name = "/jax/compilation_cache/"
print(json.dumps({
    "reason": reason, "loss": float(loss).hex(), "own": float(own.sum()),
    "asked": counts.get(name + "compile_requests_use_cache", 0), "found": counts.get(name + "cache_hits", 0),
}))
"""

pytestmark = pytest.mark.skipif(not known_internals(), reason="this JAX is not known: only rank 0 keeps what it compiles")


def as_users_have_it(patch: pytest.MonkeyPatch) -> None:
    """Without what tests/conftest.py sets to spare the other tests compiling."""
    for name in [name for name in os.environ if name.startswith(("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE"))]:
        patch.delenv(name)


@pytest.fixture(autouse=True)
def _as_users_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    as_users_have_it(monkeypatch)


def _job(folder: Path, way: str = "ours") -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    outs = run_job(lambda rank, port: ["-c", PROGRAM, rank, port, folder, way])
    return [json.loads(out.splitlines()[-1]) for out in outs]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of a job that has run once, and what its processes said."""
    with pytest.MonkeyPatch.context() as patch:
        as_users_have_it(patch)
        folder = tmp_path_factory.mktemp("programs")
        return folder, _job(folder)


def test_no_rank_compiles_again(ran: tuple[Path, list[dict[str, Any]]]):
    folder, first = ran
    assert all(one["found"] == 0 and one["asked"] for one in first)
    again = _job(folder)
    assert [one["found"] for one in again] == [one["asked"] for one in again] == [one["asked"] for one in first]
    assert [(one["loss"], one["own"]) for one in again] == [(one["loss"], one["own"]) for one in first]


@pytest.mark.long
def test_a_damaged_program_costs_one_compilation(ran: tuple[Path, list[dict[str, Any]]], tmp_path: Path):
    before, first = ran
    folder = tmp_path / "programs"
    shutil.copytree(before, folder)
    files = sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: -path.stat().st_size)
    os.truncate(files[0], files[0].stat().st_size // 2)  # the step of one rank
    held = bytearray(files[1].read_bytes())
    held[len(held) // 2] ^= 4
    files[1].write_bytes(held)  # and of the other
    damaged = _job(folder)
    assert sum(one["asked"] - one["found"] for one in damaged) == 2
    assert [one["loss"] for one in damaged] == [one["loss"] for one in first]
    assert [one["found"] for one in _job(folder)] == [one["asked"] for one in first]  # they were mended


def test_the_users_own_settings_are_left_alone(tmp_path: Path):
    """Rank 0 has a folder of its own, rank 1 has switched JAX's cache off."""
    folder = tmp_path / "programs"
    said = _job(folder, "own")
    assert "as the user has set" in said[0]["reason"] and "is off" in said[1]["reason"]
    assert not list(folder.iterdir())


def test_a_folder_that_the_user_sets_later_is_as_jax_has_it(tmp_path: Path):
    """As training scripts do in their first lines, which run after ours: of what compiles in less than a second nothing goes there."""
    folder = tmp_path / "programs"
    said = _job(folder, "later")
    assert [one["reason"] for one in said] == ["", ""]
    assert not list(folder.iterdir())
    own = Path(f"{folder}-own")
    assert not own.exists() or len(list(own.iterdir())) < said[0]["asked"] / 2, (
        "on a busy machine something may have taken a second"
    )
