"""Layouts live as long as somebody may need them, and not longer."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from raystate.arena import HostArena, SlotSet, TrainerArena, arena_path
from raystate.arena import layouts as module
from raystate.arena.locks import FileLock
from raystate.arena.trainer import MARKED_LAYOUTS
from raystate.core.formats.errors import CapacityError, CorruptCheckpointError, RaystateError
from raystate.core.formats.messages import Staged
from raystate.core.formats.tree import SlotTable
from tests.arena.sets import NODE, SIZES, Child, OpenHost, remove_gone


def table(ref: str) -> bytes:
    return SlotTable(layout_ref=ref, crc32c=()).to_bytes()


def commit(trainer: TrainerArena, ref: str, slot: int = 0) -> None:
    trainer.slots[slot].begin()
    header = Staged(lineage="1.1.a", step=1, rank=0, world=1, layout="l", promised=False, nbytes=0)
    trainer.slots[slot].commit(header, table(ref))


def kept(host: HostArena) -> list[str]:
    return sorted(os.listdir(host.path / "layouts"))


def test_trainer_and_host_share_them(host: HostArena, held: SlotSet):
    with TrainerArena.attach(held.path, trainer="t1") as trainer:
        refs = [trainer.put_layout(b"one"), host.put_layout(b"two")]
        assert host.get_layout(refs[0]) == b"one" and trainer.get_layout(refs[1]) == b"two"
        assert host.put_layout(b"one") == trainer.put_layout(b"one") == refs[0] and kept(host) == sorted(refs)
        (host.path / "layouts" / refs[0]).write_bytes(b"other")
        with pytest.raises(CorruptCheckpointError, match="damaged"):
            trainer.get_layout(refs[0])


def test_what_a_trainer_has_put_and_not_named_yet_stays(host: HostArena, held: SlotSet):
    with TrainerArena.attach(held.path, trainer="t1") as trainer:
        ref = trainer.put_layout(b"one")
        trainer.slots[0].begin()
        assert host.prune_layouts() == [] and trainer.get_layout(ref) == b"one"
        commit(trainer, ref)
        trainer.slots[0].begin()  # its only slot is being filled again: nobody names it at this moment
        assert host.prune_layouts() == []
        assert trainer.put_layout(b"one") == ref and trainer.get_layout(ref) == b"one"
        commit(trainer, ref)
    assert host.prune_layouts() == [] and host.get_layout(ref) == b"one"  # the trainer is gone, its slot names it
    held.slots[0].invalidate()
    assert host.prune_layouts() == [ref] and kept(host) == []
    with pytest.raises(CorruptCheckpointError, match="is not in the arena"):
        host.get_layout(ref)


def test_what_a_trainer_never_named_goes_after_it(host: HostArena, held: SlotSet):
    with TrainerArena.attach(held.path, trainer="t1") as trainer:
        one, two = trainer.put_layout(b"one"), trainer.put_layout(b"two")
        commit(trainer, two)
    assert host.prune_layouts() == [one] and kept(host) == [two]


def test_a_tree_that_changes_at_each_step_leaves_no_heap_of_layouts(host: HostArena, held: SlotSet):
    with TrainerArena.attach(held.path, trainer="t1") as trainer:
        for step in range(5 * MARKED_LAYOUTS):
            ref = trainer.put_layout(f"tree {step}".encode())
            commit(trainer, ref)
        assert len(kept(host)) == 5 * MARKED_LAYOUTS
        host.prune_layouts()
        assert len(kept(host)) <= MARKED_LAYOUTS + len(held.slots)
        assert trainer.get_layout(ref) == f"tree {step}".encode()
        assert trainer.put_layout(b"tree 0") in kept(host)


def test_another_trainers_layouts_are_its_own_business(host: HostArena, held: SlotSet):
    other = host.allot(trainer="t2", **SIZES)
    with TrainerArena.attach(held.path, trainer="t1") as one, TrainerArena.attach(other.path, trainer="t2") as two:
        ref = one.put_layout(b"both")
        assert two.put_layout(b"both") == ref
        one.close()
        assert host.prune_layouts() == [] and kept(host) == [ref]  # the first is gone, the second has put it as well
    assert host.prune_layouts() == [ref]


def test_a_set_that_is_handed_on_keeps_what_its_slots_name(host: HostArena, held: SlotSet):
    with TrainerArena.attach(held.path, trainer="t1") as trainer:
        never, named = trainer.put_layout(b"never"), trainer.put_layout(b"named")
        commit(trainer, named)
    assert host.allot(trainer="t2", **SIZES) is held
    with TrainerArena.attach(held.path, trainer="t2") as trainer:
        own = trainer.put_layout(b"own")
        assert host.prune_layouts() == [never] and kept(host) == sorted([named, own])
        trainer.slots[0].begin()
        assert host.prune_layouts() == [named]


def test_removing_a_set_takes_its_layouts_with_it(host: HostArena, held: SlotSet):
    other = host.allot(trainer="t2", **SIZES)
    with TrainerArena.attach(held.path, trainer="t1") as one, TrainerArena.attach(other.path, trainer="t2") as two:
        shared, own = one.put_layout(b"shared"), one.put_layout(b"own")
        two.put_layout(b"shared")
        commit(one, own)
        commit(two, shared)
    host.remove_set(held)
    assert kept(host) == [shared]
    assert remove_gone(host) == [1] and kept(host) == []


def test_a_host_that_adopts_knows_what_attached_trainers_have_put(open_host: OpenHost, host: HostArena, held: SlotSet):
    gone = host.allot(trainer="t2", **SIZES)
    with TrainerArena.attach(held.path, trainer="t1") as trainer:
        with TrainerArena.attach(gone.path, trainer="t2") as left:
            left.put_layout(b"left")
        ref = trainer.put_layout(b"one")
        (host.path / "layouts" / ".interrupted.1.ab").write_bytes(b"half")
        host.close()
        host = open_host()
        assert host.adopted and kept(host) == [ref]
        assert trainer.get_layout(ref) == b"one"


def test_what_the_host_itself_has_put_stays(host: HostArena):
    mine, theirs = host.put_layout(b"mine"), module.put_layout(host.path, b"theirs")
    assert host.prune_layouts(keep=[theirs]) == [] and host.prune_layouts() == [theirs] and kept(host) == [mine]


def test_a_slot_with_a_table_of_another_kind_names_nothing(host: HostArena, held: SlotSet):
    with TrainerArena.attach(held.path, trainer="t1") as trainer:
        ref = trainer.put_layout(b"one")
        for number, content in enumerate((b"", b"[1]", b'{"layout_ref":"x"}')):
            trainer.slots[number].begin()
            header = Staged(lineage="1.1.a", step=1, rank=0, world=1, layout="l", promised=False, nbytes=0)
            trainer.slots[number].commit(header, content)
        assert host.prune_layouts() == []
    assert host.prune_layouts() == [ref]


def test_nobody_prunes_between_the_mark_and_the_layout(host: HostArena, held: SlotSet, monkeypatch: pytest.MonkeyPatch):
    """At every point of a put at which the trainer may be interrupted, another one that looks for what can go takes nothing."""
    mark, exists, replace_file = module._mark, Path.exists, module.replace_file
    looks: list[str] = []

    def look(where: str) -> None:
        assert host.prune_layouts() == []
        looks.append(where)

    def looking_mark(path: Path, ref: str) -> None:
        look("before the mark")
        mark(path, ref)
        look("after the mark")

    def looking_exists(path: Path) -> bool:
        found = exists(path)
        if path.parent.name == "layouts":
            look("after the question whether it is there")
        return found

    def looking_replace(path: Path, data: bytes) -> None:
        replace_file(path, data)
        look("after the layout")

    unneeded = module.put_layout(host.path, b"one")  # there already, and due to go: the put finds it and does not write it again
    monkeypatch.setattr(module, "_mark", looking_mark)
    monkeypatch.setattr(Path, "exists", looking_exists)
    monkeypatch.setattr(module, "replace_file", looking_replace)
    with TrainerArena.attach(held.path, trainer="t1") as trainer:
        refs = [trainer.put_layout(b"one"), trainer.put_layout(b"two")]
        assert refs[0] == unneeded and len(set(looks)) == 4 and len(looks) == 7
        monkeypatch.undo()
        assert host.prune_layouts() == [] and kept(host) == sorted(refs)
    assert host.prune_layouts() == sorted(refs)


_PUTS = """
with TrainerArena.attach(sys.argv[1], trainer="t1") as trainer:
    from raystate.core.formats.tree import SlotTable
    number = 0
    while True:
        number += 1
        ref = trainer.put_layout(b"layout %d" % (number % 7))
        slot = trainer.slots[number % len(trainer.slots)]
        slot.begin()
        slot.commit(
            Staged(lineage="1.1.a", step=number, rank=0, world=1, layout="l", promised=False, nbytes=0),
            SlotTable(layout_ref=ref, crc32c=()).to_bytes(),
        )
        if number == 100:
            print("putting", flush=True)
