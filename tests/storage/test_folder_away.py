"""The run's folder is moved away or not mounted for a while, and what is written meanwhile lies in an empty folder in its place."""

from __future__ import annotations

import secrets
from pathlib import Path
from unittest import mock

import pytest

from raystate.core.formats.errors import CorruptCheckpointError
from raystate.core.formats.log import claim_entry
from raystate.storage import RunLog, StepFolder, Storage, open_storage, visible_steps
from raystate.storage.names import LOG, PACKAGES, log_name
from raystate.storage.wrapping import StorageWrapper
from tests.storage.harness import Process
from tests.storage.test_given_up import Nobody, left, start


class Away(StorageWrapper):
    """Another folder is in its place for as long as `away` is set."""

    def __init__(self, inner: Storage, other: Storage):
        super().__init__(inner)
        self.home, self.other = inner, other

    @property
    def away(self) -> bool:
        return self.inner is self.other

    @away.setter
    def away(self, away: bool) -> None:
        self.inner = self.other if away else self.home


class Moved(Away):
    """It is away from the creation of a package of this step on, until entries were asked for in vain so often."""

    def __init__(self, inner: Storage, other: Storage, *, step: int, looks: int):
        super().__init__(inner, other)
        self.step, self.looks = step, looks

    def before(self, operation: str, name: str) -> None:
        if operation == "create" and name.startswith(f"{PACKAGES}/{self.step}.") and self.looks:
            self.away = True
        if operation == "read" and name.startswith(LOG) and self.away:
            self.looks -= 1
            self.away = self.looks > 0


def empty_like(storage: Storage, tmp_path: Path) -> Storage:
    return open_storage(tmp_path / "empty" if storage.is_directory else f"memory://{secrets.token_hex(6)}/run")


def test_a_commit_waits_for_the_folder_and_for_what_it_commits(storage: Storage, tmp_path: Path) -> None:
    empty = empty_like(storage, tmp_path)
    moved = Moved(storage, empty, step=2, looks=3)
    process = Process(moved, name="p", witness=Nobody())
    start(process)
    assert process.save(1)
    assert process.save(2), "by a second try: the package of the first lies in the other folder"
    assert process.save(3)
    process.settle()
    assert not moved.looks, "it was away"
    assert empty.list(LOG) == [], "no entry lies where nobody looks for it"
    assert visible_steps(storage) == (2, 3)
    assert left(storage) == [], "of the first two saves: step 1 is retired, the first try of step 2 is removed"
    steps = [one.step for one in RunLog(storage).tail().live]  # pyright: ignore[reportOptionalMemberAccess]
    assert steps == [2, 3]


def test_a_step_is_not_gone_because_the_folder_is(storage: Storage, tmp_path: Path) -> None:
    """The entry that retires it is there, and the folder goes away before it is carried out."""
    moving = Away(storage, empty_like(storage, tmp_path))
    process = Process(moving, name="p", witness=Nobody(), keep_last=1)
    start(process)
    assert process.save(1)
    retire, tries = StepFolder.retire, list[int]()

    def late(self: StepFolder, *, aside: bool = False) -> None:
        moving.away = not tries
        tries.append(self.step)
        retire(self, aside=aside)

    with mock.patch.object(StepFolder, "retire", late):
        assert process.save(2)
        process._until("the end of step 1", lambda: len(tries) == 1 or bool(process.machine.journal.troubles))
        moving.away = False
        process.settle()
    assert tries[:2] == [1, 1]
    assert visible_steps(storage) == (2,)


def test_a_run_is_not_begun_in_the_place_of_one_that_is_away(storage: Storage, tmp_path: Path) -> None:
    moving = Away(storage, empty_like(storage, tmp_path))
    first = Process(moving, name="p", witness=Nobody())
    start(first)
    assert first.save(1)
    moving.away = True
    heir = Process(moving, name="q", witness=Nobody(), known_attempt=1)
    heir.claim()
    assert heir.loop.attempt < 0
    assert "has no log, and attempt 1 of the run has trained on this cluster" in heir.loop.why_log_is_gone()
    assert moving.other.list(LOG) == []
    moving.away = False
    heir.now_s += 1.0
    heir.claim()
    assert heir.loop.attempt == 2
    assert heir.loop.why_log_is_gone() == ""


def test_an_entry_follows_only_one_that_is_there(storage: Storage) -> None:
    log = RunLog(storage)
    first = log.claim(lambda tail: claim_entry(tail, "w", "lm"))
    again = claim_entry(first, "x", "lm")
    moved = storage.read(log_name(1))
    storage.delete(log_name(1))
    appended = log.append(again)
    assert appended.outcome == "failed"
    assert "is missing" in appended.error and "not mounted" in appended.error
    assert storage.list(LOG) == []
    storage.create(log_name(1), moved)
    assert log.append(again).outcome == "ok"


def test_an_entry_follows_only_the_one_that_it_was_made_for(storage: Storage) -> None:
    """Somebody has begun another run in the folder's place."""
    log = RunLog(storage)
    first = log.claim(lambda tail: claim_entry(tail, "w", "lm"))
    storage.delete(log_name(1))
    RunLog(storage).claim(lambda tail: claim_entry(tail, "theirs", "lm"))
    appended = log.append(claim_entry(first, "w", "lm"))
    assert appended.outcome == "failed"
    assert "writer theirs" in appended.error and "the folder has been replaced" in appended.error
    assert [info.name for info in storage.list(LOG)] == [log_name(1)]


@pytest.mark.parametrize("lost", [1, 2, 4])
def test_a_log_without_its_beginning_is_damage(storage: Storage, lost: int) -> None:
    log = RunLog(storage)
    for writer in "abcde":
        log.claim(lambda tail, writer=writer: claim_entry(tail, writer, "lm"))
    for seq in range(1, lost + 1):
        storage.delete(log_name(seq))
    for use in (RunLog(storage).tail, lambda: RunLog(storage).claim(lambda tail: claim_entry(tail, "w", "lm"), timeout_s=5.0)):
        with pytest.raises(CorruptCheckpointError, match=rf"entry {lost + 1} is there: the log has lost its beginning"):
            use()
    assert len(storage.list(LOG)) == 5 - lost
