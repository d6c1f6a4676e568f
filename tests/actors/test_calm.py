"""What a run's log does not say: warnings that nobody can act on, and ids that nobody reads."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import ray
from ray.runtime_context import RuntimeContext
from ray.util.annotations import RayDeprecationWarning

from raystate.actors.restarted import is_restarted
from raystate.core.coordinator.context import Context
from raystate.core.coordinator.facts import Facts
from raystate.core.formats.messages import Ask, Failure, Log, Settings
from raystate.core.formats.names import SnapshotId
from raystate.core.formats.texts import brief

NODE = "0123456789abcdef" * 3 + "01234567"


def test_the_start_of_a_coordinator_warns_of_nothing(monkeypatch: pytest.MonkeyPatch):
    outside = SimpleNamespace(mode=None)  # Ray's property looks at it, and refuses
    monkeypatch.setattr(ray, "get_runtime_context", lambda: RuntimeContext(outside))
    with pytest.warns(RayDeprecationWarning), pytest.raises(AssertionError):
        _ = ray.get_runtime_context().was_current_actor_reconstructed  # or the filter isn't needed any more
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(AssertionError):
            is_restarted()


def test_hosts_are_told_by_eight_digits():
    assert len(NODE) == 56
    assert (
        brief(f"rank 1 (host {NODE}) and lineage 3.1.ab; {NODE}f stays")
        == f"rank 1 (host 01234567) and lineage 3.1.ab; {NODE}f stays"
    )
    facts = Facts()
    facts.give_up(SnapshotId(lineage="1.1.x", step=7), f"host {NODE} has no copy")
    assert [*facts.given_up.values()] == ["host 01234567 has no copy"]
    context = Context(Settings(run="lm", storage="file:///nonexistent"))
    context.log("info", f"host {NODE} is down")
    context.fail([Ask("a")], "StorageError", f"host {NODE} did not write", host=NODE)
    logged, answered = context.out
    assert isinstance(logged, Log)
    assert logged.text == "host 01234567 is down"
    reply = getattr(answered, "reply", None)
    assert isinstance(reply, Failure)
    assert (reply.message, reply.details["host"]) == ("host 01234567 did not write", NODE)
