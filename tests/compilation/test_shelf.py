"""A run's compiled programs in its storage: what one node has compiled another one is given, and only that."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from raystate.compilation import ProgramStore
from raystate.compilation.store import SUFFIX, program_name
from raystate.core.formats.errors import StorageError
from raystate.storage import Storage, StorageWrapper, collect_garbage, open_storage
from raystate.storage.names import COMPILED, log_name
from raystate.transfer.removing import remove_run
from tests.compilation.nodes import CAP, Node, shelf
from tests.damage.damages import FIRST, KINDS, ONE_OBJECT, Copy, Damage
from tests.damage.test_links import package_in
from tests.storage.attempt import Attempt
from tests.storage.backends import directory_backend, gcs_backend, memory_backend

PROGRAMS = {f"jit_{name}": f"program {name} ".encode() * 50 for name in ("init", "step", "more", "norm")}
SEEDS, CHUNK = 1000, 125


def _run(storage: Storage) -> Storage:
    storage.create(log_name(1), b"{}")
    return storage


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    return _run(open_storage(tmp_path / "run"))


@pytest.fixture(params=[directory_backend, memory_backend, gcs_backend], ids=["directory", "memory", "gcs"])
def any_run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    with request.param(tmp_path) as storage:
        yield _run(storage)


def _programs(storage: Storage) -> list[str]:
    return [info.name for info in storage.list(COMPILED) if "/used/" not in info.name]


def _lists(storage: Storage) -> list[str]:
    return [info.name for info in storage.list(COMPILED) if "/used/" in info.name]


def test_another_node_compiles_nothing(any_run: Storage, tmp_path: Path):
    assert Node(any_run, tmp_path / "a").compiles(PROGRAMS) == [*PROGRAMS]
    assert Node(any_run, tmp_path / "b").compiles(PROGRAMS) == []
    assert Node(any_run, tmp_path / "b").compiles(PROGRAMS) == [], "nor does the next process there"
    assert len(_programs(any_run)) == len(PROGRAMS)
    assert len(_lists(any_run)) == 1, "a newer one takes the place of that before"


def test_what_the_node_had_before_travels_too(run: Storage, tmp_path: Path):
    other = _run(open_storage(tmp_path / "other"))
    assert Node(other, tmp_path / "a").compiles(PROGRAMS)
    assert Node(run, tmp_path / "a").compiles(PROGRAMS) == [], "of another run of this user's"
    shutil.rmtree(tmp_path / "other")
    assert Node(run, tmp_path / "b").compiles(PROGRAMS) == []


def test_a_run_has_what_it_uses_and_no_more(run: Storage, tmp_path: Path):
    other = _run(open_storage(tmp_path / "other"))
    Node(other, tmp_path / "a").compiles(PROGRAMS)
    Node(run, tmp_path / "a").compiles({"jit_step": PROGRAMS["jit_step"]})
    assert [name.rpartition("/")[2].partition(".")[0] for name in _programs(run)] == [program_name("jit_step")]


def test_ranks_share_what_they_can(run: Storage, tmp_path: Path):
    shared, own = {"jit_shared": b"shared"}, [{f"jit_of_{rank}": b"%d" % rank} for rank in range(2)]
    for rank in range(2):
        Node(run, tmp_path / f"first-{rank}", rank=rank, world=2).compiles({**shared, **own[rank]})
    assert len(_programs(run)) == 3
    for rank in range(2):
        assert Node(run, tmp_path / f"second-{rank}", rank=rank, world=2).compiles({**shared, **own[rank]}) == []
    moved = Node(run, tmp_path / "moved", rank=0, world=2).compiles({**shared, **own[1]})
    assert moved == [], "what the rank has not used before it is given when it asks"


def test_what_was_used_last_is_there_before_it_is_asked_for(run: Storage, tmp_path: Path):
    Node(run, tmp_path / "a").compiles({**PROGRAMS, "jit_old": b"old"})
    Node(run, tmp_path / "a").compiles(PROGRAMS)
    new = shelf(run)
    assert {program_name(key) for key in PROGRAMS} == {*new.begin()[: len(PROGRAMS)]}
    assert new.begin()[len(PROGRAMS) :] == [program_name("jit_old")]
    assert {*shelf(run, rank=5).begin()} == {*new.begin()}, "a rank without a list takes another's"
    assert shelf(run, world=2).begin() == []


def test_hosts_of_another_kind_don_t_get_it(run: Storage, tmp_path: Path):
    Node(run, tmp_path / "a").compiles(PROGRAMS)
    assert Node(run, tmp_path / "b", host="another-cpu").compiles(PROGRAMS) == [*PROGRAMS]
    assert len(_programs(run)) == 2 * len(PROGRAMS)


def test_one_that_jax_could_not_load_is_replaced(run: Storage, tmp_path: Path):
    Node(run, tmp_path / "a").compiles(PROGRAMS)
    node = Node(run, tmp_path / "b")
    assert node.programs.get("jit_step") == PROGRAMS["jit_step"]
    node.settle()
    node.programs.put("jit_step", b"compiled here, since that one could not be loaded")
    node.settle()
    assert Node(run, tmp_path / "c").programs.get("jit_step") == b"compiled here, since that one could not be loaded"
    assert len(_programs(run)) == len(PROGRAMS)


# ---------------------------------------------------------------- the cap


def _size(storage: Storage) -> int:
    return sum(storage.stat(name).size for name in _programs(storage))


def test_the_cap_holds_and_the_least_recently_used_goes_first(any_run: Storage, tmp_path: Path):
    for number in range(12):
        compiled = {f"jit_{number}": bytes([number]) * 1000}
        always = {"jit_always": b"a" * 1000}
        Node(any_run, tmp_path / "a", cap_bytes=4500).compiles({**always, **compiled})
        assert _size(any_run) <= 4500
    left = {name.rpartition("/")[2].partition(".")[0] for name in _programs(any_run)}
    assert left == {program_name(key) for key in ("jit_always", "jit_9", "jit_10", "jit_11")}


def test_the_cap_holds_for_all_ranks_and_hosts(run: Storage, tmp_path: Path):
    for start in range(3):
        for rank in range(4):
            node = Node(run, tmp_path / str(rank), cap_bytes=4500, rank=rank, world=4, host=f"cpu-{rank % 2}")
            node.compiles({f"jit_{start}_{rank}_{number}": os.urandom(1000) for number in range(2)})
            assert _size(run) <= 4500


def test_more_than_the_cap_is_not_put_there(run: Storage, tmp_path: Path):
    Node(run, tmp_path / "a", cap_bytes=4500).compiles({"jit_huge": bytes(5000)})
    assert _programs(run) == []
    many = {f"jit_{number}": bytes([number]) * 1000 for number in range(8)}
    local = ProgramStore(tmp_path / "a", CAP)
    for key, value in many.items():
        local.put(key, value)
    for _ in range(2):
        first = shelf(run, cap_bytes=4500)
        first.begin()
        first.offer([*map(program_name, many)], local)
        assert {name.rpartition("/")[2].partition(".")[0] for name in _programs(run)} == {
            program_name(f"jit_{n}") for n in range(4, 8)
        }


def test_what_is_not_ours_stays(run: Storage, tmp_path: Path):
    names = [f"{COMPILED}/notes.txt", f"{COMPILED}/mine/{'a' * 64}", f"{COMPILED}/mine/used/list.json", f"{COMPILED}/mine/sub/x"]
    for name in names:
        run.create(name, b"of somebody else")
    Node(run, tmp_path / "a", cap_bytes=600).compiles(PROGRAMS)
    assert [run.read(name) for name in names] == [b"of somebody else"] * 4


def test_gc_leaves_them_and_rm_takes_them(tmp_path: Path):
    storage = open_storage(tmp_path / "run")
    Attempt(storage, "first", package_in).save(4)
    Node(storage, tmp_path / "a").compiles(PROGRAMS)
    before = storage.list(COMPILED)
    collect_garbage(storage)
    assert storage.list(COMPILED) == before and len(before) == len(PROGRAMS) + 1
    assert remove_run(storage) == ()
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- storage that fails


class Broken(StorageWrapper):
    """Storage out of service."""

    out = False

    def before(self, operation: str, name: str) -> None:
        if self.out:
            raise StorageError(f"{operation} {name} failed: out of service", operation=operation, path=name)


def test_storage_that_fails_costs_a_compilation_and_one_line(run: Storage, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    broken = Broken(run)
    broken.out = True
    with caplog.at_level(logging.WARNING):
        node = Node(broken, tmp_path / "a")
        assert node.compiles(PROGRAMS) == [*PROGRAMS]
    (told,) = caplog.messages
    assert "out of service" in told and "what a node lacks it compiles" in told
    broken.out = False
    node.compiles({**PROGRAMS, "jit_later": b"later"})
    assert Node(run, tmp_path / "b").compiles(PROGRAMS) == [], "they were put there with the next one"


def test_storage_that_hangs_is_waited_for_once(
    run: Storage, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    import threading

    from raystate.compilation import run_programs

    Node(run, tmp_path / "a").compiles(PROGRAMS)
    monkeypatch.setattr(run_programs, "PROGRAMS_S", 0.05)
    goes_on = threading.Event()

    class Hangs(StorageWrapper):
        def before(self, operation: str, name: str) -> None:
            if operation == "read" and "/used/" not in name:
                goes_on.wait()

    try:
        node = Node(Hangs(run), tmp_path / "b")
        assert all(node.programs.get(key) is None for key in PROGRAMS)
        (told,) = caplog.messages
        assert "no answer" in told
    finally:
        goes_on.set()


def test_a_run_that_was_removed_stays_so(run: Storage, tmp_path: Path):
    node = Node(run, tmp_path / "a")
    run.delete_tree(".raystate")
    node.compiles(PROGRAMS)
    assert run.list() == []


# ---------------------------------------------------------------- damage


@pytest.fixture
def _no_power_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes the most time of a thousand seeds; tests/storage has them."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks of two starts have left, in storage and on their nodes."""
    root = tmp_path_factory.mktemp("damaged")
    storage = _run(open_storage(root / "run"))
    for start in range(2):
        for rank in range(2):
            own = {f"jit_of_{rank}": b"%d" % rank * 500, f"jit_again_{start}": b"%d" % start * 500}
            Node(storage, root / f"node-{rank}", rank=rank, world=2).compiles({**PROGRAMS, **own})
    return root


