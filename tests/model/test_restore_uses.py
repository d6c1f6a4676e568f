"""`StateManager.restore` and `restore_or_init` as a training script calls them: one rank of a cluster without Ray."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1

import raystate
from raystate.core.formats.errors import (
    ConfigError,
    CorruptCheckpointError,
    ReferenceMismatchError,
    StaleAttemptError,
    StepNotFoundError,
    StorageError,
)
from raystate.manager import StateManager
from raystate.manager.fresh import _is_committed
from raystate.manager.opening import open_managers
from raystate.manager.restoring import Restoring
from raystate.storage import open_storage
from tests.model.iterators import Broken, Holds
from tests.model.world import ModelLink, Rank, World
from tests.orbax.from_state import publish
from tests.storage.backends import gcs_backend


def kernel(scale: float = 1.0) -> np.ndarray:
    return scale * np.arange(64, dtype=np.float32).reshape(8, 8)


def init() -> dict[str, Any]:
    return {"params": {"enc": jnp.zeros((8, 8)), "head": jnp.full(4, 9.0)}, "opt": {"mu": jnp.zeros((8, 8)), "count": jnp.int32(0)}}


def trained(scale: float = 1.0) -> dict[str, Any]:
    return {
        "params": {"enc": jnp.asarray(kernel(scale)), "head": jnp.full(4, float(scale))},
        "opt": {"mu": jnp.full((8, 8), float(scale)), "count": jnp.int32(scale)},
    }


def test_a_jax_that_hides_whether_a_state_is_bound_is_told_once(caplog: pytest.LogCaptureFixture):
    assert all(_is_committed(object()) for _ in range(2)), "bound, as what has shardings"
    assert len(caplog.records) == 1 and "Name its `shardings`" in caplog.text


class Play:
    """Runs scripts with a manager of the one run, one after the other: a trainer that died comes back."""

    def __init__(self) -> None:
        self.world = World(save_every_steps=100)
        self._count = 0

    def __call__(self, script: Callable[[StateManager], None]) -> None:
        self._count += 1
        group = f"group{self._count}"
        self.world.play(lambda rank: script(rank.open(group)))

    def lose_memory(self) -> None:
        self.world.lose_memory()


@pytest.fixture
def play() -> Iterator[Play]:
    made = Play()
    try:
        yield made
    finally:
        made.world.close()


def test_a_manager_restores_the_same_from_memory_and_storage(play: Play):
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    rows = NamedSharding(mesh, P("x"))

    def first(manager: StateManager) -> None:
        manager.restore_or_init(init)
        assert manager.save(1, {**trained(), "key": jax.random.key(3)}, force=True)
        manager.wait_until_finished()

    def uses(manager: StateManager) -> None:
        def restored(reference: Any, **options: Any) -> Any:
            got = manager.restore(reference, **options)
            assert got is not None and got.step == 1
            tiers.add(got.tier)
            return got

        raw = restored(None)
        assert raw.state["key"].dtype == jax.random.key(0).dtype
        assert raw.state_dict()["params"]["head"].tolist() == [1] * 4
        part = restored({"params": {"enc": np.zeros((8, 8), np.float32), "head": ...}}).state["params"]
        assert np.array_equal(part["enc"], kernel()) and part["head"] is ...
        moved = restored({"encoder": rows, "new": np.ones(1)}, transforms={"encoder": "params/enc"}).state
        assert moved["encoder"].sharding == rows and moved["new"].tolist() == [1]
        spread = restored({"params": NamedSharding(mesh, P()), "opt": ...}).state
        assert spread["params"]["head"].sharding.is_fully_replicated and np.array_equal(spread["params"]["enc"], kernel())

    play(first)
    for tier in ("memory", "storage"):
        tiers = set[str]()
        play(uses)
        assert tiers == {tier}
        play.lose_memory()


def test_a_durable_steps_reference_is_refused_before_anything_is_given_up(play: Play):
    def script(manager: StateManager) -> None:
        manager.restore_or_init(init)
        assert manager.save(1, trained(), force=True)
        manager.wait_until_finished()
        raw = manager.restore(step=1)
        assert raw is not None and raw.tier in ("memory", "storage")
        manager.save(2, trained(2))
        wrong: list[tuple[Any, dict[str, Any], str]] = [
            ({"new": np.ones(1)}, {}, "partial=True"),
            ({"new": np.ones(1)}, {"transforms": {"new": "params/nope"}}, "transforms take it from 'params/nope'"),
            ({"new": jnp.zeros(3)}, {"transforms": {"new": "params/head"}}, "expected shape"),
            ({"new": jnp.zeros(3)}, {"transforms": {"old": "params/head"}}, "matches no path"),
            (jnp.zeros(3), {"shapes": "any"}, "shapes: expected"),
        ]
        for reference, options, text in wrong:
            with pytest.raises((ReferenceMismatchError, ConfigError), match=re.escape(text)):
                manager.restore(reference, step=1, **options)
        newest = manager.restore(jax.eval_shape(init))
        assert newest is not None and newest.step == 2, "step 2 was not given up"

    play(script)


# ---------------------------------------------------------------- sources


@pytest.fixture
def other(tmp_path: Path) -> Path:
    root = tmp_path / "other"
    for step in (3, 5):
        publish(root, {"state": trained(step)}, step=step)
    return root


def sources(other: Path, tmp_path: Path) -> dict[str, tuple[Any, float]]:
    v1.save(str(tmp_path / "plain"), trained(7))
    return {
        "run": (other, 5),
        "run + step": ((other, 3), 3),
        "folder": (other / "3", 3),
        "plain": (str(tmp_path / "plain"), 7),
        "callable": (lambda: (other, 3), 3),
    }


@pytest.mark.parametrize("kind", ["run", "run + step", "folder", "plain", "callable"])
def test_a_run_starts_at_another_ones_step(play: Play, other: Path, tmp_path: Path, kind: str):
    source, scale = sources(other, tmp_path)[kind]

    def starts(manager: StateManager) -> None:
        got = manager.restore_or_init(init, source=source, source_select="params|opt/mu", items={"note": [1]})
        assert (got.step, got.tier, got.items) == (0, "source", {"note": [1]})
        assert np.array_equal(got.state["params"]["enc"], kernel(scale))
        assert got.state["opt"]["mu"][0, 0] == scale and int(got.state["opt"]["count"]) == 0, "fresh, as it was not selected"
        assert manager.save(1, trained(100), items={"note": [1]}, force=True)
        manager.wait_until_finished()

    def resumes(manager: StateManager) -> None:
        def gone() -> Any:
            raise AssertionError("the source is not asked when the run has a step")

        got = manager.restore_or_init(init, source=gone, source_select="params")
        assert got.step == 1 and np.array_equal(got.state["params"]["enc"], kernel(100))

    play(starts)
    if kind == "callable":
        play(resumes)


def test_what_is_taken_from_a_source(play: Play, other: Path, tmp_path: Path):
    v1.save(str(tmp_path / "weights"), {"enc": kernel(7)})

    def script(manager: StateManager) -> None:
        whole = manager.restore_or_init(init, source=other)
        assert int(whole.state["opt"]["count"]) == 5
        lambdas = manager.restore_or_init(
            init, source=other, source_select=lambda state: {"params": {"head": state["params"]["head"]}}
        )
        assert lambdas.state["params"]["head"].tolist() == [5] * 4 and not lambdas.state["params"]["enc"].any()
        # The source is a tree of parameters alone, and lacks one of them.
        select = lambda state: state["params"]  # noqa: E731
        with pytest.raises(ReferenceMismatchError, match=r"source .*weights, step 0: (.*\n)*.*source_select") as caught:
            manager.restore_or_init(init, source=tmp_path / "weights", source_select=select)
        assert "partial=True" in str(caught.value)
        got = manager.restore_or_init(init, source=tmp_path / "weights", source_select=select, partial=True)
        assert np.array_equal(got.state["params"]["enc"], kernel(7)) and got.state["params"]["head"].tolist() == [9] * 4
        none = manager.restore_or_init(init, source=lambda: None)
        assert none.tier == "init"

    play(script)


def test_a_run_begins_with_several_items_of_a_step(play: Play, tmp_path: Path):
    """As the NNX tutorial saves them; what no place is named for is initialized, and each part may come from elsewhere."""
    v1.save_checkpointables(str(tmp_path / "two" / "3"), {"model": trained(7)["params"], "optimizer": trained(7)["opt"]})
    model, opt = tmp_path / "two" / "3" / "model", tmp_path / "two" / "3" / "optimizer"

    def refused(manager: StateManager) -> None:
        wrong: list[tuple[Any, str]] = [
            ({"weights": model}, r"by its keys \(are \["),
            ({}, "by its keys"),
            ({"opt": 3}, "expected"),
        ]
        for source, what in wrong:
            with pytest.raises(ConfigError, match=what):
                manager.restore_or_init(init, source=source)
        with pytest.raises(ConfigError, match="source_select"):
            manager.restore_or_init(init, source={"params": model}, source_select="enc")
        with pytest.raises(ReferenceMismatchError, match=r"source .*optimizer"):
            manager.restore_or_init(init, source={"params": opt})
        got = manager.restore_or_init(init, source={"params": model})
        assert got.tier == "source" and np.array_equal(got.state["params"]["enc"], kernel(7)) and not got.state["opt"]["mu"].any()
        got = manager.restore_or_init(init, source={"params": model, "opt": (opt, 0)})
        assert jax.tree.structure(got.state) == jax.tree.structure(jax.eval_shape(init))
        jax.tree.map(np.testing.assert_array_equal, got.state, trained(7))

    play(refused)


def test_a_run_begins_with_one_item_of_a_step_without_a_state(play: Play, tmp_path: Path):
    """The ways that the error of such a step names."""
    v1.save_checkpointables(str(tmp_path / "orbax" / "3"), {"params": trained(7)["params"], "opt": trained(7)["opt"]})
    with pytest.raises(ReferenceMismatchError, match=r"source='SRC/3/\w+'"):
        raystate.load(tmp_path / "orbax", step=3)

    def script(manager: StateManager) -> None:
        got = manager.restore_or_init(init, source=tmp_path / "orbax" / "3" / "params", source_select=lambda state: state["params"])
        assert got.tier == "source" and np.array_equal(got.state["params"]["enc"], kernel(7))
        assert not got.state["opt"]["mu"].any()

    play(script)


def test_a_source_in_a_bucket(play: Play, other: Path, tmp_path: Path):
    with gcs_backend(tmp_path) as bucket:
        for info in open_storage(other).list():
            bucket.create(info.name, (other / info.name).read_bytes())

        def script(manager: StateManager) -> None:
            for source, scale in ((bucket.url, 5), (f"{bucket.url}/3", 3)):
                got = manager.restore_or_init(init, source=source, source_select="params")
                assert got.tier == "source" and np.array_equal(got.state["params"]["enc"], kernel(scale))

        play(script)


def test_wrong_sources_are_named(play: Play, other: Path, tmp_path: Path):
    def script(manager: StateManager) -> None:
        wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
            ({"source": tmp_path / "nothing"}, StepNotFoundError, "there is nothing at that path"),
            ({"source": (other, 4)}, StepNotFoundError, r"has no step 4; it has \[3, 5\]"),
            ({"source": 3}, ConfigError, "source: expected a run or checkpoint"),
            ({"source": (other, "3")}, ConfigError, "source: expected a run or checkpoint"),
            ({"source": other, "source_select": "("}, ConfigError, "no regular expression"),
            ({"source": other, "source_select": 3}, ConfigError, "source_select must be a function"),
            ({"source": other, "source_select": "param"}, ConfigError, r"matches no path of the state, .*\['opt', 'params'\]"),
            ({"source": other, "source_select": lambda state: {"w": 1}}, ConfigError, "leaves of the abstract state"),
            ({"source_select": "params"}, ConfigError, "give source="),
        ]
        for arguments, error, text in wrong:
            with pytest.raises(error, match=text):
                manager.restore_or_init(init, **arguments)

    play(script)
    assert raystate.Reader(other).all_steps() == [3, 5]


@pytest.mark.parametrize(
    ("init_fn", "shardings", "field", "said"),
    [
        (
            lambda key: {"w": jax.random.normal(key, (8,))},
            None,
            "init_fn",
            "can't trace init_fn: .*missing 1 required.*takes no arguments",
        ),
        (lambda: {"w": jnp.zeros(8), "name": "a model"}, None, "init_fn", "not a valid JAX type.*text and the like go into"),
        (lambda: {"w": jnp.zeros(8)}, {"v": P()}, "shardings", "don't fit what init_fn makes.*a function of the abstract state"),
        (lambda: {"w": jnp.zeros(8)}, P("data"), "shardings", "a PartitionSpec needs a mesh: call under jax.set_mesh"),
    ],
    ids=["an argument", "a text", "another tree", "no mesh"],
)
def test_what_cannot_be_initialized_is_told(init_fn: Any, shardings: Any, field: str, said: str):
    def script(rank: Rank) -> None:
        manager = rank.open("first")
        with pytest.raises(ConfigError, match=said) as caught:
            manager.restore_or_init(init_fn, shardings)
        assert caught.value.field == field
        assert manager.restore_or_init(lambda: {"w": jnp.zeros(8)}).tier == "init", "nothing is lost by the mistake"
        manager.close()

    with World() as world:
        world.play(script)


def wrong_transforms(_: Any) -> Any:
    raise ValueError("wrong transforms")


MISTAKES: dict[str, dict[str, Any]] = {
    "reference": {"reference": {"w": jnp.zeros(3)}},
    "item": {"items": {"nope": None}},
    "iterator": {"items": {"data": Broken(b"1")}},
    "step": {"step": 77},
    "mapping": {"reference": {"w": jnp.zeros(3)}, "transforms": {"w": "params/nope"}},
    "transforms": {"transforms": wrong_transforms},
    "transforms of a step": {"transforms": wrong_transforms, "step": 1},
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_restore_that_cannot_succeed_changes_nothing(play: Play, kind: str):
    """It began a lineage, and gave up what was promised and still on its way into memory or storage."""

    def script(manager: StateManager) -> None:
        world: World = manager._session.link.world  # pyright: ignore[reportAttributeAccessIssue]
        manager.restore()
        manager.save(1, trained(), items={"data": Broken(b"1")}, force=True)
        manager.wait_until_finished()
        world.slow = True
        for step in (2, 3):
            assert manager.save(step, trained(step), items={"data": Broken(b"1")}, force=True)
        lineage = manager._session.lineage
        with pytest.raises((ReferenceMismatchError, StepNotFoundError, ValueError)):
            manager.restore(**MISTAKES[kind])
        assert manager._session.lineage == lineage
        manager.wait_until_finished()
        assert manager.save(4, trained(4), items={"data": Broken(b"1")}, force=True)
        manager.close()
        assert manager.all_steps()[-3:] == [2, 3, 4]

    play(script)


def test_a_restore_that_fails_in_one_ranks_code_while_another_cannot_read_the_step(monkeypatch: pytest.MonkeyPatch):
    """Nobody restores another one, and all go on with what they had saved last."""

    tried: list[int] = []
    real = Restoring._read_memory

    def read(self: Restoring, *args: Any) -> Any:
        if self._session.rank == 1:
            tried.append(1)
            if len(tried) == 1:
                raise StorageError("the network is down")
        return real(self, *args)

    monkeypatch.setattr(Restoring, "_read_memory", read)

    def script(rank: Rank) -> None:
        data = Broken(b"1") if rank.number == 0 else Holds(b"1")
        manager = rank.begin()
        for step in range(1, 9):
            manager.save(step, {"step": step}, items={"data": data}, force=step == 5)
        manager.wait_until_finished()
        if rank.number == 0:
            with pytest.raises(ValueError, match="no such file"):
                manager.restore(items={"data": data})
        else:
            with pytest.raises(raystate.RaystateError, match=r"rank 0 .* can't use it as it was asked for"):
                manager.restore(items={"data": data})
        manager.close()
        assert manager.all_steps() == [5, 8]

    with World(ranks=2, nodes=2, save_every_steps=100) as world:
        world.play(script, ranks=2)
    assert tried


def restore_fails_with(play: Play, error: type[Exception], text: str, *, items: Any = None, **options: Any) -> None:
    """A mistake of the caller, which leaves all steps as they are."""

    def train(manager: StateManager) -> None:
        manager.restore()
        for step in range(1, 4):
            manager.save(step, trained(step), items={"data": Holds(b"shard3:17"), "ema": {"w": jnp.ones(4)}}, force=True)
        manager.wait_until_finished()

    def mistaken(manager: StateManager) -> None:
        with pytest.raises(error, match=text):
            manager.restore(jax.eval_shape(init), items=items, **options)

    def corrected(manager: StateManager) -> None:
        data = Holds(b"")
        restored = manager.restore(jax.eval_shape(init), items={"data": data})
        assert restored is not None and restored.step == 3 and data.state == b"shard3:17"
        assert manager.all_steps() == [1, 2, 3] and not restored.set_aside

    play(train)
    play.lose_memory()
    play(mistaken)
    play(corrected)


def test_another_kind_of_iterator_is_no_damage(play: Play):
    """Each step but the oldest was set aside for it."""
    restore_fails_with(play, ReferenceMismatchError, "item 'data': its saved state is no JSON", items={"data": Holds()})


@pytest.mark.parametrize("error", [StepNotFoundError, CorruptCheckpointError, StorageError])
def test_what_the_callers_function_raises_is_no_damage(play: Play, error: type[raystate.RaystateError]):
    """A function of `transforms` that loads another checkpoint, say: the same."""

    def merge(tree: Any) -> Any:
        raise error("no such adapter")

    restore_fails_with(play, error, "no such adapter", transforms=merge)


def test_what_an_iterators_own_code_raises_is_no_damage(play: Play):
    class Fetching(Holds):
        def set_state(self, state: Any) -> None:
            raise CorruptCheckpointError("the index of the data is damaged")

    restore_fails_with(play, CorruptCheckpointError, "the index of the data", items={"data": Fetching(b"")})


@dataclasses.dataclass
class Checked:
    """A node of the caller's own."""

    w: Any

    def __post_init__(self) -> None:
        if isinstance(self.w, jax.Array):
            raise CorruptCheckpointError("not what this class holds")


