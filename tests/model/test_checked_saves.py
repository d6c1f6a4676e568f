"""What a restart would refuse, or leave out, is told at the first save."""

from __future__ import annotations

import contextlib
import logging
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import raystate
from raystate.arrays.items import PackedItems
from raystate.arrays.reference import match_reference
from raystate.manager.staging import SaveArguments
from raystate.reader import Reader
from raystate.restored import ReadOptions, in_memory
from tests.model.iterators import Rows
from tests.model.test_uses import run
from tests.model.world import Rank, World


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING and record.name == "raystate"]


def init() -> dict[str, Any]:
    return {"w": jnp.ones((4, 2)), "seen": jnp.zeros((), jnp.int32), "opt": {"m": jnp.zeros((4, 2))}}


def opened(script: Any, **config: Any) -> None:
    """Run a script of one rank on an open manager."""

    def body(rank: Rank) -> None:
        with rank.open("first") as manager:
            script(manager)

    run(body, save_every_steps=1, **{"check_saves": "warn", **config})


FORMS = {
    "another dtype": ({"seen": jnp.ones((), jnp.float32) * 85.19}, "seen: expected dtype int32, the checkpoint has float32"),
    "another shape": ({"w": jnp.ones((4, 3))}, "w: expected shape (4, 2), the checkpoint has (4, 3)"),
    "a number of another kind": ({"seen": 2.5}, "seen: expected dtype int32, the checkpoint has a Python float 2.5"),
    "a wider number": ({"seen": np.int64(3)}, "seen: expected dtype int32, the checkpoint has int64"),
    "another tree": ({"opt": {"mu": jnp.zeros((4, 2))}}, "opt/m: is not in the checkpoint"),
    "a part without values": ({"opt": None}, "opt/m: is not in the checkpoint"),
}


@pytest.mark.parametrize(("change", "told"), FORMS.values(), ids=FORMS)
def test_the_first_save_of_another_form_warns_with_the_restarts_own_list(change: Any, told: str, caplog: pytest.LogCaptureFixture):
    refused: list[str] = []

    def script(manager: Any) -> None:
        manager.restore_or_init(init)
        for step in (1, 2, 3):
            assert manager.save(step, {**init(), **change})
        manager.wait_until_finished()
        with pytest.raises(raystate.ReferenceMismatchError) as caught:
            manager.restore_or_init(init)
        refused.append(caught.value.message)

    opened(script)
    (warning,) = [text for text in warnings(caplog) if text.startswith("save(step=1)")]
    assert told in warning
    assert refused[0].split("\n", 1)[1].split("\nThis is step 3 of ")[0].replace("85.19", "") in warning
    assert "check_saves" in warning
    assert len([text for text in warnings(caplog) if text.startswith("save(")]) == 1


def test_a_fraction_is_not_told_to_be_cast():
    for fraction in (jnp.asarray(85.19), 85.19):
        for count in (jax.ShapeDtypeStruct((), jnp.int32), 0):
            with pytest.raises(raystate.ReferenceMismatchError, match="cast=True cuts nothing off"):
                _into({"n": fraction}, {"n": count})
    with pytest.raises(raystate.ReferenceMismatchError, match="cast=True converts"):
        _into({"n": jnp.asarray(85.19)}, {"n": jax.ShapeDtypeStruct((), jnp.bfloat16)})


def _into(tree: Any, reference: Any) -> None:
    match_reference(reference, in_memory("state", tree)[0], partial=False, cast=False, shapes="match")


def test_error_refuses_the_save_and_leaves_no_trace(caplog: pytest.LogCaptureFixture):
    def script(manager: Any) -> None:
        manager.restore_or_init(init)
        for _ in range(2):
            with pytest.raises(raystate.ReferenceMismatchError, match="seen: expected dtype int32"):
                manager.save(1, {**init(), "seen": 1.5})
        assert manager.save(1, init())
        manager.wait_until_finished()
        assert manager.all_steps() == [1]

    def body(rank: Rank) -> None:
        with rank.open("first") as manager:
            script(manager)

    run(body, save_every_steps=1)  # "error" is the default
    assert not warnings(caplog)


