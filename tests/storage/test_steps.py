from __future__ import annotations

import dataclasses

import pytest

from raystate.core.formats.errors import CorruptCheckpointError, StorageError
from raystate.core.formats.tree import Package
from raystate.storage import ObjectExistsError, ObjectMissingError, StepFolder, Storage, foreign_steps, visible_steps
from raystate.storage.base import TEMPORARY_PREFIX
from raystate.storage.names import TRASH, attempt_of, save_of, split_saved, step_of, writer_name
from raystate.testing.storage import Recording
from raystate.testing.storage.contract import tree
from tests.storage.backends import SAVE, STEP, a_package, step_tree


def write_data(storage: Storage, package: Package, data: dict[str, bytes]) -> StepFolder:
    folder = StepFolder(storage, package.step, package.save)
    for name, part in data.items():
        storage.create(f"{folder.write_prefix}/{name}", part)
    return folder


def published(storage: Storage, step: int = STEP, save: str = SAVE, seed: int = 0) -> tuple[StepFolder, Package, dict[str, bytes]]:
    package, data = a_package(step, save, seed=seed)
    folder = write_data(storage, package, data)
    folder.assemble(package)
    folder.put_package(package)
    folder.publish(package)
    return folder, package, data


def packages(storage: Storage) -> list[str]:
    return [info.name for info in storage.list(".raystate/steps")]


def test_the_whole_life_of_a_step(storage: Storage):
    package, data = a_package()
    folder = write_data(storage, package, data)
    assert visible_steps(storage) == ()
    folder.assemble(package)
    folder.put_package(package)
    assert visible_steps(storage) == ()
    assert folder.read_package() == package
    folder.publish(package)
    assert visible_steps(storage) == (STEP,)
    assert tree(storage, str(STEP)) == step_tree(package, data)
    assert packages(storage) == [f".raystate/steps/{STEP}.{SAVE}.json"]
    assert storage.list(".raystate/work") == []
    folder.retire()
    assert tree(storage) == {}


def test_what_others_put_at_the_place_of_a_step(storage: Storage):
    """An empty folder is in nobody's way. Anything else is named, and when it has been moved away the step is published."""
    if not storage.is_directory:
        return  # an object store has no places, only names
    package, data = a_package()
    folder = write_data(storage, package, data)
    folder.assemble(package)
    folder.put_package(package)
    place = storage.local_path(str(STEP))
    for occupy in (lambda: place.write_text("mine"), lambda: place.symlink_to("nowhere")):
        occupy()
        assert visible_steps(storage) == ()
        with pytest.raises(StorageError, match=f"{STEP} is there and is no checkpoint: move it away"):
            folder.publish(package)
        place.unlink()
    place.mkdir()
    assert visible_steps(storage) == ()
    folder.publish(package)
    assert tree(storage, str(STEP)) == step_tree(package, data)
    folder.retire()
    place.write_text("mine")
    folder.retire()
    assert storage.list(TRASH) == []


def test_nothing_is_committed_where_a_file_lies(storage: Storage):
    """Once committed, it could never be published."""
    if not storage.is_directory:
        return  # an object store has no places, only names
    package, data = a_package()
    folder = write_data(storage, package, data)
    place = storage.local_path(str(STEP))
    for occupy in (lambda: place.write_text("mine"), lambda: place.symlink_to("nowhere")):
        occupy()
        with pytest.raises(StorageError, match=f"{STEP} is there already: move it away"):
            folder.assemble(package)
        place.unlink()
    folder.assemble(package)


def test_where_hosts_write(storage: Storage):
    prefix = StepFolder(storage, 7, "a2k3").write_prefix
    assert prefix == (".raystate/work/7.a2k3" if storage.is_directory else "7")


def test_the_marker_is_the_last_file_of_an_object_store(storage: Storage):
    recording = Recording(storage)
    published(recording)
    if storage.is_directory:
        assert recording.operations[-1][0] == "rename_tree"
        return
    created = [name for operation, name in recording.operations if operation == "create" and name.startswith(f"{STEP}/")]
    assert created[-2:] == [f"{STEP}/state/commit_success.txt", f"{STEP}/commit_success.txt"]


