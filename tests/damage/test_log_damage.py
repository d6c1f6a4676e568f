"""Damage to the run's log: its newest entry is what was appended, or an error says that it is not; and no visible step is forgotten."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from raystate.core.formats import entries as log_entries
from raystate.core.formats.errors import CorruptCheckpointError
from raystate.core.formats.log import claim_entry, live_steps
from raystate.core.formats.messages import LiveStep, LogEntry
from raystate.storage import RunLog, Storage, find_garbage, foreign_steps, open_storage, visible_steps
from raystate.storage.names import BASES, LOG, MARKER, PACKAGES, base_name, log_name, package_name, step_name
from tests.damage.damages import FIRST, SEEDS, Copy, Damage
from tests.storage.attempt import RUN, appended

ATTEMPTS, SAVES = 6, 4  # saves per attempt


@pytest.fixture(scope="module", params=[False, True], ids=["whole", "with bases"])
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of several attempts. Of its steps only what the log is about: a marker that says that it is visible, and a package."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            patch.setattr(log_entries, "ENTRY_BYTES", 900)
        root = write_run(tmp_path_factory, keep=20 if request.param else 3)
        assert bool(open_storage(root).list(BASES)) == request.param
        yield root


def write_run(tmp_path_factory: pytest.TempPathFactory, keep: int) -> Path:
    root = tmp_path_factory.mktemp("log") / "run"
    storage = open_storage(root)
    log = RunLog(storage)
    for attempt in range(1, ATTEMPTS + 1):
        tail = claim(log, storage, f"writer {attempt}")
        for step in range(SAVES * (attempt - 1) + 1, SAVES * attempt + 1):
            live = LiveStep(step=step, save=f"a{attempt}k{step}")
            old = [(one, False, "enough are kept") for one in live_steps(tail)[: 1 - keep]]
            storage.create(package_name(step, str(live.save)), b"its package")
            tail = appended(log, tail, commit=live, retires=old)
            storage.create(f"{step_name(step)}/{MARKER}", f"step {step}, save {live.save}\n".encode())
            for one, _, _ in old:
                storage.delete_tree(step_name(one))
                for info in storage.list(PACKAGES):
                    if info.name.startswith(f"{PACKAGES}/{one}."):
                        storage.delete(info.name)
    appended(log, tail)
    return root


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Copy:
    return Copy(original, tmp_path / "copy")


def claim(log: RunLog, storage: Storage, writer: str) -> LogEntry:
    """As a Coordinator does."""
    return log.claim(lambda tail: claim_entry(tail, writer, RUN, foreign_steps(storage, live_steps(tail)), dead=range(ATTEMPTS)))


def entries(copy: Copy) -> list[str]:
    return [name for name in copy.names if name.startswith(f"{LOG}/")]


def needed(copy: Copy) -> list[str]:
    """The newest entry, and its base if it has one: all that tells what there is."""
    newest = RunLog(open_storage(copy.root)).newest()
    assert newest is not None
    return [log_name(newest.entry.seq), *([base_name(newest.base.name)] if newest.base.name else [])]


def tail_of(root: Path) -> LogEntry | CorruptCheckpointError | None:
    try:
        return RunLog(open_storage(root)).tail()
    except CorruptCheckpointError as error:
        return error


def test_the_newest_entry_is_right_or_an_error_says_that_it_is_not(copy: Copy):
    names, essential, tail = entries(copy), needed(copy), RunLog(open_storage(copy.root)).tail()
    assert tail is not None and names[-1] == essential[0]
    counts = {"right": 0, "said": 0}
    for seed in range(FIRST, FIRST + SEEDS):
        # Half of it to the newest, which is the only one whose content matters.
        damage = copy.draw(seed, kinds=("flip", "truncate", "zeros", "append", "swap"), among=essential if seed % 2 else names)
        with copy.damaged(damage) as root:
            found = tail_of(root)
        if isinstance(found, CorruptCheckpointError):
            assert any(name in damage.names and name in found.message for name in essential), damage
        else:
            assert found == tail, damage
        counts["said" if isinstance(found, CorruptCheckpointError) else "right"] += 1
    print(counts)  # noqa: T201
    assert counts["said"] > SEEDS // (3 if len(essential) == 1 else 6)  # a damaged base is rebuilt


def test_nothing_is_appended_to_a_log_whose_newest_entry_is_damaged(copy: Copy):
    damage = copy.draw(FIRST, kinds=["flip"], among=entries(copy)[-1:])
    with copy.damaged(damage) as root:
        storage = open_storage(root)
        before = [info.name for info in storage.list()]
        with pytest.raises(CorruptCheckpointError, match=LOG):
            claim(RunLog(storage), storage, "next")
        assert [info.name for info in storage.list()] == before


def test_a_lost_entry_with_others_after_it_is_noticed(copy: Copy):
    for name in entries(copy)[:-1]:
        with copy.damaged(Damage(seed=0, kind="delete", name=name)) as root:
            found = tail_of(root)
        if isinstance(found, CorruptCheckpointError):
            assert name in found.message
        else:
            assert found is not None and log_name(found.seq) == entries(copy)[-1], f"{name} is lost: {found}"


@pytest.mark.parametrize("lost", [1, 2, 3, 5])
def test_after_losing_the_newest_entries_no_visible_step_is_forgotten(copy: Copy, lost: int):
    """The log alone can't know that it was longer. What was committed and published is adopted by the next claim."""
    for name in entries(copy)[-lost:]:
        (copy.root / name).unlink()
    storage = open_storage(copy.root)
    entry = claim(RunLog(storage), storage, "next")
    assert {*visible_steps(storage)} <= {*live_steps(entry)}


@pytest.mark.parametrize("lost", [2, 3])
def test_after_losing_the_newest_entries_no_package_of_a_visible_step_is_garbage(copy: Copy, lost: int):
    """Without it the step can still be read, but nothing tells any more what its small files should be."""
    for name in entries(copy)[-lost:]:
        (copy.root / name).unlink()
    storage = open_storage(copy.root)
    claim(RunLog(storage), storage, "next")
    garbage = {one.name for one in find_garbage(storage)}
    assert not [name for step in visible_steps(storage) for name in garbage if name.startswith(f"{PACKAGES}/{step}.")]


def test_entries_without_a_checksum_are_found_out(tmp_path: Path, copy: Copy, monkeypatch: pytest.MonkeyPatch):
    names, tail = entries(copy), RunLog(open_storage(copy.root)).tail()
    monkeypatch.setattr(log_entries, "unseal", lambda data: {k: v for k, v in json.loads(data).items() if k != "crc32"})
    wrong = 0
    for seed in range(FIRST, FIRST + 250):
        with copy.damaged(copy.draw(seed, kinds=["flip"], among=names[-1:])) as root:
            try:
                wrong += RunLog(open_storage(root)).tail() != tail
            except Exception:
                continue
    print(f"{wrong} of 250")  # noqa: T201
    assert wrong