def test_what_a_restart_only_leaves_out_is_no_error(caplog: pytest.LogCaptureFixture):
    """A part more, an item more; and an address in a text that no restart takes up."""

    def script(manager: Any) -> None:
        manager.restore_or_init(init)
        assert manager.save(1, {**init(), "more": 2}, items={"notes": 1, "best": {"w": jnp.ones(2)}}, custom=repr(Source()))

    opened(script, check_saves="error")
    assert ["leaves out" in text or "custom holds an object's address" in text for text in warnings(caplog)] == [True, True]


@pytest.mark.parametrize("mode", ["error", "warn"])
def test_a_manager_that_restores_nothing_is_told_once_at_its_first_save(mode: Any, caplog: pytest.LogCaptureFixture):
    """The next start of that script would be refused, perhaps after days."""
    refused: list[str] = []

    def never_restores(rank: Rank) -> None:
        with rank.open("first") as manager:
            for step in (1, 2):
                assert manager.save(step, {"w": 1})

    def again(rank: Rank) -> None:
        manager = rank.open("second")
        with pytest.raises(raystate.StepOrderError) as caught:
            manager.save(1, {"w": 1})
        refused.append(caught.value.message)

    with World(save_every_steps=1, check_saves=mode) as world:
        world.play(never_restores)
        (told,) = warnings(caplog)
        world.play(again)
    assert told.startswith("save(step=1): ") and "restore_or_init" in told and "restored.step" in told
    assert refused and warnings(caplog) == [told], "it has an error of its own"


def test_off_says_nothing(caplog: pytest.LogCaptureFixture):
    def script(manager: Any) -> None:
        manager.save(1, {"seen": 1.5, "more": 2})

    opened(script, check_saves="off")
    assert not warnings(caplog)


def test_items_are_checked_too(caplog: pytest.LogCaptureFixture):
    def script(manager: Any) -> None:
        items = {"data": Rows(), "ema": {"w": jnp.ones(3)}, "notes": None}
        manager.restore_or_init(init, items={**items, "ema": {"w": jax.ShapeDtypeStruct((3,), jnp.float32)}})
        manager.save(1, init(), items=items)
        manager.save(2, init(), items={**items, "ema": {"w": jnp.ones(3, jnp.bfloat16)}})
        manager.save(3, init(), items={name: items[name] for name in ("ema", "notes")})
        manager.save(4, init(), items={**items, "second": Rows(), "best": {"w": jnp.ones(2)}})

    opened(script)
    told = [text for text in warnings(caplog) if text.startswith("save(")]
    assert [text.partition(":")[0] for text in told] == [f"save(step={step})" for step in (2, 3, 4)]
    assert "item 'ema'" in told[0] and "w: expected dtype float32, the checkpoint has bfloat16" in told[0]
    assert "has no iterator item 'data'" in told[1]
    assert "2 entries of the step (8 B)" in told[2] and "best, second" in told[2]


def test_what_restores_as_it_is_saved_is_not_warned_of(caplog: pytest.LogCaptureFixture):
    """Weak types, numpy in place of jax, keys, Python numbers, `...`, partial: each start below takes what the one before has saved."""
    state = {
        "w": jnp.ones((4, 2)),
        "host": np.arange(3, dtype=np.int32),
        "n": 3,
        "rate": 0.5,
        "key": jax.random.key(0),
        "name": "lm",
        "none": None,
    }
    references: list[tuple[Any, dict[str, Any]]] = [
        (state, {}),
        (jax.eval_shape(lambda: {key: value for key, value in state.items() if key != "name"}) | {"name": ...}, {}),
        ({**state, "added": jnp.ones(2)}, {"partial": True}),
        ({**state, "w": jnp.ones((4, 2), jnp.bfloat16)}, {"cast": True}),
        ({**state, "w": jnp.ones((1, 1))}, {"shapes": "checkpoint"}),
        (None, {}),
    ]

    def script(manager: Any) -> None:
        for step, (reference, options) in enumerate(references, start=1):
            manager.restore(reference, **options)
            assert manager.save(step, state)
            manager.wait_until_finished()

    opened(script)
    assert not warnings(caplog)


