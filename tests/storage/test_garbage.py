from __future__ import annotations

import dataclasses

import pytest

from raystate.core.formats.errors import ConfigError
from raystate.core.formats.log import claim_entry
from raystate.core.formats.messages import Intent, LiveStep, LogEntry
from raystate.storage import RunLog, StepFolder, Storage, assume_dead, assumed_dead, collect_garbage
from raystate.testing.storage.contract import tree
from tests.storage.backends import a_package


def claim(storage: Storage, writer: str = "w") -> LogEntry:
    return RunLog(storage).claim(lambda tail: claim_entry(tail, writer, "lm"), timeout_s=30.0)


def started(storage: Storage, step: int, save: str) -> StepFolder:
    """A save that came as far as its package."""
    package, data = a_package(step, save)
    folder = StepFolder(storage, step, save)
    for name, part in data.items():
        storage.create(f"{folder.write_prefix}/{name}", part)
    folder.assemble(package)
    folder.put_package(package)
    return folder


def saves_left(storage: Storage) -> set[str]:
    return {save for name in tree(storage) for save in ("a1k1", "a1k2", "a1k3", "a2k1") if save in name}


def commit(storage: Storage, tail: LogEntry, step: int, save: str) -> LogEntry:
    intent = Intent(kind="commit", step=step, save=save, attempt=tail.attempt, seq=tail.seq + 1)
    entry = dataclasses.replace(
        tail, seq=tail.seq + 1, kind="commit", live=(*tail.live, LiveStep(step=step, save=save)), intents=(*tail.intents, intent)
    )
    assert RunLog(storage).append(entry).outcome == "ok"
    return entry


def test_only_saves_that_nothing_can_commit_are_removed(storage: Storage):
    first = claim(storage)
    committed = started(storage, 10, "a1k1")  # committed, not published: the takeover needs it
    commit(storage, first, 10, "a1k1")
    started(storage, 20, "a1k2")  # dead as soon as attempt 1 is superseded
    collect_garbage(storage)
    assert saves_left(storage) == {"a1k1", "a1k2"}, "the newest attempt may still be saving"
    claim(storage)
    started(storage, 30, "a2k1")
    collect_garbage(storage)
    assert saves_left(storage) == {"a1k1", "a2k1"}
    committed.publish(committed.read_package())
    collect_garbage(storage)
    assert saves_left(storage) == {"a1k1", "a2k1"}


def test_a_retirement_under_way_keeps_its_package(storage: Storage):
    first = claim(storage)
    started(storage, 10, "a1k1")
    intent = Intent(kind="retire", step=10, save="a1k1", attempt=1, seq=2, aside=True)
    assert RunLog(storage).append(dataclasses.replace(first, seq=2, kind="retire", intents=(intent,))).outcome == "ok"
    claim(storage)
    collect_garbage(storage)
    assert StepFolder(storage, 10, "a1k1").read_package().step == 10


def test_saves_that_the_caller_names_are_kept(storage: Storage):
    claim(storage)
    started(storage, 10, "a1k1")
    started(storage, 20, "a1k2")
    claim(storage)
    collect_garbage(storage, {"a1k2"})
    assert saves_left(storage) == {"a1k2"}


def test_what_is_set_aside_stays_with_its_package(storage: Storage):
    claim(storage)
    folder = started(storage, 10, "a1k1")
    folder.publish(folder.read_package())
    folder.retire(aside=True)
    claim(storage)
    collect_garbage(storage)
    assert saves_left(storage) == {"a1k1"}
    assert folder.read_package().save == "a1k1"


def test_trash_and_temporary_files_go(storage: Storage):
    storage.create(".raystate/trash/10.a1k1.0123abcd/f", b"1")
    storage.create(".raystate/events/keep", b"1")
    if storage.is_directory:
        (storage.local_path(".raystate/events") / ".raystate-tmp-00").write_bytes(b"half")
    collect_garbage(storage)
    assert list(tree(storage)) == [".raystate/events/keep"]
    if storage.is_directory:
        assert [path.name for path in storage.local_path(".raystate/events").iterdir()] == ["keep"]


def test_nothing_else_is_touched(storage: Storage):
    for name in (
        "5/default/x",
        "notes.txt",
        "6/commit_success.txt",
        ".raystate/work/strange/f",
        ".raystate/steps/strange.json",
        ".raystate/trash/mine/f",
        ".raystate/trash/5.backup/f",
        ".raystate/trash/notes.txt",
        ".raystate/selftest.mine/f",
        ".raystate/work/5.a1k1.mine/f",
        ".raystate/steps/5.a1k1.mine.json",
    ):
        storage.create(name, b"1")
    claim(storage)
    claim(storage)
    before = tree(storage)
    collect_garbage(storage)
    assert tree(storage) == before


def test_a_storage_that_stock_orbax_wrote(storage: Storage):
    storage.create("5/commit_success.txt", b"1")
    collect_garbage(storage)
    assert list(tree(storage)) == ["5/commit_success.txt"]


def test_a_pins_folder_of_an_older_version_is_left_alone(storage: Storage):
    run = claim(storage)
    commit(storage, run, 1, "a1k1")
    storage.create(".raystate/pins/1.abc", b'{"why": "x", "host": "h", "until_s": 1}')
    collect_garbage(storage)
    assert storage.exists(".raystate/pins/1.abc")


def test_only_an_older_attempt_can_be_assumed_dead(storage: Storage):
    with pytest.raises(ConfigError, match="there is no older attempt"):
        assume_dead(storage, 1)
    claim(storage)
    claim(storage, "w2")
    for attempt in (0, 2, 3):
        with pytest.raises(ConfigError, match=f"attempt {attempt} of .* can't be assumed dead: the attempts 1 to 1 can be"):
            assume_dead(storage, attempt)
    assume_dead(storage, 1)
    assume_dead(storage, 1)
    assert assumed_dead(storage) == (1,)
