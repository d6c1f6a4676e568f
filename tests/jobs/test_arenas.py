"""What a run that was cut off has left in shared memory is found, by the names that arenas have."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs import arenas
from raystate.arena.files import arena_path


def test_arenas_are_found_by_run_and_by_node_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "SHARED_MEMORY", tmp_path)
    mine, other = "1" * 56, "2" * 56
    made = [arena_path(tmp_path / "raystate-7", run, node) for run in ("aa", "bb") for node in (mine, other)]
    for path in made:
        path.mkdir(parents=True)
    assert arenas.arenas(run_hash="aa") == made[:2] and arenas.arenas(node=mine) == made[::2]
    arenas.remove_arenas(mine)
    arenas.remove_arenas(other)
    assert not list(tmp_path.iterdir())