ALL = {
    **PROGRAMS,
    **{f"jit_of_{one}": b"%d" % one * 500 for one in range(2)},
    **{f"jit_again_{one}": b"%d" % one * 500 for one in range(2)},
}


def _damage(original: Path, scratch: Path, seed: int) -> tuple[Path, str, list[Damage]]:
    """A copy of it in which something is damaged: (its folder, which of its folders, what was done)."""
    drawn = random.Random(seed)
    root = scratch / str(seed)
    shutil.copytree(original, root, copy_function=os.link)
    which = drawn.choice([f"run/{COMPILED}", f"run/{COMPILED}", "node-0", "node-1"])
    shutil.rmtree(root / which)
    copy = Copy(original / which, root / which)
    kinds = ONE_OBJECT if which.startswith("node") else tuple(KINDS)  # a node has no folder below its own
    damages = [copy.draw(seed * 10 + number, kinds=kinds) for number in range(drawn.choice([1, 1, 2, 4]))]
    for damage in damages:
        for name, data in ((damage.name, damage.data), *([damage.other] if damage.other else [])):
            place = root / which / name
            if damage.kind == "delete folder":
                shutil.rmtree(place, ignore_errors=True)
                continue
            place.unlink(missing_ok=True)
            if data is not None and place.parent.exists():
                place.write_bytes(data)
    return root, which, damages


