"""What a rehearsal says of programs that are right and of others: its plays in one process, without Ray."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tests.model.world as model
from raystate.config.rehearsing import VARIABLE, Play
from raystate.core.formats.errors import ConfigError, Interrupted
from raystate.manager.rehearsed import RehearsedManager
from raystate.rehearsal.plays import records_of
from raystate.rehearsal.verdict import PLAYS, Played, Rehearsal, Verdict
from raystate.storage.url import canonical_url
from tests.model.iterators import Rows
from tests.model.test_uses import run
from tests.model.world import Rank

Train = Callable[[Any], None]


def init() -> dict[str, Any]:
    return {"w": jnp.ones((4, 2)), "seen": jnp.zeros((), jnp.int32), "key": jax.random.key(0)}


@jax.jit
def step_of(state: dict[str, Any], row: Any) -> dict[str, Any]:
    key, noise = jax.random.split(state["key"])
    return {"w": state["w"] * 1.01 + row + jax.random.normal(noise, (4, 2)), "seen": state["seen"] + 1, "key": key}


def right(manager: Any) -> None:
    rows, best = Rows(), {"loss": 1.0}
    restored = manager.restore_or_init(init, items={"data": rows, "best": None})
    state, best = restored.state, restored.items.get("best") or best
    for step in range(restored.step, 10):
        state = step_of(state, next(rows))
        best = {"loss": best["loss"] / 2}
        manager.save(step + 1, state, items={"data": rows, "best": best}, custom={"note": step})


def saves_only_when_due(manager: Any) -> None:
    restored = manager.restore_or_init(init)
    state = restored.state
    for step in range(restored.step, 100):
        state = step_of(state, 1)
        if manager.should_save(step + 1):
            manager.save(step + 1, state)


def with_numpy_and_numbers(manager: Any) -> None:
    """Python numbers come back as what `init` has: nothing that a user would call a difference."""
    restored = manager.restore_or_init(lambda: {"w": jnp.ones(3), "tokens": jnp.zeros((), jnp.int32), "rate": jnp.ones(()) / 2})
    w, tokens = restored.state["w"], int(restored.state["tokens"])
    for step in range(restored.step, 10):
        w, tokens = w + 1, tokens + 5
        manager.save(step + 1, {"w": w, "tokens": tokens, "rate": 0.5})


@pytest.mark.parametrize("train", [right, saves_only_when_due, with_numpy_and_numbers])
def test_a_right_program_gets_one_calm_line(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    result = rehearsed(train, tmp_path, monkeypatch)
    assert result.ok
    assert str(result).startswith("rehearsal of it: a restart works and computes the same, bit by bit (steps 3 to 4, ")
    assert "\n" not in str(result)


def test_what_two_starts_have_otherwise_is_not_blamed_on_the_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def train(manager: Any) -> None:
        restored = manager.restore_or_init(init)
        state = restored.state
        for step in range(restored.step, 10):
            state = {**step_of(state, 1), "w": state["w"] * time.perf_counter()}
            manager.save(step + 1, state, custom={"at": time.time()})

    result = rehearsed(train, tmp_path, monkeypatch)
    assert result.ok
    assert "bit by bit" not in result.summary
    (note,) = result.notes
    assert note.startswith("1 entry could not be compared") and note.endswith(": state/w")


# ---------------------------------------------------------------- what would go wrong


def another_dtype(manager: Any) -> None:
    restored = manager.restore_or_init(init)
    for step in range(restored.step, 10):
        manager.save(step + 1, {**restored.state, "seen": jnp.ones(()) * 85.19})


def an_address(manager: Any) -> None:
    class Loader(Rows):
        def get_state(self) -> dict[str, Any]:
            return {**super().get_state(), "source": repr(self)}

        def set_state(self, state: dict[str, Any]) -> None:
            if state["source"] != repr(self):
                raise ValueError("another source")
            super().set_state(state)

    rows = Loader()
    restored = manager.restore_or_init(init, items={"data": rows})
    for step in range(restored.step, 10):
        manager.save(step + 1, step_of(restored.state, next(rows)), items={"data": rows})


def bound_devices(manager: Any) -> None:
    """A restored state is put on one device, where a fresh one is free."""
    restored = manager.restore_or_init(init)
    state = restored.state
    if restored.step:
        state = jax.device_put(state, jax.devices()[0])
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[1:3])
    row = jax.device_put(jnp.ones(()), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    for step in range(restored.step, 10):
        state = jax.jit(lambda state, row: {**state, "w": state["w"] + row})(state, row)
        manager.save(step + 1, state)


def loop(manager: Any, state: Any, first: int, rows: Any, **more: Any) -> None:
    """The rest of most scripts."""
    for step in range(first, 10):
        state = step_of(state, next(rows))
        manager.save(step + 1, state, **more)


def an_iterator_that_is_not_kept(manager: Any) -> None:
    restored = manager.restore_or_init(init)
    loop(manager, restored.state, restored.step, Rows())


def an_iterator_that_nobody_sets(manager: Any) -> None:
    rows, restored = Rows(), manager.restore_or_init(init)
    loop(manager, restored.state, restored.step, rows, items={"data": rows})


def an_iterator_that_sets_nothing(manager: Any) -> None:
    rows = Rows()
    rows.set_state = lambda _: None  # type: ignore[method-assign]
    restored = manager.restore_or_init(init, items={"data": rows})
    loop(manager, restored.state, restored.step, rows, items={"data": rows})


def a_batch_that_is_fetched_before_the_save(manager: Any) -> None:
    rows = Rows()
    restored = manager.restore_or_init(init, items={"data": rows})
    state, row = restored.state, next(rows)
    for step in range(restored.step, 10):
        state, row = step_of(state, row), next(rows)
        manager.save(step + 1, state, items={"data": rows})


def begins_anew(manager: Any) -> None:
    loop(manager, init(), 0, itertools.repeat(1))


def counts_from_zero(manager: Any) -> None:
    loop(manager, manager.restore_or_init(init).state, 0, itertools.repeat(1))


def a_smaller_model(manager: Any) -> None:
    restored = manager.restore_or_init(init)
    state, ema = restored.state, jnp.zeros((4, 2))
    for step in range(restored.step, 10):
        state = step_of(state, 1)
        ema = ema + state["w"]
        manager.save(step + 1, {**state, "ema": ema})


def fails_at_once(manager: Any) -> None:
    manager.restore_or_init(init)
    raise KeyError("no such column")


WRONG: dict[str, tuple[Train, list[str]]] = {
    "another dtype": (another_dtype, ["expected dtype int32, the checkpoint has float32", "the restart fails, rank 0"]),
    "an object's address": (
        an_address,
        ["the state of iterator 'data' holds an object's address", "ValueError: another source", "set_state of item 'data'"],
    ),
    "bound devices": (bound_devices, ["the restart fails, rank 0 (test_rehearsed.py:", "incompatible devices", "shardings"]),
    "an iterator that is not kept": (
        an_iterator_that_is_not_kept,
        ["step 3 differs after a restart, in 1 entry: state/w (float32[4, 2])", "items"],
    ),
    "an iterator that nobody sets": (an_iterator_that_nobody_sets, ["leaves out 1 entry", ": data."]),
    "an iterator that sets nothing": (an_iterator_that_sets_nothing, ["not restored as it was saved: data (", '"row": 2']),
    "a batch that is fetched before the save": (
        a_batch_that_is_fetched_before_the_save,
        [
            "step 3 differs after a restart",
            "a batch that is fetched before the step's save() is in no step",
            "take it at the loop's top",
        ],
    ),
    "it begins anew": (begins_anew, ["StepOrderError", "Call restore_or_init()"]),
    "the loop counts from zero": (counts_from_zero, ["StepOrderError", "begin the loop at restored.step"]),
    "a leaf that nobody asks for": (a_smaller_model, ["leaves out 1 entry of the step (32 B)", "state/ema", "step 3 differs"]),
    "it fails at once": (fails_at_once, ["it fails before any restart, rank 0 (test_rehearsed.py:", "KeyError: 'no such column'"]),
}


@pytest.mark.parametrize(("train", "told"), WRONG.values(), ids=WRONG)
def test_what_would_go_wrong_is_told_before_the_training(
    train: Train, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    result = rehearsed(train, tmp_path, monkeypatch)
    assert not result.ok
    for text in told:
        assert text in str(result), str(result)


@pytest.mark.parametrize(("saves", "times"), [(0, "0 times"), (1, "once"), (3, "3 times")])
def test_a_program_that_is_too_short_is_a_wrong_use(saves: int, times: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def train(manager: Any) -> None:
        restored = manager.restore_or_init(init)
        for step in range(restored.step, saves):
            manager.save(step + 1, restored.state)

    with pytest.raises(ConfigError, match=f"called save.. {times}: a rehearsal needs 4 saves"):
        rehearsed(train, tmp_path, monkeypatch)


def test_only_the_step_that_the_restart_needs_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    size = 512 * 512 * 4
    written: list[int] = []

    def train(manager: Any) -> None:
        folder = Path(manager.config.storage.removeprefix("file://"))
        restored = manager.restore_or_init(lambda: {"w": jax.random.normal(jax.random.key(1), (512, 512))})
        w = restored.state["w"]
        try:
            for step in range(restored.step, 10):
                w = w + 1
                manager.save(step + 1, {"w": w})
        finally:
            written.append(sum(one.stat().st_size for one in folder.glob("[0-9]*/**/d/*")))

    assert rehearsed(train, tmp_path, monkeypatch).ok
    first, again, undisturbed = written
    assert size <= first < 1.1 * size
    assert again == first  # nothing more
    assert undisturbed == 0


# ---------------------------------------------------------------- the plays


def rehearsed(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rehearsal:
    """As `rehearse` does it, with threads of one process in place of processes."""
    monkeypatch.setattr(model, "StateManager", RehearsedManager)
    scratch = canonical_url(tmp_path / "scratch")
    played: dict[str, Played] = {}

    def on_stage(*names: str) -> None:
        def script(rank: Rank) -> None:
            for name in names:
                play = Play(name=name, scratch=scratch, saves=PLAYS[name], limit_s=60)
                monkeypatch.setenv(VARIABLE, json.dumps(dataclasses.asdict(play)))
                random.seed()
                problem = ""
                try:
                    with rank.open(name, launched=False) as manager:
                        train(manager)
                except Interrupted:
                    pass  # the end of a play
                except Exception as error:
                    problem = f"its process ended with {error}"
                records = [{**record, "run": "it"} for record in records_of(play)]  # each world has a folder of its own
                played[name] = Played(records=records, problem=problem)
                if problem:
                    return

        run(script, save_every_steps=10**12, snapshot_every_steps=0)

    verdict = Verdict("it")
    on_stage("first", "again")
    if not verdict.of_first(played["first"]) or not verdict.of_again(played["first"], played["again"]):
        return verdict.result(None)
    on_stage("undisturbed")
    verdict.of_undisturbed(**played)
    return verdict.result(played["undisturbed"])