jax.tree_util.register_dataclass(Checked, ["w"], [])


def test_what_the_callers_own_class_raises_is_no_damage(play: Play):
    restore_fails_with(
        play, CorruptCheckpointError, "not what this class holds", items={"ema": Checked(jax.ShapeDtypeStruct((4,), jnp.float32))}
    )


@pytest.mark.parametrize("reference", [{"w": jax.ShapeDtypeStruct((4,), jnp.float32)}, {"w": P()}, {"w": ...}])
def test_references_of_items_that_are_not_there_are_no_items(play: Play, reference: Any):
    """Before the first save: they were taken for JSON, and refused."""

    def script(manager: StateManager) -> None:
        assert manager.restore_or_init(init, items={"ema": reference}).items == {"ema": reference}

    play(script)


def test_references_of_items_may_be_abstract(play: Play):
    """restore_or_init restored them, and then refused them."""

    def script(manager: StateManager) -> None:
        ema = {"w": jnp.full(4, 3.0)}
        abstract = jax.eval_shape(lambda: ema)
        assert manager.restore_or_init(init, items={"ema": abstract}).items == {"ema": abstract}
        manager.save(1, trained(), items={"ema": ema}, force=True)
        restored = manager.restore_or_init(init, items={"ema": abstract})
        assert restored.step == 1 and restored.items["ema"]["w"].tolist() == [3.0] * 4
        assert manager.save(2, restored.state, items=restored.items, force=True)

    play(script)


