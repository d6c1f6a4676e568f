"""Steps from elsewhere, committed into a run as a run commits its own: through the log, and behind its fence.

An import is an attempt like any other. It claims the run, writes all data under names of its own, and only when every step is written are
they committed and published one after the other. A step that is committed stays; what goes wrong before leaves no data behind.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from raystate.core.formats.entries import LiveStep
from raystate.core.formats.errors import ConfigError, CorruptCheckpointError, RunInUseError, StaleAttemptError, StorageError
from raystate.core.formats.tree import DataObject, Package, TreeSpec
from raystate.inspection import open_step
from raystate.inspection.boxes import total_bytes
from raystate.orbax.array_reads import Request
from raystate.orbax.merge import build_files, own_folders
from raystate.orbax.step_reader import StepReader
from raystate.orbax.writer import WRITER_PREFIX
from raystate.storage import (
    LogReader,
    StepFolder,
    Storage,
    StorageUrl,
    data_objects,
    marked_save,
    open_storage,
    visible_steps,
)
from raystate.transfer.attempt import OutsideAttempt, is_outside
from raystate.transfer.boxes import batches, raw, read_ahead
from raystate.transfer.description import check_tree
from raystate.transfer.incoming import IncomingStep
from raystate.transfer.orbax_tree import check_written, essence, with_our_chunks, write_tree
from raystate.transfer.progress import Progress, Tally, ignore


@dataclass(frozen=True, kw_only=True)
class ImportReport:
    """The outcome of an import.

    Attributes:
        url: of the run's storage.
        run: its name.
        steps: the new steps, ascending.
        present: steps that it had before, with the very same content.
        arrays, nbytes: of all these steps.
        left_out: step -> the items that were not imported, one sentence each.
        verified: whether everything was read back.
    """

    url: str
    run: str
    steps: tuple[int, ...]
    arrays: int
    nbytes: int
    left_out: dict[int, tuple[str, ...]]
    verified: bool
    present: tuple[int, ...] = ()


def import_steps(
    dst: StorageUrl,
    steps: Iterable[IncomingStep],
    *,
    run: str | None = None,
    takeover: bool = False,
    verify: bool = True,
    progress: Progress = ignore,
) -> ImportReport:
    """Bring steps into a run's storage, which may be empty. Steps that it has already are left as they are: an import may be repeated.

    Args:
        dst: a directory or gs://….
        steps: from `open_source`; each is read when its turn comes.
        run: the run's name in its log; None: the one that it has, else "import".
        takeover: import even if a run has used this storage; a live run ends with StaleAttemptError.
        verify: read everything back and compare, before anything is committed.
        progress: is told how far each step is.

    Raises:
        ConfigError: a step's number exists with another content, or a step can't be kept. RunInUseError: a run has used this storage.
        StaleAttemptError: somebody else has claimed the run meanwhile; no further step was committed.
        StorageError, CorruptCheckpointError: nothing is committed, unless the message names steps that are.
    """
    storage = open_storage(dst)
    _refuse_used(storage, takeover)
    arriving = iter(steps)
    first = next(arriving, None)  # a mistake in SRC shows before anything is claimed
    if first is None:
        raise ConfigError("src: there is no step to import", field="src")
    for tree in first.trees.values():
        check_tree(tree)
    same = _same_save(storage, first, progress)
    importer = _Importer(storage, run, verify, progress)
    try:
        importer.write(first, same=same)
        for step in arriving:
            importer.write(step)
    except BaseException:
        importer.discard()
        raise
    return importer.commit()


def _refuse_used(storage: Storage, takeover: bool) -> None:
    tail = LogReader(storage).tail()
    if tail is None or takeover or is_outside(tail.writer):
        return
    message = (
        f"{storage.url} belongs to run {tail.run!r} (attempt {tail.attempt}), and an import can't tell whether it lives. Import into "
        f"an empty storage; or end the run and import with --takeover: a run that is still alive would end with StaleAttemptError"
    )
    raise RunInUseError(message, run=tail.run, storage=storage.url)


@dataclass(frozen=True)
class _Same:
    """What was found to be the same step: the save that wrote it; None: stock Orbax did."""

    save: str | None


def _same_save(storage: Storage, step: IncomingStep, progress: Progress) -> _Same | None:
    """The step of this number that is there, if it is the same; None: there is none.

    Raises:
        ConfigError: it has another content.
    """
    number = step.step
    if number in visible_steps(storage):
        save = marked_save(storage, number)
        if _has_same(storage, step, progress):
            return _Same(save)
    elif not (storage.is_directory and storage.list(str(number), recursive=False)):
        return None
    raise ConfigError(
        f"step {number} exists in {storage.url}, with another content: delete it first, or import another step: --step N",
        field="step",
        got=number,
    )


@dataclass(kw_only=True)
class _WrittenStep:
    """A step whose data lie under names of their own, with its package."""

    incoming: IncomingStep
    folder: StepFolder
    package: Package | None = None
    trees: list[TreeSpec] = field(default_factory=list)


class _Importer:
    """One attempt."""

    def __init__(self, storage: Storage, run: str | None, verify: bool, progress: Progress):
        self._storage = storage
        self._verify = verify
        self._progress = progress
        self._written: list[_WrittenStep] = []
        self._present: list[int] = []
        self._attempt = OutsideAttempt(storage, "import", run)
        self._attempt.finish_earlier()

    # ------------------------------------------------------------ before anything is committed

    def write(self, step: IncomingStep, *, same: _Same | None = None) -> None:
        """Write a step under unique names, with its package; or note that it is there.

        Args:
            same: what was found to be the same step before the run was claimed.
        """
        if self._has(step, same):
            self._present.append(step.step)
            return
        if (why := self._refusal(step.step)) is not None:
            raise ConfigError(f"{why}; delete it first", field="step", got=step.step)
        trees = [with_our_chunks(tree) for tree in step.trees.values()]
        for tree in trees:
            check_tree(tree)
        save = f"a{self._attempt.tail.attempt}k{secrets.token_hex(6)}"
        written = _WrittenStep(incoming=step, folder=StepFolder(self._storage, step.step, save), trees=trees)
        self._written.append(written)
        tally = Tally(
            lambda what, done, total: self._progress(f"step {step.step}: {what}", done, total), sum(map(total_bytes, trees))
        )
        prefix = written.folder.write_prefix
        objects: list[DataObject] = []
        writers: dict[str, list[str]] = {}
        sums: dict[str, list[tuple[list[Request], list[int]]]] = {}
        for tree in trees:
            item = tree.item
            writers[item], sums[item] = [], []

            def read(requests: Sequence[Request], item: str = item) -> list[np.ndarray]:
                return step.read(item, requests)

            for writer, requests, crcs in write_tree(self._storage, prefix, save, tree, read, on_bytes=tally.writing):
                writers[item].append(writer)
                sums[item].append((requests, crcs))
                objects += data_objects(self._storage, prefix, f"{item}/{WRITER_PREFIX}{writer}", writer=writer)
        files = build_files(
            step.step,
            save,
            trees,
            [tree.values for tree in trees],
            writers,
            lambda item: self._storage.kvstore(f"{prefix}/{item}"),
            iterators=step.iterators,
            own_files=step.own_files,
            json_items=step.json_items,
            metrics=dict(step.metrics),
            custom=step.custom,
            world=step.world,
        )
        for tree in trees:
            for name, begin in own_folders(tree.item, save).items():
                objects += data_objects(self._storage, prefix, name, writer=f"{save}hc", begin=begin)
        package = Package(step=step.step, save=save, run=self._attempt.tail.run, files=files, objects=tuple(objects))
        if self._verify:
            reader = StepReader(self._storage, prefix, package=package)
            for tree in trees:
                what = f"step {step.step} in {self._storage.url}"
                check_written(reader, tree, sums[tree.item], what=what, on_bytes=tally.verifying)
        written.folder.assemble(package)
        written.folder.put_package(package)
        written.package = package

    def _has(self, step: IncomingStep, same: _Same | None) -> bool:
        """Only what is live counts: another step may be visible still, though its removal is decided."""
        live = next((one for one in self._attempt.tail.live if one.step == step.step), None)
        if live is None or (same is not None and same.save == live.save):
            return live is not None
        return _same_save(self._storage, step, self._progress) is not None

    def discard(self) -> None:
        """Remove what was written; the first error is the one to tell."""
        for written in self._written:
            try:
                written.folder.discard()
            except StorageError:
                pass  # `raystate gc` finds it as soon as the run goes on

    # ------------------------------------------------------------ the commit

    def commit(self) -> ImportReport:
        """Commit and publish every step that was written, in order."""
        steps = sorted(self._written, key=lambda one: one.incoming.step)
        done: list[int] = []
        try:
            for written in steps:
                self._commit(written)
                done.append(written.incoming.step)
            self._attempt.append("import: all steps are published")
        except (StorageError, StaleAttemptError) as error:
            self.discard()
            if done:
                raise type(error)(f"{error.message} (steps {done} are imported)", **{**error.details, "steps": done}) from error
            raise
        leaves = [leaf for written in steps for tree in written.trees for leaf in tree.leaves]
        return ImportReport(
            url=self._storage.url,
            run=self._attempt.tail.run,
            steps=tuple(done),
            arrays=sum(leaf.array is not None for leaf in leaves),
            nbytes=sum(total_bytes(tree) for written in steps for tree in written.trees),
            left_out={one.incoming.step: one.incoming.left_out for one in steps if one.incoming.left_out},
            verified=self._verify,
            present=tuple(sorted(self._present)),
        )

    def _commit(self, written: _WrittenStep) -> None:
        step, package = written.incoming.step, written.package
        assert package is not None
        metrics = {name: float(value) for name, value in written.incoming.metrics.items() if isinstance(value, int | float)}
        live = LiveStep(step=step, save=written.folder.save, metrics=metrics, time_s=time.time())
        try:
            self._attempt.append(f"import of step {step}", commit=live)
        except StorageError:
            # The entry may still appear, and the step with it. So the next claim of
            # the run looks, and removes the step's data if there is no entry.
            self._written.remove(written)
            raise
        # From here on there is only rolling forward, by this process or by the next that claims the run.
        self._written.remove(written)
        written.folder.publish(package)
        self._attempt.carried_out("commit", step)

    def _refusal(self, step: int) -> str | None:
        if any(written.incoming.step == step for written in self._written):
            return f"step {step} comes twice"
        return self._attempt.refuse_save(step)


# ---------------------------------------------------------------- an import that was interrupted goes on where it ended


def _has_same(storage: Storage, step: IncomingStep, progress: Progress) -> bool:
    """Whether the visible step of this number is the same in all that an import brings: every array bit for bit, and everything else.

    The content alone decides: a number says nothing about it, and a name of a source says nothing about what lay there then.

    Raises:
        CorruptCheckpointError, StorageError: the source can't be read. A step that is there and
            can't be read is not the same.
    """
    try:
        there = IncomingStep.from_reader(open_step(storage, step.step), step.step)
        if _small(there) != _small(step):
            return False
    except (ConfigError, CorruptCheckpointError):
        return False
    total, done = sum(map(total_bytes, step.trees.values())), 0
    for item, tree in step.trees.items():
        for same, nbytes in _compared(step, there, item, with_our_chunks(tree)):
            if not same:
                return False
            done += nbytes
            progress(f"step {step.step}: comparing", min(done, total), total)
    return True


def _small(step: IncomingStep) -> list[Any]:
    """All but the arrays' elements."""
    leaves = {item: sorted(map(repr, map(essence, tree.leaves))) for item, tree in step.trees.items()}
    world = step.world if step.iterators else 1
    documents = [json.dumps(one, sort_keys=True) for one in (step.json_items, step.metrics, step.custom)]
    return [leaves, step.iterators, world, step.own_files, *documents]


def _compared(step: IncomingStep, there: IncomingStep, item: str, tree: TreeSpec) -> Iterator[tuple[bool, int]]:
    """(whether they are equal, their bytes) of each batch of boxes."""
    index = {leaf.name: number for number, leaf in enumerate(there.trees[item].leaves)}
    wanted = list(batches(tree, [number for number, leaf in enumerate(tree.leaves) if leaf.array is not None]))
    moved = [[(index[tree.leaves[leaf].name], start, shape) for leaf, start, shape in requests] for requests in wanted]
    theirs = read_ahead(partial(there.read, item), moved)
    for _, parts in read_ahead(partial(step.read, item), wanted):
        try:
            _, others = next(theirs)
        except CorruptCheckpointError:
            yield False, 0
            return
        yield all(np.array_equal(raw(a), raw(b)) for a, b in zip(parts, others, strict=True)), sum(part.nbytes for part in parts)
