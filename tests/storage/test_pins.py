"""A pinned step is not deleted; a step whose retirement is decided is not pinned any more."""

from __future__ import annotations

import dataclasses

import pytest

from raystate.core.formats.errors import ConfigError, StepNotFoundError
from raystate.core.formats.log import claim_entry
from raystate.core.formats.messages import LiveStep
from raystate.storage import RunLog, Storage, assume_dead, assumed_dead, collect_garbage, pinned, pinned_steps
from raystate.storage.names import PINS, TRASH
from raystate.testing.storage import Failing


def a_run(storage: Storage, *live: int) -> None:
    log = RunLog(storage)
    claimed = log.claim(lambda tail: claim_entry(tail, "w", "lm"), timeout_s=30.0)
    steps = tuple(LiveStep(step=step, save=f"a1k{step}") for step in live)
    assert log.append(dataclasses.replace(claimed, seq=claimed.seq + 1, kind="commit", live=steps)).outcome == "ok"


def test_a_pin_is_seen_until_it_ends(storage: Storage) -> None:
    a_run(storage, 1, 2)
    with pinned(storage, 1, "an evaluation"), pinned(storage, 2, "an export"):
        found = pinned_steps(storage)
        assert set(found) == {1, 2}
        assert "an evaluation on " in found[1]
    assert pinned_steps(storage) == {}
    assert storage.list(PINS) == []


def test_a_pin_that_has_run_out_does_not_count(storage: Storage) -> None:
    a_run(storage, 1)
    with pinned(storage, 1, "died long ago", hold_s=-1.0):
        assert pinned_steps(storage) == {}


def test_a_step_that_is_not_live_cannot_be_pinned(storage: Storage) -> None:
    a_run(storage, 1)
    with pytest.raises(StepNotFoundError, match=r"step 3 of .* is not live"), pinned(storage, 3, "x"):
        pass
    assert storage.list(PINS) == []


def test_a_pin_that_cannot_be_read_counts(storage: Storage) -> None:
    storage.create(f"{PINS}/7.abc", b"{")
    storage.create(f"{PINS}/what.abc", b"{")
    assert pinned_steps(storage) == {7: "a pin that can't be read"}


def test_a_pin_that_storage_does_not_hand_out_counts_and_keeps_no_other_garbage(storage: Storage) -> None:
    storage.create(f"{PINS}/7.abc", b'{"why": "x", "host": "h", "until_s": 1}')
    storage.create(f"{TRASH}/9.old/x", b"x")
    failing = Failing(storage, "read")
    assert pinned_steps(failing) == {7: "a pin that can't be read"}
    collect_garbage(failing)
    assert storage.list(TRASH) == []


def test_only_an_older_attempt_can_be_assumed_dead(storage: Storage) -> None:
    with pytest.raises(ConfigError, match="there is no older attempt"):
        assume_dead(storage, 1)
    a_run(storage, 1)
    RunLog(storage).claim(lambda tail: claim_entry(tail, "w2", "lm"), timeout_s=30.0)
    for attempt in (0, 2, 3):
        with pytest.raises(ConfigError, match=f"attempt {attempt} of .* can't be assumed dead: the attempts 1 to 1 can be"):
            assume_dead(storage, attempt)
    assume_dead(storage, 1)
    assume_dead(storage, 1)
    assert assumed_dead(storage) == (1,)