def test_the_newest_step_of_a_closed_manager(play: Play):
    """It was the one that had been restored."""

    def script(manager: StateManager) -> None:
        manager.restore_or_init(init)
        manager.save(1, trained(), force=True)
        manager.wait_until_finished()
        manager.restore(jax.eval_shape(init))
        manager.save(2, trained(2))
        manager.close()
        assert manager.latest_step() == 2 == manager.all_steps()[-1]

    play(script)


def test_what_is_listed_is_the_newest_for_each_question(play: Play):
    """The host's word was a moment behind: `delete(latest_step())` took the step before the newest."""
    seen: list[tuple[list[int], int | None]] = []

    def script(manager: StateManager) -> None:
        world: World = manager._session.link.world  # pyright: ignore[reportAttributeAccessIssue]
        manager.restore()
        world.published = lambda _: seen.append((manager.all_steps(), manager.latest_step()))  # nobody has told it yet
        for step in (1, 2, 3):
            manager.save(step, trained(step), force=True)
            manager.wait_until_finished()
        with pytest.raises(StorageError, match="is the newest durable step and is not deleted"):
            manager.delete(manager.latest_step() or 0)
        manager.close()

    play(script)
    assert seen == [([1], 1), ([1, 2], 2), ([1, 2, 3], 3)]


