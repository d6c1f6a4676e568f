"""The end of a run whose process has left Ray: nothing is looked for on whatever cluster there is."""

from __future__ import annotations

from pathlib import Path

import pytest

import raystate
from raystate.actors.release import release


def test_a_process_that_has_left_ray_joins_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray.get_actor` by itself would join the Ray that runs on this machine, or start one."""
    joined: list[object] = []
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # whatever other tests of this process have joined
    monkeypatch.setattr("ray.init", lambda *given, **_: joined.append(given))
    config = raystate.StateConfig(storage=str(tmp_path), run="left")
    with pytest.raises(raystate.RaystateError, match="has left Ray"):
        release(config, "the test's end")
    assert not joined