def test_the_check_keeps_and_makes_nothing_of_the_states_size():
    """A reference with values is not kept; and a form that was looked at is not looked at again."""

    def script(manager: Any) -> None:
        big = np.ones(1 << 22)
        manager.restore({"w": big})
        pipeline = manager._pipeline
        described = pipeline.describe({"w": big}, PackedItems())
        kept = weakref.ref(big)
        tracemalloc.start()
        pipeline.check.asked({"w": big}, None, ReadOptions())
        pipeline.check.look(described, SaveArguments(step=1, state=None, items=PackedItems(), metrics={}, custom=None))
        assert tracemalloc.get_traced_memory()[1] < big.nbytes / 100
        tracemalloc.stop()
        del big, described
        assert kept() is None

    opened(script)


def test_what_a_restore_of_the_run_leaves_out_is_named_once(caplog: pytest.LogCaptureFixture):
    """A checkpoint of more layers than the model has; an iterator and a tree that nobody asks for."""
    layers = {f"layer{number}": jnp.ones((16, 16)) for number in range(16)}
    fewer = {name: layers[name] for name in list(layers)[:12]}
    found: list[Any] = []

    def script(manager: Any) -> None:
        manager.restore(None)
        manager.save(1, layers, items={"data": Rows(7), "ema": {"w": jnp.ones(4)}, "notes": [1]})
        manager.wait_until_finished()
        found.append(manager.restore(fewer))
        found.append(manager.restore({**fewer, "layer12": ..., "layer13": ...}, items={"data": Rows()}))
        found.append(manager.restore({**fewer, **{f"layer{n}": ... for n in range(12, 16)}}, items={"data": ..., "ema": ...}))

    opened(script)
    told = [text.partition(": ")[2] for text in warnings(caplog) if text.startswith("step 1: this restore")]
    assert len(told) == 2
    assert "leaves out 6 entries of the step (4.0 KiB)" in told[0]
    assert "state/layer12, state/layer13, state/layer14, …" in told[0]
    assert "leaves out 3 entries of the step (2.0 KiB)" in told[1]
    assert found[0].left_out == [(f"state/layer{number}", 1024) for number in range(12, 16)] + [("data", 0), ("ema", 16)]
    assert found[2].left_out == []


def test_a_reader_takes_a_part_without_a_word(caplog: pytest.LogCaptureFixture, tmp_path: Any):
    raystate.save(tmp_path / "one", {"params": {"w": jnp.ones(3)}, "opt": jnp.ones(3)})
    got = Reader(tmp_path / "one").restore({"params": {"w": jnp.ones(3)}})
    assert [path for path, _ in got.left_out] == ["state/opt"]
    assert not warnings(caplog)


