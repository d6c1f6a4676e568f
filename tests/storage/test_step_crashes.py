"""A process dies between any two operations; whoever repeats the command ends in the same tree, and nothing half-done is visible."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable

import pytest

from raystate.core.formats.errors import StorageError
from raystate.storage import StepFolder, Storage, visible_steps
from raystate.storage.names import package_name
from raystate.testing.storage import DiedError, DyingAt
from raystate.testing.storage.contract import tree
from tests.patience import PATIENCE_S
from tests.storage.backends import SAVE, STEP, a_package, step_tree

Act = Callable[[Storage], None]


def folder(storage: Storage) -> StepFolder:
    return StepFolder(storage, STEP, SAVE)


def write(storage: Storage) -> None:
    _, data = a_package()
    for name, part in data.items():
        storage.create(f"{folder(storage).write_prefix}/{name}", part)


def assemble(storage: Storage) -> None:
    folder(storage).assemble(a_package()[0])
    folder(storage).put_package(a_package()[0])


def publish(storage: Storage) -> None:
    folder(storage).publish(folder(storage).read_package())


def retire(storage: Storage) -> None:
    folder(storage).retire()


def set_aside(storage: Storage) -> None:
    folder(storage).retire(aside=True)


def discard(storage: Storage) -> None:
    folder(storage).discard()


CASES: dict[str, tuple[tuple[Act, ...], Act]] = {
    "assemble": ((write,), assemble),
    "publish": ((write, assemble), publish),
    "retire": ((write, assemble, publish), retire),
    "aside": ((write, assemble, publish), set_aside),
    "discard": ((write, assemble), discard),
}


def comparable(storage: Storage) -> dict[str, bytes]:
    """The tree without the random ends of set-aside folders."""
    return {re.sub(rf"({SAVE})\.[0-9a-f]{{8}}/", r"\1/", name): data for name, data in tree(storage).items()}


def check_visible_means_complete(storage: Storage) -> None:
    if STEP in visible_steps(storage):
        assert step_tree(*a_package()).items() <= tree(storage, str(STEP)).items()


def fresh(storage: Storage, before: tuple[Act, ...]) -> None:
    for info in storage.list():
        storage.delete(info.name)
    if storage.is_directory:
        shutil.rmtree(storage.local_path(""), ignore_errors=True)
    for act in before:
        act(storage)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("case", CASES)
def test_dying_at_every_operation(storage: Storage, case: str, after: bool):
    if storage.url.startswith("gs://") and not os.environ.get("RAYSTATE_ALL") and case != "publish":
        pytest.skip("played by make test-all; test_crash_points.py plays a part of it")
    before, act = CASES[case]
    fresh(storage, before)
    act(storage)
    expected = comparable(storage)
    for nth in range(200):
        fresh(storage, before)
        try:
            act(DyingAt(storage, nth, after=after))
        except DiedError:
            check_visible_means_complete(storage)
            act(storage)
            assert comparable(storage) == expected
        else:
            assert nth > 1
            return
    pytest.fail("never came to an end")


def test_dying_while_publishing_then_retiring(storage: Storage):
    """Rollback of a step whose publisher died: publish again is not needed before retire."""
    for nth in range(200):
        fresh(storage, (write, assemble))
        try:
            publish(DyingAt(storage, nth, after=False))
        except DiedError:
            retire(storage)
            assert STEP not in visible_steps(storage)
            assert storage.list(str(STEP)) == []
        else:
            return
    pytest.fail("never came to an end")


def test_two_publishers_at_once(storage: Storage):
    """A new attempt finishes what a sleeping zombie wakes up to finish, too."""
    for _ in range(10):
        fresh(storage, (write, assemble))
        start = threading.Barrier(4)
        failed: list[BaseException] = []

        def run(start: threading.Barrier = start, failed: list[BaseException] = failed) -> None:
            start.wait(timeout=PATIENCE_S)
            try:
                publish(storage)
            except StorageError as error:
                failed.append(error)

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=PATIENCE_S)
        assert failed == []
        assert tree(storage, str(STEP)) == step_tree(*a_package())


def test_a_publisher_who_sleeps_until_the_step_is_gone(storage: Storage):
    """The hold rule forbids it; were it broken, a directory still has nothing to rename."""
    fresh(storage, (write, assemble))
    package = folder(storage).read_package()
    publish(storage)
    retire(storage)
    with pytest.raises(StorageError, match="missing"):
        folder(storage).publish(package)
    assert tree(storage) == {}
    assert not storage.exists(package_name(STEP, SAVE))
