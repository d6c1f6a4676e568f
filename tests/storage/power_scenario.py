"""What is recorded for the power-loss tests.

`run`: the real way of two steps into a directory and of one out of it again; TensorStore writes from its own threads, below Python.
`killed_run`: a process dies right before it makes a name durable, and a successor goes on. The power is still on: the successor
sees all that the dead one did, and nobody else will ever make it durable.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from raystate.checksum import crc32c
from raystate.core.formats import entries
from raystate.core.formats.log import claim_entry, key_of, live_steps, next_entry
from raystate.core.formats.messages import Intent, LiveStep, LogEntry
from raystate.core.formats.tree import DataObject, Package
from raystate.storage import RunLog, StepFolder, Storage, StorageWrapper, foreign_steps, open_storage
from raystate.storage.names import writer_name
from raystate.testing.storage import DiedError
from tests.power.recorder import Recorder, Recording

RUN = "lm"
PLACE = "data/run"  # below the recorded directory; neither of the two is there at the start
HOSTS = 2

Mark = Callable[[str], None]
MakePackage = Callable[[StepFolder], Package]
Retire = tuple[int, bool, str]  # step, aside, reason


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


class Attempt:
    """What a Coordinator does to storage from its claim on. Marks what it acknowledges."""

    def __init__(self, storage: Storage, writer: str, make_package: MakePackage, mark: Mark):
        self._storage = storage
        self._log = RunLog(storage)
        self._make_package = make_package
        self._mark = mark

        def claim(tail: LogEntry | None) -> LogEntry:
            dead = [] if tail is None else range(1, tail.attempt + 1)
            return claim_entry(tail, writer, RUN, foreign_steps(storage, live_steps(tail)), dead=dead)

        self.tail = self._log.claim(claim)
        self._mark(f"appended {self.tail.seq}")
        self._carry_out(self.tail.intents)

    def save(self, step: int, retires: Sequence[Retire] = ()) -> None:
        """Write, commit and publish a step, then carry out the retirements that its commit decided."""
        folder = StepFolder(self._storage, step, f"a{self.tail.attempt}k{step}")
        package = self._make_package(folder)
        folder.assemble(package)
        folder.put_package(package)
        self.append(commit=LiveStep(step=step, save=folder.save), retires=retires, reason="due")
        self._mark(f"committed {step}")
        self._carry_out([intent for intent in self.tail.intents if intent.seq == self.tail.seq])

    def append(self, *, commit: LiveStep | None = None, retires: Sequence[Retire] = (), reason: str) -> None:
        """The next entry; everything that was open before is carried out by now."""
        for step, _, _ in retires:
            self._mark(f"retires {step}")
        tail, carried = self.tail, [key_of(intent) for intent in self.tail.intents]
        entry = next_entry(
            tail,
            attempt=tail.attempt,
            writer=tail.writer,
            carried=carried,
            dead=range(1, tail.attempt),
            commit=commit,
            retires=retires,
            reason=reason,
        )
        done = self._log.append(entry)
        assert done.outcome == "ok", done
        self._mark(f"appended {entry.seq}")
        self.tail = entry

    def _carry_out(self, intents: Sequence[Intent]) -> None:
        for intent in sorted(intents, key=lambda one: one.kind):  # commits before retirements
            folder = StepFolder(self._storage, intent.step, intent.save)
            if intent.kind == "commit":
                folder.publish(folder.read_package())
                self._mark(f"published {intent.step}")
            else:
                folder.retire(aside=intent.aside)
                self._mark(f"{'set-aside' if intent.aside else 'retired'} {intent.step}")


def real_package(folder: StepFolder) -> Package:
    """Two hosts' shares of a state, which is `state_example.array(…, scale=step)`, and the Coordinator's merge."""
    from raystate.runtime.packaging import build_package

    with ThreadPoolExecutor(max_workers=HOSTS) as hosts:
        parts = list(hosts.map(lambda host: _write_part(folder, host), range(HOSTS)))
    return build_package(folder.storage, RUN, folder.step, str(folder.save), parts)


def _write_part(folder: StepFolder, host: int):
    from raystate.core.formats.messages import HostId
    from raystate.core.formats.tree import SlotTable
    from raystate.runtime.parts import HostPart
    from raystate.runtime.share import write_share
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
