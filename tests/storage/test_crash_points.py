"""A process dies before, after and in the middle of every operation on storage, or only hears nothing of it; the next one goes on.

By default some of the points are played, drawn by a seed that is printed (RAYSTATE_SEED=n draws them again); RAYSTATE_ALL=1 plays all:
on the local GCS server one point of each state of storage that a death can leave, elsewhere every point, with the dead known to be dead
and not.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from raystate.core.coordinator import journal
from raystate.core.formats.entries import PlannedEntry
from raystate.core.formats.log import key_of
from raystate.core.formats.messages import Appended, LogEntry
from raystate.runtime.coordinator import storing
from raystate.storage import RunLog, garbage, steps
from raystate.storage.names import MARKER, attempt_of
from tests.storage.crash_sweep import HISTORIES, faults, record, representatives, strike
from tests.storage.mortal import Fault
from tests.storage.stages import ALL, BACKENDS, SEED, Fresh, stage

SAMPLE = {"directory": 10, "memory": 10, "gcs": 2}  # points of a history that are played by default
ORDER = SEED + 1  # 0 is first come, first served, which the planted mistakes are played with


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[tuple[str, Fresh]]:
    with stage(request.param) as fresh:
        yield request.param, fresh


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", HISTORIES)
def test_every_crash_point(backend: tuple[str, Fresh], name: str):
    kind, fresh = backend
    history = HISTORIES[name]
    knows = (True, False) if ALL else (random.Random(f"{SEED} {name}").random() < 0.5,)
    recorded = {tell: record(history, fresh(), tell_dead=tell, order=ORDER) for tell in knows}
    points = [(fault, tell) for tell, operations in recorded.items() for fault in faults(operations)]
    different = [(fault, tell) for tell, operations in recorded.items() for fault in representatives(operations)]
    if ALL and kind == "gcs":  # each once, whether the dead are known to be dead by turns
        chosen = [one for index, one in enumerate(different) if (index % 2 == 0) == one[1] and one[0].how != "beside"]
    else:
        chosen = points if ALL else random.Random(f"{SEED} {kind} {name}").sample(different, SAMPLE[kind])
    for fault, tell in chosen:
        try:
            strike(history, fresh(), fault, tell_dead=tell, order=ORDER)
        except Exception as error:
            error.add_note(f"{fault} at {recorded[tell][fault.nth]}; dead known: {tell}; RAYSTATE_SEED={SEED}")
            raise
    counts = f"{len(recorded[knows[0]])} operations, {len(points)} crash points, {len(different)} different ones"
    print(f"{name} on {kind}: {counts}, {len(chosen)} played")  # noqa: T201


# ---------------------------------------------------------------- the sweep can see


def _marker_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(steps, "marker_last", lambda name: (name != MARKER, name))


def _intents_forgotten(patch: pytest.MonkeyPatch) -> None:
    arrived = journal.Journal._arrived

    def forget(self: journal.Journal, entry: LogEntry) -> None:
        if entry.kind == "claim":
            self.carried = {key_of(intent) for intent in entry.intents}
        arrived(self, entry)

    patch.setattr(journal.Journal, "_arrived", forget)


def _garbage_of_the_living(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(garbage, "attempt_of", lambda save: None if attempt_of(save) is None else -1)


def _base_after_its_entry(patch: pytest.MonkeyPatch) -> None:
    create, append = RunLog._create_base, RunLog.append
    waiting: list[tuple[RunLog, PlannedEntry]] = []

    def late(self: RunLog, entry: LogEntry, *, needs: Sequence[str] = ()) -> Appended:
        outcome = append(self, entry, needs=needs)
        for log, planned in waiting:
            if log is self:
                create(log, planned)
        waiting.clear()
        return outcome

    patch.setattr(RunLog, "_create_base", lambda self, planned: waiting.append((self, planned)))
    patch.setattr(RunLog, "append", late)


def _base_in_use_is_garbage(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(garbage, "base_name", lambda base: "none is kept")


def _errors_kept_back(patch: pytest.MonkeyPatch) -> None:
    """And nobody asks whether the package is there."""
    append = RunLog.append
    patch.setattr(storing, "_outcome", lambda error: "")
    patch.setattr(RunLog, "append", lambda self, entry, needs=(): append(self, entry))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """`where`: the kind of operation at which it is looked for. `says`: what the sweep makes of it."""

    plant: Callable[[pytest.MonkeyPatch], None]
    backend: str
    history: str = "save"
    where: str
    says: str


MISTAKES = {
    "the marker comes first": Mistake(
        plant=_marker_first, backend="memory", where="create", says="visible means complete: .* is missing"
    ),
    "a base comes after the entry that names it": Mistake(
        plant=_base_after_its_entry, backend="directory", where="create", says="names the base .*, which nobody has written"
    ),
    "the base in use is garbage": Mistake(
        plant=_base_in_use_is_garbage, backend="memory", where="create", says="the log can't be read: .* is missing"
    ),
    "garbage of the living": Mistake(
        plant=_garbage_of_the_living, backend="directory", where="sweep", says="waits for the save of step 10 for ever"
    ),
    "the machine hears of no error": Mistake(
        plant=_errors_kept_back, backend="memory", where="create", says="is committed and has no package"
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_sweep_can_see(name: str, monkeypatch: pytest.MonkeyPatch):
    mistake = MISTAKES[name]
    history = HISTORIES[mistake.history]
    with stage(mistake.backend) as fresh:
        mistake.plant(monkeypatch)
        operations = record(history, fresh())
        found: list[tuple[Fault, str]] = []
        for fault in representatives(operations):
            if operations[fault.nth].kind == mistake.where and not found:
                try:
                    strike(history, fresh(), fault)
                except AssertionError as red:
                    found.append((fault, str(red)))
    assert found, f"nobody has noticed: {name}"
    fault, text = found[0]
    assert re.search(mistake.says, text), text
    print(f"{name}: found by {fault} at {operations[fault.nth]}: {text}")  # noqa: T201