def beside(manager: StateManager, call: Callable[[], Any]) -> None:
    """Another thread's, and what it raises."""
    rank: Rank = manager._session.link.rank  # pyright: ignore[reportAttributeAccessIssue]
    other = rank.beside(lambda _: call())
    rank.rest_until(lambda: other.finished)
    if other.error is not None:
        raise other.error


@pytest.mark.parametrize("other", ["restore", "close"])
def test_a_save_that_waits_is_overtaken(play: Play, monkeypatch: pytest.MonkeyPatch, other: str):
    """By another thread: its state became durable in the new lineage, or never, and it said True."""

    def script(manager: StateManager) -> None:
        manager.restore()
        manager.save(1, trained(1), force=True)
        manager.wait_until_finished()
        real = manager._pipeline._wait_for_turn

        def waiting(step: int, force: bool) -> None:
            monkeypatch.setattr(manager._pipeline, "_wait_for_turn", real)
            real(step, force)
            beside(manager, getattr(manager, other))

        monkeypatch.setattr(manager._pipeline, "_wait_for_turn", waiting)
        said = r"another thread has called restore\(\)" if other == "restore" else "was closed"
        with pytest.raises(raystate.RaystateError, match=f"{said} during save"):
            manager.save(10, trained(10), force=True)
        assert manager.all_steps() == [1]
        if other == "restore":
            assert manager.save(2, trained(2), force=True)
            manager.close()
            assert manager.all_steps()[-1] == 2

    play(script)


