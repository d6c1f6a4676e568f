"""What a `harness.Process` has in place of HostActors and of Orbax: reports are made up, array data are small objects.

The objects lie under writers' names, and their bytes follow from these names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

from raystate.core.formats.errors import StorageError
from raystate.core.formats.messages import (
    Advice,
    Event,
    HostId,
    HostOrder,
    HostReported,
    HostSummary,
    Invalidate,
    Staged,
    TrainerWord,
    Write,
)
from raystate.core.formats.tree import Package, SlotTable
from raystate.runtime.parts import HostPart
from raystate.storage import StepFolder, Storage, data_objects
from raystate.storage.names import writer_name
from tests.storage.contents import HOSTS, PARTS, fixed_files, payload


class MadeUpHosts:
    """Hosts with one trainer each (`runtime.coordinator_loop.Hosts`).

    Args:
        name: of the process; its hosts' names begin so.
        storage: as the process sees it.
        workers: who writes.
        post: takes what the hosts report.
    """

    def __init__(self, name: str, storage: Storage, workers: Executor, post: Callable[[Event], None]):
        self.storage = storage
        self.workers = workers
        self.post = post
        self.ids = [HostId(f"{name}host{index}") for index in range(HOSTS)]
        self.staged: dict[HostId, tuple[Staged, ...]] = {}
        self.seen: dict[HostId, TrainerWord] = {}
        self.base: dict[HostId, Invalidate] = {}
        self.sequence: dict[HostId, int] = {}

    # ---------------------------------------------------------------- what their trainers do

    def stage(self, lineage: str, step: int) -> None:
        """All trainers have staged the step and promised it."""
        for rank, host in enumerate(self.ids):
            piece = Staged(rank=rank, world=HOSTS, lineage=lineage, step=step, layout="l", promised=True)
            self.staged[host] = (*self.staged.get(host, ())[-1:], piece)
        self.word(lineage, step)

    def word(self, lineage: str, newest: int) -> None:
        """What all trainers' words say."""
        for rank, host in enumerate(self.ids):
            self.seen[host] = TrainerWord(rank=rank, world=HOSTS, lineage=lineage, newest_step=newest)
        for host in self.ids:
            self._report(host)

    # ---------------------------------------------------------------- what the Coordinator orders

    def ensure(self, host: HostId, on_error: Callable[[str], None]) -> None:
        del on_error
        if host not in self.sequence:
            self._report(host)

    def order(self, order: HostOrder) -> None:
        if isinstance(order, Invalidate):
            held = self.staged.get(order.host, ())
            self.staged[order.host] = tuple(one for one in held if order.spares(one.lineage, one.step))
            self.base[order.host] = order
        if isinstance(order, Invalidate | Advice):
            self._report(order.host)

    def write(self, order: Write) -> Future[Any]:
        return self.workers.submit(self._write, order)

    def close_empty(self) -> None:
        pass

    def close_all(self, *, remove_arena: bool) -> None:
        del remove_arena

    def _write(self, order: Write) -> HostPart:
        rank = self.ids.index(order.host)
        writer = writer_name(order.save, rank)
        prefix = StepFolder(self.storage, order.step, order.save).write_prefix
        folder = f"state/ocdbt.process_{writer}"
        for part in range(PARTS[rank]):
            name = f"{folder}/d/{part}"
            self.storage.create(f"{prefix}/{name}", payload(order.step, order.save, name))
        return HostPart(
            host=order.host,
            writer=writer,
            trees=(),
            objects={"state": data_objects(self.storage, prefix, folder, writer=writer)},
            claims={},
            tables={rank: SlotTable(layout_ref="l", crc32c=())},
            local={rank: {}},
        )

    def _report(self, host: HostId) -> None:
        self.sequence[host] = self.sequence.get(host, 0) + 1
        trainers = (self.seen[host],) if host in self.seen else ()
        summary = HostSummary(
            host=host,
            incarnation=host,
            seq=self.sequence[host],
            staged=self.staged.get(host, ()),
            trainers=trainers,
            restore=self.base.get(host),
        )
        self.post(HostReported(summary=summary))


class MadeUpPackager:
    """Small files that Orbax would have written, and one merged object (`runtime.packaging.Packager`)."""

    def prepare(self) -> None:
        """Nothing is loaded."""

    def build(self, storage: Storage, run: str, step: int, save: str, parts: Sequence[HostPart]) -> Package:
        prefix = StepFolder(storage, step, save).write_prefix
        merged = f"state/d/{writer_name(save, 'm0')}"
        storage.create(f"{prefix}/{merged}", payload(step, save, merged))
        objects = data_objects(storage, prefix, "state/d", writer=writer_name(save, "c"), begin=f"{save}hm")
        objects += [one for part in parts for one in part.objects["state"]]
        if len(objects) != sum(PARTS) + 1:
            raise StorageError(f"{len(objects)} objects of save {save} are listed")
        return Package(step=step, save=save, run=run, files=fixed_files(step, save), objects=tuple(objects))