class Source:
    """Data without a __repr__ of its own."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: Any) -> int:
        return int(index)


def grain_loader() -> Any:
    import grain.python as grain

    sampler = grain.IndexSampler(8, grain.NoSharding(), num_epochs=None)
    return iter(grain.DataLoader(data_source=Source(), sampler=sampler))


ADDRESSES = {
    "grain's loader": (lambda: {"items": {"data": grain_loader()}}, "the state of iterator 'data' holds an object's address, <"),
    "a JSON item": (lambda: {"items": {"notes": [repr(Source())]}}, "item 'notes' holds"),
    "custom": (lambda: {"custom": {"model": str(Source())}}, "custom holds"),
    "a text in the state": (lambda: {"state": {"w": 1, "name": repr(Source())}}, "state/name holds"),
    "a local class": (lambda: {"custom": repr(type("L", (), {"__qualname__": "f.<locals>.L"})())}, "custom holds"),
    "a function": (lambda: {"custom": repr(grain_loader)}, "custom holds"),
}


@pytest.mark.parametrize(("given", "told"), ADDRESSES.values(), ids=ADDRESSES)
def test_an_objects_address_is_told_at_the_first_save(given: Any, told: str, caplog: pytest.LogCaptureFixture):
    def script(manager: Any) -> None:
        manager.restore()
        arguments = {"state": {"w": 1}, **given()}
        for step in (1, 2):
            manager.save(step, **arguments)

    opened(script)
    (warning,) = [text for text in warnings(caplog) if "leaves out" not in text]
    assert warning.startswith("save(step=1): ") and told in warning and "__repr__" in warning

    def refused(manager: Any) -> None:
        manager.restore()
        if "iterator" in told:  # a restart gives it to set_state
            with pytest.raises(raystate.ConfigError, match=" at 0x"):
                manager.save(1, **{"state": {"w": 1}, **given()})
        else:
            assert manager.save(1, **{"state": {"w": 1}, **given()})

    opened(refused, check_saves="error")


def test_what_only_looks_like_an_address_is_none(caplog: pytest.LogCaptureFixture):
    def script(manager: Any) -> None:
        manager.restore()
        manager.save(1, {"w": 1, "name": "<b> at 0x7f3a22"}, custom={"at": "0x7f3a22", "html": "<p>memory at</p> 0x7fffff"})

    opened(script)
    assert not warnings(caplog)


@pytest.mark.parametrize(("counter", "refused"), [("int32", True), ("float32", False)])
def test_the_ported_ppo_whose_counter_begins_as_another_dtype_is_refused_at_its_first_save(
    counter: str, refused: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    from tests.programs import ppo

    def body(rank: Rank) -> None:
        monkeypatch.setattr(raystate, "StateManager", lambda _: rank.open("first"))
        told = "finished: expected dtype int32, the checkpoint has float32"
        with pytest.raises(raystate.ReferenceMismatchError, match=told) if refused else contextlib.nullcontext():
            ppo.train({"steps": 2, "state": None, "counter": counter}, lambda *_: None)

    run(body, save_every_steps=1)
    assert not warnings(caplog)


@pytest.mark.parametrize("mode", ["warn", "error"])
def test_a_python_number_that_outgrows_its_dtype_is_told_when_it_does(mode: Any, caplog: pytest.LogCaptureFixture):
    """A token counter: it fitted at the first save, and the next start could not restore what was saved last."""

    def body(rank: Rank) -> None:
        with rank.open("first") as manager:
            state = manager.restore_or_init(lambda: {"tokens": 0, "w": jnp.ones(2)}).state
            assert state["tokens"].dtype == jnp.int32
            for step in (1, 2):
                assert manager.save(step, {"tokens": step * 10**9, "w": jnp.ones(2)})
            assert warnings(caplog) == []
            if mode == "error":
                with pytest.raises(raystate.ReferenceMismatchError, match="tokens: 4000000000 can't be held by int32"):
                    manager.save(3, {"tokens": 4 * 10**9, "w": jnp.ones(2)})
                return
            for step in (3, 4):
                assert manager.save(step, {"tokens": 4 * 10**9 + step, "w": jnp.ones(2)})
            (told,) = warnings(caplog)
            assert "tokens: 4000000003 can't be held by int32" in told

    run(body, save_every_steps=1, check_saves=mode)


@pytest.mark.parametrize("reference", [np.float32(0), np.zeros((), np.float16), 0.5, jnp.float32(0)], ids=repr)
def test_a_whole_number_at_a_schedules_end_is_a_float(tmp_path: Path, reference: Any):
    """`max(0, 0.3 - 0.15 * step)` was refused at the step where it is the int 0."""
    raystate.save(tmp_path / "one", {"rate": 0})
    assert float(raystate.load(tmp_path / "one", {"rate": reference})["rate"]) == 0.0
    raystate.save(tmp_path / "large", {"rate": 2**24 + 1})
    if not isinstance(reference, float):
        with pytest.raises(raystate.ReferenceMismatchError, match="Python int"):
            raystate.load(tmp_path / "large", {"rate": reference})