def test_the_marker_goes_first(storage: Storage):
    folder, _, _ = published(storage)
    recording = Recording(storage)
    StepFolder(recording, folder.step, folder.save).retire()
    changing = [one for one in recording.operations if one[0] in ("delete", "rename_tree", "delete_tree")]
    assert changing[0] == (("rename_tree", "1200") if storage.is_directory else ("delete", "1200/commit_success.txt"))


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_missing_data_is_neither_assembled_nor_published(storage: Storage, damage: str):
    package, data = a_package()
    folder = write_data(storage, package, data)
    victim = sorted(data)[1]
    storage.delete(f"{folder.write_prefix}/{victim}")
    if damage == "short":
        storage.create(f"{folder.write_prefix}/{victim}", b"short")
    for call in (folder.assemble, folder.publish):
        with pytest.raises(StorageError, match=victim) as caught:
            call(package)
        assert caught.value.step == STEP
        assert visible_steps(storage) == ()


def test_temporary_files_of_the_dead_are_not_published(storage: Storage):
    """A writer that died in mid-create has left one in the work folder."""
    if not storage.is_directory:
        return  # an object store has none
    package, data = a_package()
    folder = write_data(storage, package, data)
    left = storage.local_path(folder.write_prefix) / "state" / f"{TEMPORARY_PREFIX}0123"
    left.write_bytes(b"half")
    folder.assemble(package)
    assert not left.exists()


def test_a_package_without_a_marker_is_refused(storage: Storage):
    package, data = a_package()
    files = {name: part for name, part in package.files.items() if name != "commit_success.txt"}
    with pytest.raises(StorageError, match=r"no commit_success\.txt"):
        write_data(storage, package, data).assemble(dataclasses.replace(package, files=files))


def test_a_package_of_another_save_is_refused(storage: Storage):
    package, _ = a_package()
    other = StepFolder(storage, STEP, "a7k2")
    for call in (other.assemble, other.put_package, other.publish):
        with pytest.raises(StorageError, match="save a7k1"):
            call(package)


def test_nothing_is_assembled_onto_another_step(storage: Storage):
    published(storage)
    package, data = a_package(save="a7k2", seed=1)
    before = tree(storage, str(STEP))
    folder = write_data(storage, package, data)
    with pytest.raises(StorageError, match="there already"):
        folder.assemble(package)
    # Were it committed all the same, publishing stops and changes nothing.
    with pytest.raises(StorageError, match="overwritten"):
        folder.publish(package) if not storage.is_directory else _publish_unassembled(folder, package)
    if storage.is_directory:
        assert tree(storage, str(STEP)) == before
    else:
        assert before.items() <= tree(storage, str(STEP)).items()


def _publish_unassembled(folder: StepFolder, package: Package) -> None:
    for name, data in package.files.items():
        folder.storage.create(f"{folder.write_prefix}/{name}", data)
    folder.publish(package)


def test_publishing_without_any_data_left(storage: Storage):
    package, _ = a_package()
    with pytest.raises(StorageError, match=r"missing") as caught:
        StepFolder(storage, STEP, SAVE).publish(package)
    assert caught.value.operation == "publish"
    assert tree(storage) == {}


def test_a_second_package_of_one_save(storage: Storage):
    package, _ = a_package()
    folder = StepFolder(storage, STEP, SAVE)
    folder.put_package(package)
    with pytest.raises(ObjectExistsError):
        folder.put_package(dataclasses.replace(package, run="other"))


def test_reading_packages(storage: Storage):
    folder = StepFolder(storage, STEP, SAVE)
    with pytest.raises(ObjectMissingError):
        folder.read_package()
    storage.create(f".raystate/steps/{STEP}.{SAVE}.json", b"{}")
    with pytest.raises(CorruptCheckpointError, match=SAVE):
        folder.read_package()


def test_set_aside_keeps_the_data(storage: Storage):
    folder, package, data = published(storage)
    for _ in range(2):
        folder.retire(aside=True)
        assert visible_steps(storage) == ()
        assert storage.list(str(STEP)) == []
        kept = {name.split("/", 3)[3]: part for name, part in tree(storage, ".raystate/aside").items()}
        assert kept == {**package.files, **data}
        assert all(name.startswith(f".raystate/aside/{STEP}.{SAVE}") for name in tree(storage, ".raystate/aside"))
    assert packages(storage)
    published(storage, save="a8k1", seed=1)  # the number is free again


def test_a_repetition_makes_durable_what_a_dead_process_renamed(storage: Storage):
    folder, package, _ = published(storage)
    recording = Recording(storage)
    repeated = StepFolder(recording, folder.step, folder.save)
    repeated.publish(package)
    assert (("fsync_tree", str(STEP)) in recording.operations) == storage.is_directory
    recording.operations.clear()
    folder.retire()
    repeated.retire()
    fsynced = [name for operation, name in recording.operations if operation == "fsync_tree"]
    assert any(name.startswith(TRASH) for name in fsynced) == storage.is_directory


