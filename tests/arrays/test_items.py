"""Items: sorting, serialization in save(), and dealing iterator states out again."""

import collections
import json
import random
from typing import Any, NamedTuple

import grain
import jax.numpy as jnp
import numpy as np
import pytest

from raystate.arrays.items import is_iterator, pack_items, set_iterators
from raystate.core.formats.errors import ConfigError, ItemTopologyError, RaystateError, ReferenceMismatchError


class Counter:
    """An iterator whose state has the given form."""

    def __init__(self, wrap=lambda n: {"n": n}, unwrap=lambda state: state["n"]):
        self.n = 0
        self._wrap, self._unwrap = wrap, unwrap

    def get_state(self):
        return self._wrap(self.n)

    def set_state(self, state):
        self.n = self._unwrap(state)


FORMS = {
    "dict": (lambda n: {"n": n}, lambda state: state["n"]),
    "bytes": (lambda n: bytes([n, 255]), lambda state: state[0]),
    "text": (lambda n: f"n={n}", lambda state: int(state[2:])),
    "number": (lambda n: n, lambda state: state),
    "numpy number": (lambda n: {"n": np.int64(n)}, lambda state: state["n"]),
}


def _dataset():
    return iter(grain.MapDataset.range(40).shuffle(seed=1).repeat().batch(4).to_iter_dataset())


def _loader():
    sampler = grain.samplers.IndexSampler(num_records=40, shuffle=True, seed=1, num_epochs=None)
    return iter(grain.DataLoader(data_source=range(40), sampler=sampler, worker_count=0))  # type: ignore[arg-type]


def test_items_are_sorted_by_kind():
    config = {"lr": 0.1, "layers": (1, 2), "n": np.int32(3)}
    packed = pack_items({"ema": {"w": jnp.ones(2), "step": 1}, "data": Counter(), "config": config}, process_index=0)
    assert list(packed.trees) == ["ema"]
    assert packed.iterators == {"data": b'{\n    "n": 0\n}'}
    assert packed.json_items == {"config": {"lr": 0.1, "layers": [1, 2], "n": 3}}
    config["lr"] = 0.2
    assert packed.json_items["config"]["lr"] == 0.1


def test_json_is_process_0s_copy_and_checked_everywhere():
    assert pack_items({"config": {"a": 1}}, process_index=1).json_items == {}
    with pytest.raises(RaystateError, match="config"):
        pack_items({"config": {"a": object()}}, process_index=1)


@pytest.mark.parametrize("form", FORMS)
def test_an_iterator_gets_its_state_back_in_its_own_form(form):
    saved = Counter(*FORMS[form])
    saved.n = 5
    state = pack_items({"data": saved}, process_index=0).iterators["data"]
    saved.n = 6  # serialized inside save()
    fresh = Counter(*FORMS[form])
    set_iterators({"data": fresh}, {"data": {0: state}}, old_world=1, world=1, process_index=0)
    assert fresh.n == 5


class Place(NamedTuple):
    """Where a reader stands."""

    shard: int
    rows: tuple[int, ...] = ()

    class Inner(NamedTuple):
        """In a class."""

        at: int


NOT_JSON = {
    "random's state": random.Random(3).getstate(),
    "numpy's state": np.random.RandomState(3).get_state(),
    "tuples in a list": {"seen": [(1, "a"), (2, ("b",), ())]},
    "named tuples": {"at": Place(3, (1, 2)), "in": [Place.Inner(1)]},
    "an OrderedDict": collections.OrderedDict([("b", 1), ("a", [(2,)])]),
    "a Counter": {"words": collections.Counter("abracadabra")},
    "numpy numbers": {"at": np.int64(3), "mean": np.float64(0.5), "name": np.str_("x"), "any": np.bool_(True)},
    "an array": {"order": np.arange(5, dtype=np.int16)},
    "keys that are no text": {1: "a", (2, 3): "b", None: "c", "d": {True: 0.5}},
    "sets": {"done": {3, 1, 2}, "names": frozenset(("b", "a"))},
    "bytes": [b"\x00\xff", b""],
    "half a character": {"a": "\ud800"},
    "our own mark": {"raystate": ["tuple", 1], "more": {"raystate": {"raystate": 2}}},
}


def _same(got: Any, want: Any) -> bool:
    assert type(got) is type(want)
    if isinstance(want, np.ndarray):
        return got.dtype == want.dtype and np.array_equal(got, want)
    if isinstance(want, dict):
        return list(got) == list(want) and all(_same(got[key], want[key]) for key in want)
    if isinstance(want, list | tuple):
        return len(got) == len(want) and all(map(_same, got, want))
    return got == want