@pytest.mark.parametrize("when", ["before the answer", "after it"])
def test_a_save_beside_a_close_is_refused(play: Play, monkeypatch: pytest.MonkeyPatch, when: str):
    """Another thread's, while close() waits for its answer or works on it: save() said True, and nobody waited for that step."""

    def script(manager: StateManager) -> None:
        manager.restore()
        manager.save(1, trained(1), force=True)
        real = manager._session.ask

        def save() -> None:
            with pytest.raises(raystate.RaystateError, match="is being closed by another thread during save"):
                manager.save(9, trained(9), force=True)

        def ask(*args: Any, **options: Any) -> Any:
            if options["phase"] != "close":
                return real(*args, **options)
            monkeypatch.setattr(manager._session, "ask", real)
            if when == "before the answer":
                beside(manager, save)
            reply = real(*args, **options)
            if when == "after it":
                beside(manager, save)
            return reply

        monkeypatch.setattr(manager._session, "ask", ask)
        manager.close()
        assert manager.all_steps() == [1]

    play(script)


def test_a_manager_that_could_not_open_is_not_in_the_way(monkeypatch: pytest.MonkeyPatch):
    """With several processes the next one was refused: "is open in this process: close() it first", and nobody had it."""
    world = World()

    def script(rank: Rank) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(ModelLink, "bell", no_answer)
            with pytest.raises(raystate.BarrierTimeoutError, match="does not answer"):
                rank.open("first")
            patch.setattr(jax, "process_count", lambda: 2)
            open_managers.close_earlier(world.config, takeover=False)
        manager = rank.open("second")
        assert manager.save(1, trained(1), force=True)
        manager.close()

    def no_answer(*_: Any) -> Any:
        raise raystate.BarrierTimeoutError("the HostActor does not answer")

    with contextlib.closing(world):
        world.play(script)


