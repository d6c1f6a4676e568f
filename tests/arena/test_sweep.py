from __future__ import annotations

import json
import os
from pathlib import Path

from raystate.arena import HostArena, TrainerArena, sweep
from tests.arena.sets import NODE, Child, OpenHost


def test_a_crashed_hosts_arena_is_kept_for_adoption(root: Path, host: HostArena, open_host: OpenHost):
    host.allot(trainer="t1", data_bytes=8192, table_bytes=100)
    host.close()
    assert sweep(root) == [] and sweep(root, dead_nodes=["another"]) == []
    assert open_host().adopted


def test_a_dead_nodes_arena_goes_unless_somebody_holds_it(root: Path, host: HostArena):
    held = host.allot(trainer="t1", data_bytes=8192, table_bytes=100)
    assert sweep(root, dead_nodes=[NODE]) == []  # the host lives
    with TrainerArena.attach(held.path, trainer="t1"):
        host.close()
        assert sweep(root, dead_nodes=[NODE]) == []  # a trainer lives
    assert sweep(root, dead_nodes=[NODE], keep=host.path) == []
    assert sweep(root, dead_nodes=[NODE]) == [f"{host.path.name}: node {NODE} is dead"]
    assert os.listdir(root) == []


def test_the_end_of_the_nodes_own_process_is_proof(root: Path, open_host: OpenHost, child: Child):
    node, _ = child("print('up', flush=True); sys.stdin.read()")
    open_host(node_pid=node.pid).close()
    assert sweep(root) == []
    node.kill()
    node.wait()
    (line,) = sweep(root)
    assert f"its process {node.pid} is gone" in line


def test_an_arena_of_an_earlier_boot_goes(root: Path, host: HostArena):
    host.close()
    meta = host.path / "meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_bytes()), "boot": "earlier"}))
    assert sweep(root) == [f"{host.path.name}: the machine has booted since"]


def test_a_caller_can_add_proof(root: Path, open_host: OpenHost):
    for run in ("r1", "r2"):
        open_host(run=run).close()
    removed = sweep(root, is_dead=lambda meta: "its run has finished" if meta.run == "r1" else None)
    assert len(removed) == 1 and removed[0].endswith("its run has finished")
    assert [name for name in os.listdir(root) if "r2" in name] == os.listdir(root)


def test_what_was_never_finished_goes_and_other_files_stay(root: Path):
    (root / "raystate-x-y").mkdir(mode=0o700)
    (root / "other").mkdir()
    (root / "raystate-file").write_text("not an arena")
    assert sweep(root) == ["raystate-x-y: it was never finished"]
    assert sorted(os.listdir(root)) == ["other", "raystate-file"]
