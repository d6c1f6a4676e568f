"""What is told of the nodes that Ray drains. That Ray says so is tested with Ray: tests/cluster/test_train_internals.py."""

from __future__ import annotations

import time

import pytest

from raystate.actors import draining
from raystate.actors.draining import DrainWatch
from raystate.core.formats.messages import HostId, StopAsked

NODE = HostId("n1")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> tuple[list[StopAsked], dict[HostId, int], DrainWatch]:
    """(what was told, the draining nodes, who looks at them)."""
    said: list[StopAsked] = []
    nodes: dict[HostId, int] = {}
    monkeypatch.setattr(draining, "draining_nodes", lambda: dict(nodes))
    return said, nodes, DrainWatch(said.append, lambda: False)


def in_ms(seconds: float) -> int:
    return int((time.time() + seconds) * 1000)


def test_each_deadline_is_told_once(told: tuple[list[StopAsked], dict[HostId, int], DrainWatch]) -> None:
    said, nodes, watch = told
    nodes[NODE] = in_ms(3600)
    watch.look()
    watch.look()
    assert [one.host for one in said] == [NODE]
    assert said[0].within_s is not None
    assert 0 < said[0].within_s <= 3600
    nodes[NODE] = in_ms(1800)
    watch.look()
    assert len(said) == 2


@pytest.mark.parametrize("at_ms", [0, 1], ids=["none", "over"])
def test_without_a_deadline_and_with_one_that_is_over_nobody_says_when(
    at_ms: int, told: tuple[list[StopAsked], dict[HostId, int], DrainWatch]
) -> None:
    """Another node's clock has set it: long ago by this one's, and the node is still there."""
    said, nodes, watch = told
    nodes[NODE] = at_ms
    watch.look()
    assert [one.within_s for one in said] == [None]