@pytest.mark.usefixtures("_no_power_cuts")
@pytest.mark.parametrize("chunk", [0, *(pytest.param(chunk, marks=pytest.mark.more) for chunk in range(1, SEEDS // CHUNK))])
def test_no_damage_gives_a_wrong_program(original: Path, tmp_path: Path, chunk: int, caplog: pytest.LogCaptureFixture):
    """`Node.compiles` compares what it is given. One compilation and one line for each damaged program, and then all is whole."""
    harmed = 0
    for seed in range(FIRST + chunk * CHUNK, FIRST + (chunk + 1) * CHUNK):
        root, which, damages = _damage(original, tmp_path, seed)
        caplog.clear()
        storage = open_storage(root / "run")
        is_node = which.startswith("node")
        compiled = Node(storage, root / (which if is_node else "new"), rank=seed % 2, world=2).compiles(ALL)
        programs = {name for damage in damages for name in damage.names if "/used" not in name}
        shown = f"{which}: {'; '.join(map(str, damages))}: {compiled}, {caplog.messages}"
        assert len(caplog.messages) <= len(programs), shown
        if is_node:
            assert not compiled, f"storage has it: {shown}"
        elif all(damage.kind != "delete folder" for damage in damages):
            assert len(compiled) <= len(programs), shown
        harmed += bool(compiled or caplog.messages)
        assert Node(storage, root / "newer", world=2).compiles(ALL) == [], shown
        shutil.rmtree(root)
    assert harmed > CHUNK / 4, "the damages did none"


def test_a_program_under_the_name_of_another_is_not_taken(run: Storage, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    Node(run, tmp_path / "a").compiles(PROGRAMS)
    name = next(one for one in _programs(run) if program_name("jit_step") in one)
    other = next(one for one in _programs(run) if program_name("jit_init") in one)
    theirs, seal = run.read(other), other.rpartition(".")[2]
    run.delete(name)
    run.create(f"{name.rpartition('.')[0]}.{seal}", theirs)  # whole, and named by its own seal
    assert Node(run, tmp_path / "b").compiles(PROGRAMS) == ["jit_step"]
    assert len([one for one in caplog.messages if "is damaged: it is removed, and compiled again" in one]) == 1


def test_a_list_is_no_more_than_advice(run: Storage, tmp_path: Path):
    Node(run, tmp_path / "a").compiles(PROGRAMS)
    (name,) = _lists(run)
    for data in (
        b"",
        b"[1]",
        b"{",
        b"\xff",
        json.dumps({"../../x": 1, "a": "b", program_name("jit_step"): 10**30}).encode(),
        b"[" * 10**5,
    ):
        run.delete(name)
        run.create(name, data)
        folder = tmp_path / "b"
        assert Node(run, folder).compiles(PROGRAMS) == [], data
        assert {path.suffix for path in folder.iterdir()} == {SUFFIX}
        shutil.rmtree(folder)
        (name,) = _lists(run)
