"""The power fails at any moment of a run on a directory: what was promised is there, and what is there is complete.

The recorded runs are in `power_scenario`, the checks in `power_examiner`; what may survive is the model of `tests.power.recorder`.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from raystate.storage.base import TEMPORARY_PREFIX
from tests.patience import PATIENCE_S
from tests.power.recorder import Event, Recording, RecordingUnavailableError, Replay, record, replays
from tests.storage.power_examiner import Examiner
from tests.storage.power_scenario import HOSTS, PLACE

SEED = int(os.environ["RAYSTATE_SEED"])  # drawn by tests/conftest.py, which prints it

REPO = Path(__file__).parents[2]
MakeExaminer = Callable[..., Examiner]


def recorded(scenario: str, root: Path) -> Recording:
    play = f"from tests.storage import power_scenario as p; p.have_bases_early(); p.{scenario}({str(root)!r})"
    code = f"import sys; sys.path.insert(0, {str(REPO)!r}); {play}"
    try:
        return record([sys.executable, "-c", code], root, timeout_s=PATIENCE_S)
    except RecordingUnavailableError as error:
        pytest.skip(f"a power cut cannot be played here: {error}")


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return recorded("run", tmp_path_factory.mktemp("recorded"))


@pytest.fixture
def examiner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Examiner:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # the power of a replay is never cut off
    return Examiner(tmp_path, PLACE, restores=True)


def first_problem(found: Iterable[Replay], examiner: Examiner) -> str:
    return next((problem for replay in found if (problem := examiner.problem(replay))), "")


def test_a_committed_step_survives_a_power_cut_at_any_moment(recording: Recording, examiner: Examiner):
    problem = first_problem(replays(recording, exhaustive_up_to=5000, random_subsets=200), examiner)
    print(f"{examiner.replays} power cuts, {examiner.trees} trees to take over, {examiner.restored} restores")  # noqa: T201
    assert not problem, problem
    assert examiner.replays > 1000
    assert examiner.restored > 10


def test_it_was_the_real_run(recording: Recording):
    """TensorStore's part is in the recording, too, and the run came to its end."""
    written = [event.path for event in recording.events if event.kind == "write"]
    for host in range(HOSTS):
        assert any(f"/state/ocdbt.process_a1k1h{host}/d/" in path for path in written)
    *_, last = replays(recording, exhaustive_up_to=1, random_subsets=0)
    assert last.marks[-1] == "appended 4"


# ---------------------------------------------------------------- the model sees what it is for


class Omission:
    """Leaves fsyncs out, by the storage operation they belong to and by what came right before them."""

    def __init__(self, is_left_out: Callable[[str, Event, Event], bool]):
        self._is_left_out = is_left_out
        self._operation = ""
        self._previous = Event(kind="sync")
        self.count = 0

    def __call__(self, event: Event) -> bool:
        if event.kind == "mark" and event.path.startswith(("before ", "after ")):
            self._operation = event.path.split()[1] if event.path.startswith("before ") else ""
        gone = event.kind == "fsync" and self._is_left_out(self._operation, event, self._previous)
        if event.kind not in ("mark", "fsync"):
            self._previous = event
        self.count += gone
        return gone


MISSING: dict[str, Callable[[str, Event, Event], bool]] = {
    "file of create": lambda operation, event, _: operation == "create" and TEMPORARY_PREFIX in event.path,
    "folder of create": lambda operation, _, previous: operation == "create" and previous.kind == "link",
    "parents of create": lambda operation, _, previous: operation == "create" and previous.kind == "mkdir",
    "rename_tree": lambda operation, _, previous: operation == "rename_tree" and previous.kind == "rename",
    "new place of rename_tree": lambda operation, event, previous: (
        operation == "rename_tree" and previous.kind == "rename" and event.inode == previous.target_folder
    ),
    "old place of rename_tree": lambda operation, event, previous: (
        operation == "rename_tree" and previous.kind == "rename" and event.inode == previous.folder
    ),
    "fsync_tree": lambda operation, *_: operation == "fsync_tree",
}


@pytest.mark.parametrize("missing", MISSING)
def test_the_model_sees_a_missing_fsync(recording: Recording, examiner: Examiner, missing: str):
    omission = Omission(MISSING[missing])
    problem = first_problem(replays(recording.without(omission)), examiner)
    print(f"{omission.count} fsyncs left out, {examiner.replays} power cuts until: {problem}")  # noqa: T201
    assert omission.count > 0
    assert problem


@pytest.mark.long
def test_what_writers_do_not_sync_is_no_loss(recording: Recording, examiner: Examiner):
    """assemble makes durable whatever lies in the work folder: a TensorStore that syncs nothing would do."""
    omission = Omission(lambda operation, *_: operation not in ("create", "rename_tree", "fsync_tree", "delete", "delete_tree"))
    problem = first_problem(replays(recording.without(omission)), examiner)
    assert omission.count > 10
    assert not problem, problem


# ---------------------------------------------------------------- a process dies first, the power fails later


@pytest.mark.long
def test_a_successor_is_as_safe_as_the_first(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    """What the dead one left half-done, visible but not durable, is durable before the successor builds on it."""
    whole = recorded("killed_runs", tmp_path_factory.mktemp("killed"))
    monkeypatch.setattr(os, "fsync", lambda _: None)
    parts: list[list[Event]] = []
    for event in whole.events[whole.start :]:
        if event.kind == "mkdir" and event.path.isdecimal():
            parts.append([event, Event(kind="sync")])
        else:
            parts[-1].append(event)
    assert len(parts) > 15
    problems: list[str] = []
    power_cuts = 0
    played = range(len(parts)) if os.environ.get("RAYSTATE_ALL") else random.Random(SEED).sample(range(len(parts)), 5)
    for place, events in ((place, parts[place]) for place in played):
        examiner = Examiner(tmp_path / str(place), f"{place}/{PLACE}", restores=False)
        part = Recording(events=tuple(events), start=2)
        if problem := first_problem(replays(part, after="successor", exhaustive_up_to=128), examiner):
            death = next(before for before, event in itertools.pairwise(events) if event.path == "successor")
            problems.append(f"killed before the fsync after {death}: {problem}")
        power_cuts += examiner.replays
    print(f"{len(played)} of {len(parts)} deaths, {power_cuts} power cuts after them; RAYSTATE_SEED={SEED}")  # noqa: T201
    assert not problems, "\n\n".join(problems)
