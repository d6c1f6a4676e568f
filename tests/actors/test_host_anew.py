"""A HostActor whose arena was removed opens another one, also if that fails at first."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raystate.actors import host as module
from raystate.actors.host import HostActor
from raystate.arena import HostArena
from raystate.core.formats.errors import RaystateError
from raystate.core.formats.messages import HostId


@pytest.fixture
def actor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostActor]:
    """As Ray would have it."""
    alone: dict[str, Any] = {"is_restarted": lambda: False, "find_actor": lambda _: None}
    for name, stand_in in {**alone, "_domain": lambda _: ""}.items():
        monkeypatch.setattr(module, name, stand_in)
    before = signal.getsignal(signal.SIGTERM)
    made = HostActor(
        run="lm", run_hash="deadbeef", storage_url=str(tmp_path / "run"), host=HostId("n"), host_memory="64MiB",
        arena_dir=str(tmp_path),
    )  # fmt: skip
    yield made
    made.close(remove_arena=True)
    signal.signal(signal.SIGTERM, before)


def test_a_set_is_never_named_as_one_of_the_arena_before(
    actor: HostActor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    actor.open()
    arena = actor._loop.arena
    arena.allot(trainer="t1", data_bytes=8192, table_bytes=100)
    with monkeypatch.context() as patch:

        def fails(*_: Any, **__: Any) -> HostArena:
            raise RaystateError("there is no room")

        patch.setattr(HostArena, "open", fails)
        actor._begin_anew(arena.path)
    assert "there is no room" in caplog.text
    assert actor._loop.arena.first_index == 1