"""


def test_every_slot_of_a_busy_trainer_finds_its_layout_until_and_after_it_is_killed(host: HostArena, held: SlotSet, child: Child):
    process, _ = child(_PUTS, held.path)
    stop = threading.Event()

    def prune() -> None:
        while not stop.is_set():
            host.prune_layouts()

    pruner = threading.Thread(target=prune)
    pruner.start()
    try:
        read = 0
        while read < 300:
            for slot in held.slots:
                if (content := slot.read()) is not None:
                    host.get_layout(SlotTable.from_bytes(content.table).layout_ref)
                    read += 1
        process.kill()
        process.wait()
    finally:
        stop.set()
        pruner.join()
    host.prune_layouts()
    named = {SlotTable.from_bytes(content.table).layout_ref for slot in held.slots if (content := slot.read())}
    assert set(kept(host)) == named and all(host.get_layout(ref) for ref in named)


def test_a_trainer_that_stopped_while_it_put_one_keeps_nobody_waiting(
    host: HostArena, held: SlotSet, monkeypatch: pytest.MonkeyPatch
):
    with TrainerArena.attach(held.path, trainer="t1") as trainer:
        stopped = FileLock.take(host.path / "layouts", shared=True, directory=True)
        assert stopped is not None
        with stopped:
            ref = trainer.put_layout(b"one")
            assert host.prune_layouts() == []
        pruning = FileLock.take(
            host.path / "layouts", shared=False, directory=True
        )  # a HostActor that was stopped in the middle of it
        assert pruning is not None
        monkeypatch.setattr(module, "FILE_S", 0.0)
        with pruning:
            assert trainer.put_layout(b"one") == ref  # it knows that this one is there
            with pytest.raises(RaystateError, match="was locked by another process"):
                trainer.put_layout(b"two")


def test_putting_after_the_end_is_an_error_that_says_so(
    root: Path, host: HostArena, held: SlotSet, monkeypatch: pytest.MonkeyPatch
):
    trainer = TrainerArena.attach(held.path, trainer="t1")

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "replace_file", full)
        with pytest.raises(CapacityError, match=r"layout of 3 bytes .*No space left"):
            trainer.put_layout(b"two")
    host.close(remove=True)
    assert not arena_path(root, "r1", NODE).exists()
    with pytest.raises(RaystateError, match="is gone"):
        trainer.put_layout(b"one")
    trainer.close()
    with pytest.raises(RaystateError, match="has detached"):
        trainer.put_layout(b"three")