@pytest.mark.parametrize("state", NOT_JSON.values(), ids=NOT_JSON)
def test_what_json_changes_comes_back_as_it_was(state: Any):
    """Whatever a new iterator has at its beginning: `random.setstate` of a list fails at each restart."""
    packed = pack_items({"data": Counter(lambda _: state)}, process_index=0).iterators["data"]
    got: list[Any] = []
    fresh = Counter(lambda _: None, got.append)
    set_iterators({"data": fresh}, {"data": {0: packed}}, old_world=1, world=1, process_index=0)
    assert _same(got[0], state)


def test_what_is_json_is_written_as_json():
    """As grain and stock Orbax read it."""
    state = {"a": [1, 2.5, None, True, "x"], "b": {"": {}}}
    assert pack_items({"data": Counter(lambda _: state)}, process_index=0).iterators["data"] == json.dumps(state, indent=4).encode()
    mixed = pack_items({"data": Counter(lambda n: {"n": n, "seen": (1,)})}, process_index=0).iterators["data"]
    assert json.loads(mixed) == {"n": 0, "seen": {"raystate": ["tuple", 1]}}


def test_equal_sets_are_equal_bytes():
    """Each process has another hash of a text: an equal state could not be dealt out to others."""
    one, other = (pack_items({"data": Counter(lambda _, n=n: set(n))}, process_index=0).iterators for n in (["8", "0"], ["0", "8"]))
    assert one == other and json.loads(one["data"])["raystate"] == ["set", "0", "8"]


class Mode(int):
    """More than the number that JSON keeps."""


def test_what_would_come_back_as_another_is_refused_by_name():
    local = collections.namedtuple("local", "a")  # of no module: the next process can't know it
    endless: list[Any] = []
    endless.append(endless)
    others: list[Any] = [collections.defaultdict(int), collections.deque([1]), Mode(1), local(1), bytearray(1), 1j, jnp.ones(1)]
    for held in (*others, endless, 1 << 20_000):
        with pytest.raises(ConfigError, match=r"the state of iterator 'data', a(/0)*: it can hold .* not a"):
            pack_items({"data": Counter(lambda _, held=held: {"a": held})}, process_index=0)


def test_a_named_tuple_that_is_another_now_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    packed = pack_items({"data": Counter(lambda _: Place(1))}, process_index=0).iterators["data"]
    monkeypatch.setattr(f"{__name__}.Place", collections.namedtuple("Place", "shard row"))
    with pytest.raises(ReferenceMismatchError, match=r"named tuple .*:Place of shard, rows") as caught:
        set_iterators({"data": Counter()}, {"data": {0: packed}}, old_world=1, world=1, process_index=0)
    assert caught.value.__notes__ == ["raised by the saved state of item 'data'"]


@pytest.mark.parametrize("make", [_dataset, _loader], ids=["DatasetIterator", "DataLoaderIterator"])
def test_grain_iterators_are_written_as_grain_writes_them(make, tmp_path):
    from etils import epath
    from grain.checkpoint import CheckpointHandler

    iterator = make()
    for _ in range(3):
        next(iterator)
    assert is_iterator(iterator)
    state = pack_items({"data": iterator}, process_index=0).iterators["data"]
    CheckpointHandler().save(epath.Path(tmp_path), item=iterator)
    assert state == (tmp_path / "process_0-of-1.json").read_bytes()
    json.loads(state)
    expected = [np.asarray(next(iterator)) for _ in range(3)]
    fresh = make()
    set_iterators({"data": fresh}, {"data": {0: state}}, old_world=1, world=1, process_index=0)
    assert all(np.array_equal(next(fresh), value) for value in expected)
    theirs = CheckpointHandler().restore(epath.Path(tmp_path), item=make())
    assert all(np.array_equal(next(theirs), value) for value in expected)


@pytest.mark.parametrize("method", ["get_state", "set_state"])
def test_what_an_iterator_raises_names_its_item(method):
    class Broken:
        def get_state(self):
            if method == "get_state":
                raise ValueError("mine")
            return {}

        def set_state(self, state):
            raise ValueError("mine")

    calls: list[Any] = [lambda: set_iterators({"data": Broken()}, {"data": {0: b"{}"}}, old_world=1, world=1, process_index=0)]
    if method == "get_state":
        calls.append(lambda: pack_items({"data": Broken()}, process_index=0))
    for call in calls:
        with pytest.raises(ValueError, match="mine") as caught:
            call()
        assert caught.value.__notes__ == [f"raised by {method} of item 'data'"]


