"""JAX jobs of two processes on nodes that have nothing: what was compiled comes from the run's storage, to every rank."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from raystate.compilation.jax_cache import known_internals
from raystate.storage import open_storage
from raystate.storage.names import COMPILED, log_name
from tests.compilation.test_every_rank import as_users_have_it
from tests.processes import run_job

PROGRAM = """
import json, sys, time
import jax
rank, port, folder, storage = int(sys.argv[1]), sys.argv[2], f"{sys.argv[3]}-{sys.argv[1]}", sys.argv[4]
from pathlib import Path
from raystate.compilation import ProgramStore, RunPrograms, Shelf, keep_programs
from raystate.storage import open_storage
jax.distributed.initialize(f"localhost:{port}", 2, rank)
counts = {}
jax.monitoring.register_event_listener(lambda name, **_: counts.update({name: counts.get(name, 0) + 1}))
Path(folder).mkdir(exist_ok=True, mode=0o700)
shelf = Shelf(open_storage(storage), 1 << 30, host="here", rank=rank, world=2)
programs = RunPrograms(ProgramStore(Path(folder), 1 << 30), shelf, gathered_s=0.1)
assert keep_programs(programs) == ""
programs.begin()
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
split = NamedSharding(mesh, P("x"))
w = jax.make_array_from_callback((8, 8), split, lambda box: np.arange(64, dtype=np.float32).reshape(8, 8)[box] / 64)
step = jax.jit(lambda w: (jnp.tanh(w @ w.T) @ w, (w ** 2).sum()), donate_argnums=0)
for _ in range(3):
    w, loss = step(w)
own = jnp.arange(5.0) * 2 + rank
name = "/jax/compilation_cache/"
said = {
    "loss": float(loss).hex(), "own": float(own.sum()),
    "asked": counts.get(name + "compile_requests_use_cache", 0), "found": counts.get(name + "cache_hits", 0),
}
while programs._is_offering:
    time.sleep(0.01)
print(json.dumps(said))
"""

pytestmark = pytest.mark.skipif(not known_internals(), reason="this JAX is not known: only rank 0 keeps what it compiles")


@pytest.fixture(autouse=True)
def _as_users_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    as_users_have_it(monkeypatch)


def _job(folder: Path, storage: Path) -> list[dict[str, Any]]:
    outs = run_job(lambda rank, port: ["-c", PROGRAM, rank, port, folder, storage])
    return [json.loads(out.splitlines()[-1]) for out in outs]


def test_other_nodes_compile_nothing_on_any_rank(tmp_path: Path):
    """In folders of other names: JAX's own key would have the path in it."""
    storage = tmp_path / "run"
    open_storage(storage).create(log_name(1), b"{}")
    first = _job(tmp_path / "a", storage)
    assert all(one["asked"] and not one["found"] for one in first)
    shutil.rmtree(tmp_path / "a-0")
    shutil.rmtree(tmp_path / "a-1")
    again = _job(tmp_path / "elsewhere", storage)
    assert [one["found"] for one in again] == [one["asked"] for one in again] == [one["asked"] for one in first]
    assert [(one["loss"], one["own"]) for one in again] == [(one["loss"], one["own"]) for one in first]
    damaged = 0
    for info in open_storage(storage).list(COMPILED):
        if "/used/" not in info.name:
            held = bytearray((storage / info.name).read_bytes())
            held[len(held) // 2] ^= 4
            (storage / info.name).write_bytes(held)
            damaged += 1
    after = _job(tmp_path / "third", storage)
    assert damaged == sum(one["asked"] for one in after) > 0 and not any(one["found"] for one in after)
    assert [one["loss"] for one in after] == [one["loss"] for one in first]