def test_a_late_retire_leaves_the_next_save_of_that_number_alone(storage: Storage):
    late, _, _ = published(storage)
    late.retire()
    _, package, data = published(storage, save="a8k1", seed=1)
    late.retire()
    assert tree(storage, str(STEP)) == step_tree(package, data)
    assert packages(storage) == [f".raystate/steps/{STEP}.a8k1.json"]


def test_a_damaged_step_can_be_retired(storage: Storage):
    folder, package, _ = published(storage)
    for name in package.files:
        if name != "commit_success.txt":
            storage.delete(f"{STEP}/{name}")
    for obj in package.objects:
        storage.delete(f"{STEP}/{obj.name}")
    folder.retire()
    assert tree(storage) == {}


def test_an_imported_step_belongs_to_its_package(storage: Storage):
    package, data = a_package(save="a3k9")
    package = dataclasses.replace(package, save="a1k1")  # written by another run's writers
    folder = write_data(storage, package, data)
    folder.assemble(package)
    folder.put_package(package)
    folder.publish(package)
    folder.retire()
    assert tree(storage) == {}


def test_discard_takes_only_this_save(storage: Storage):
    folders = {}
    for save in ("a7k1", "a7k12", "a7k2"):
        package, data = a_package(save=save)
        folders[save] = write_data(storage, package, data)
        folders[save].put_package(package)
    folders["a7k1"].discard()
    assert {save_of(name) for name in tree(storage) if "ocdbt" in name} == {"a7k12", "a7k2"}
    assert packages(storage) == [f".raystate/steps/{STEP}.a7k12.json", f".raystate/steps/{STEP}.a7k2.json"]


def test_discarding_beside_a_published_step(storage: Storage):
    _, package, data = published(storage)
    other, other_data = a_package(save="a7k2")
    folder = write_data(storage, other, other_data)
    folder.discard()
    assert tree(storage, str(STEP)) == step_tree(package, data)
    assert storage.list(".raystate/work") == []


def test_visible_and_foreign_steps(storage: Storage):
    published(storage, step=10)
    published(storage, step=9)
    for name in (
        "3/commit_success.txt", "4.orbax-checkpoint-tmp/commit_success.txt", "5/state/commit_success.txt", "007/commit_success.txt",
        "step_8/commit_success.txt", "commit_success.txt", "-1/commit_success.txt", ".raystate/commit_success.txt", "0/commit_success.txt",
    ):  # fmt: skip
        storage.create(name, b"done")
    storage.create("6/_CHECKPOINT_METADATA", b"{}")
    stock = (0, 3, 6) if storage.is_directory else (0, 3)  # on an object store only the marker decides
    assert visible_steps(storage) == (*stock, 9, 10)
    assert foreign_steps(storage, [9, 10, 11]) == stock
    StepFolder(storage, 3, None).retire()
    StepFolder(storage, 3, None).retire()
    assert foreign_steps(storage, [9, 10]) == tuple(step for step in stock if step != 3)


def test_a_stock_step_has_no_save(storage: Storage):
    for call in (StepFolder(storage, 3, None).discard, StepFolder(storage, 3, None).read_package):
        with pytest.raises(StorageError, match="no save id"):
            call()


def test_names():
    assert writer_name("a7k1", 0) == "a7k1h0"
    assert save_of(f"state/ocdbt.process_{writer_name('a7k1', 'c')}/d/1") == "a7k1"
    assert save_of("state/ocdbt.process_a7k1h0123456789ab/manifest.ocdbt") == "a7k1"
    assert [save_of(name) for name in ("state/_METADATA", "state/ocdbt.process_0/d/1", "a7k1h0", "x/ocdbt.process_a7k1")] == [
        None
    ] * 4
    assert [step_of(text) for text in ("0", "12", "012", "", "-1", "1.x", "٣", "1 ")] == [0, 12, *[None] * 6]
    assert [attempt_of(text) for text in ("a7k1", "a12kf0", "k1", "a7", "")] == [7, 12, None, None, None]
    assert split_saved("12.a7k1.json") == split_saved("12.a7k1") == split_saved("12.a7k1.0f") == (12, "a7k1")
    assert [split_saved(text) for text in ("12.orbax.0f", "12", "x.a7k1", "012.a7k1")] == [None] * 4