def test_with_the_same_count_each_gets_its_own():
    states = {"data": {0: b'{"n": 10}', 1: b'{"n": 11}'}}
    counter = Counter()
    set_iterators({"data": counter}, states, old_world=2, world=2, process_index=1)
    assert counter.n == 11


def test_with_another_count_equal_states_go_to_everybody():
    states = {"data": {0: b'{"n": 7}', 1: b'{"n": 7}'}}
    counter = Counter()
    set_iterators({"data": counter}, states, old_world=2, world=3, process_index=2)
    assert counter.n == 7


@pytest.mark.parametrize("states", [{0: b'{"n": 7}', 1: b'{"n": 8}'}, {0: b'{"n": 7}'}, {}], ids=["differ", "one missing", "none"])
def test_other_states_cannot_be_dealt_out_and_nothing_is_set(states):
    good, bad = Counter(), Counter()
    by_item = {"good": {0: b'{"n": 7}', 1: b'{"n": 7}'}, "bad": states}
    with pytest.raises(ItemTopologyError, match=r"'bad'.*2.*3") as caught:
        set_iterators({"good": good, "bad": bad}, by_item, old_world=2, world=3, process_index=0)
    assert (caught.value.saved_processes, caught.value.processes) == (2, 3)
    assert (good.n, bad.n) == (0, 0)


def test_with_the_same_count_a_missing_state_is_an_error():
    with pytest.raises(ItemTopologyError, match="process 1 of 2"):
        set_iterators({"data": Counter()}, {"data": {0: b"{}"}}, old_world=2, world=2, process_index=1)


# ---------------------------------------------------------------- grain, with another number of processes


BATCH = 8
FEW_AHEAD = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)  # by itself grain reads 500 batches ahead


def _rows_of(process, processes):
    share = BATCH // processes
    order = grain.MapDataset.range(40).seed(1).shuffle().repeat().batch(BATCH)
    return iter(order.map(lambda rows: rows[process * share : (process + 1) * share]).to_iter_dataset(FEW_AHEAD))


def _every_nth(process, processes):
    order = grain.MapDataset.range(40).seed(1).shuffle().repeat()
    return iter(order[process::processes].batch(BATCH // processes).to_iter_dataset(FEW_AHEAD))


def _sharded_loader(process, processes):
    shards = grain.sharding.ShardOptions(shard_index=process, shard_count=processes)
    sampler = grain.samplers.IndexSampler(num_records=40, shuffle=True, seed=1, num_epochs=None, shard_options=shards)
    return iter(grain.DataLoader(data_source=range(40), sampler=sampler, worker_count=0))  # type: ignore[arg-type]


def _train(make, sizes, steps):
    """The global batch of each step, when the number of processes changes and each group goes on from what the one before saved."""
    seen, states, before = [], {}, 0
    for processes in sizes:
        iterators = [make(process, processes) for process in range(processes)]
        if before:
            for process, iterator in enumerate(iterators):
                set_iterators({"data": iterator}, {"data": states}, old_world=before, world=processes, process_index=process)
        seen += [np.concatenate([np.atleast_1d(next(iterator)) for iterator in iterators]) for _ in range(steps)]
        packed = [pack_items({"data": iterator}, process_index=process) for process, iterator in enumerate(iterators)]
        states, before = {process: one.iterators["data"] for process, one in enumerate(packed)}, processes
    return seen


def test_rows_of_global_batches_keep_their_order():
    """Beyond the end of an epoch, too."""
    np.testing.assert_array_equal(_train(_rows_of, (2, 1, 4, 2), 3), _train(_rows_of, (2,), 12))


def test_every_nth_example_keeps_the_examples_of_each_step():
    other, same = _train(_every_nth, (2, 1, 4, 2), 3), _train(_every_nth, (2,), 12)
    assert [sorted(batch) for batch in other] == [sorted(batch) for batch in same]


def test_a_sharded_loader_is_refused_with_both_counts():
    assert len(_train(_sharded_loader, (2, 2), 3)) == 6
    with pytest.raises(ItemTopologyError, match=r"'data': the states of 2 processes can't be dealt out to 1: they differ"):
        _train(_sharded_loader, (2, 1), 3)


def test_a_generator_is_told_of_counted():
    with pytest.raises(ConfigError, match=r"raystate\.Counted\(make_iterator\)"):
        pack_items({"data": (row for row in range(3))}, process_index=0)
