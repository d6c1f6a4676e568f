"""What is recorded for the power-loss tests.

`run`: the real way of two steps into a directory and of one out of it again; TensorStore writes from its own threads, below Python.
`killed_run`: a process dies right before it makes a name durable, and a successor goes on. The power is still on: the successor
sees all that the dead one did, and nobody else will ever make it durable.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from raystate.core.formats import entries
from raystate.core.formats.log import live_steps
from raystate.core.formats.tree import DataObject, Package
from raystate.machine.checksum import crc32c
from raystate.storage import StepFolder, Storage, StorageWrapper, open_storage
from raystate.storage.names import writer_name
from raystate.testing.storage import DiedError
from tests.power.recorder import Recorder, Recording
from tests.storage.attempt import RUN, Attempt, Mark

PLACE = "data/run"  # below the recorded directory; neither of the two is there at the start
HOSTS = 2


class Marking(StorageWrapper):
    """Marks where each operation begins and ends, so that a test can leave out what one of them does."""

    def __init__(self, inner: Storage, mark: Mark):
        super().__init__(inner)
        self.mark = mark

    def before(self, operation: str, name: str) -> None:
        self.mark(f"before {operation} {name}")

    def after(self, operation: str, name: str) -> None:
        self.mark(f"after {operation} {name}")


def run(root: Path) -> Recording:
    with pytest.MonkeyPatch.context() as patch, Recorder(root) as recorder:
        patch.setattr(entries, "ENTRY_BYTES", 500)  # a step or two have a base already
        attempt = Attempt(Marking(open_storage(root / PLACE), recorder.mark), "first", real_package, recorder.mark)
        attempt.save(1)
        attempt.save(2, retires=[(1, False, "only one is kept")])
        attempt.append(reason="all is carried out")
    return recorder.recording()


def killed_run(root: Path, place: int) -> tuple[Recording, bool]:
    """Also whether it came to its end alive."""
    with pytest.MonkeyPatch.context() as patch, Recorder(root) as recorder:
        patch.setattr(entries, "ENTRY_BYTES", 500)
        with pytest.MonkeyPatch.context() as dying:
            die_before_name_is_durable(dying, place)
            try:
                session(root, "first", 1, recorder.mark, saves=3)
                died = False
            except DiedError:
                died = True
        recorder.mark("successor")
        session(root, "second", 4, recorder.mark, saves=1)
    return recorder.recording(), not died


def session(root: Path, writer: str, first: int, mark: Mark, *, saves: int) -> None:
    """An attempt that commits steps. Older ones go: odd ones are removed, even ones set aside."""
    attempt = Attempt(open_storage(root / PLACE), writer, small_package, mark)
    for step in range(first, first + saves):
        attempt.save(step, retires=[(old, old % 2 == 0, "only one is kept") for old in live_steps(attempt.tail)])


def die_before_name_is_durable(patch: pytest.MonkeyPatch, place: int) -> None:
    """End right before the fsync that belongs to the `place`th mkdir, link or rename outside of work folders; nothing is done after."""
    left, due, dead = place, False, False

    def guarded(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **rest: Any) -> Any:
            nonlocal left, due, dead
            dead = dead or (due and name == "fsync")
            if dead:
                raise DiedError
            result = call(*arguments, **rest)
            if name in ("mkdir", "link", "rename") and "/work/" not in str(arguments[-1 if name == "link" else 0]):
                due = left == 0
                left -= 1
            return result

        return made

    for name in ("mkdir", "link", "rename", "fsync", "write", "unlink", "rmdir"):
        patch.setattr(os, name, guarded(name, getattr(os, name)))


def real_package(folder: StepFolder) -> Package:
    """Two hosts' shares of a state, which is `state_example.array(…, scale=step)`, and the Coordinator's merge."""
    from raystate.runtime.coordinator.packaging import build_package

    with ThreadPoolExecutor(max_workers=HOSTS) as hosts:
        parts = list(hosts.map(lambda host: _write_part(folder, host), range(HOSTS)))
    return build_package(folder.storage, RUN, folder.step, str(folder.save), parts)


def _write_part(folder: StepFolder, host: int):
    from raystate.core.formats.messages import HostId
    from raystate.core.formats.tree import SlotTable
    from raystate.runtime.host.share import write_share
    from raystate.runtime.parts import HostPart
    from tests.orbax.published import pieces, state_tree, values_of
    from tests.orbax.state_example import state

    tree, writer = state_tree(), writer_name(str(folder.save), host)
    mine = pieces(tree, host, HOSTS, scale=folder.step)
    return HostPart(
        host=HostId(str(host)),
        writer=writer,
        trees=(tree,),
        objects={"state": write_share(folder.storage, folder.write_prefix, writer, tree, mine)},
        claims={"state": [(leaf, start, data.shape) for leaf, start, data in mine]},
        tables={host: SlotTable(layout_ref="", crc32c=(), values=(tuple(values_of(tree, state())),), iterators={"data": b"{}"})},
        local={host: {}},
    )


def small_package(folder: StepFolder) -> Package:
    """A step of few and small files, for thousands of power cuts. Its data are written as by TensorStore: files and names apart."""
    objects: list[DataObject] = []
    for host in range(HOSTS):
        writer, data = writer_name(str(folder.save), host), bytes([folder.step, host]) * 20
        name = f"state/ocdbt.process_{writer}/d/0"
        path = folder.storage.local_path(f"{folder.write_prefix}/{name}")
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
        objects.append(DataObject(name=name, size=len(data), crc32c=crc32c(data), writer=writer))
    files = {
        "_CHECKPOINT_METADATA": b"{}",
        "state/manifest.ocdbt": b"manifest",
        "commit_success.txt": f"save {folder.save}".encode(),
    }
    return Package(step=folder.step, save=str(folder.save), run=RUN, files=files, objects=tuple(objects))