def test_a_forked_process_does_not_end_its_parents_manager(play: Play, monkeypatch: pytest.MonkeyPatch):
    """A child that raised in the `with` ended it, and one that left waited for answers for ten minutes."""

    def script(manager: StateManager) -> None:
        manager.restore()
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: -1)
            manager.__exit__(ValueError, ValueError("in the child"), None)
            manager.close()
            with pytest.raises(raystate.RaystateError, match="is the parent's: this process was forked"):
                manager.save(1, trained(1))
        assert manager.save(1, trained(1), force=True)
        manager.close()
        assert manager.all_steps() == [1]

    play(script)


def test_a_question_beside_a_restore_is_answered(play: Play, monkeypatch: pytest.MonkeyPatch):
    """Another thread's, while the Coordinator has ended the lineage and this process does not know it yet."""

    def script(manager: StateManager) -> None:
        def replaced(*args: Any, **kwargs: Any) -> Any:
            raise StaleAttemptError("lineage 1.2 has been replaced by 1.3", replaced=True)

        manager.restore()
        manager.save(1, trained(), force=True)
        session: Any = manager._session
        with monkeypatch.context() as patched:
            patched.setattr(session, "ask_now", replaced)
            with pytest.raises(StaleAttemptError):
                manager.is_saving_in_progress()
            patched.setattr(session, "unfinished_restore", True)
            assert not manager.is_saving_in_progress()

    play(script)


def test_a_closed_manager_keeps_nothing_of_the_state():
    """A notebook's or a sweep's: each closed one stayed for the life of the process, with three times its state."""
    closed: list[StateManager] = []

    def script(rank: Rank) -> None:
        rank.world.ensure_coordinator(join=True)
        rank.link = ModelLink(rank.world, rank, rank.host)
        manager = StateManager.__new__(StateManager)
        manager._open(rank.world.config, rank.link, 0, 1, "g", launched=False, takeover=False)
        manager.restore()
        for step in range(1, 4):
            state = {"w": jnp.full((512, 1024), float(step))}
            manager.save(step, state)
            for _ in range(20):
                rank.rest(0.02)
        manager.close()
        closed.append(manager)
        rank.manager = None

    with World(save_every_steps=100) as world:
        world.play(script)
    del world
    gc.collect()
    assert not [array for array in jax.live_arrays() if array.shape == (512, 1024)]
    left = weakref.ref(closed.pop())
    gc.collect()
    assert left() is None
