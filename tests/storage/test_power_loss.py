"""The power fails at any moment of a run on a directory: what was promised is there, and what is there is complete.

The recorded runs are in `power_scenario`, the checks in `power_examiner`; what may survive is the model of `tests.power.recorder`.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from raystate.storage.base import TEMPORARY_PREFIX
from tests.power.recorder import Event, Recording, Replay, replays
from tests.storage import power_scenario
from tests.storage.power_examiner import Examiner
from tests.storage.power_scenario import HOSTS, PLACE, killed_run

SEED = int(os.environ["RAYSTATE_SEED"])  # drawn by tests/conftest.py, which prints it


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return power_scenario.run(tmp_path_factory.mktemp("recorded"))


@pytest.fixture
def examiner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Examiner:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # the power of a replay is never cut off
    return Examiner(tmp_path, PLACE, restores=True)


def first_problem(found: Iterable[Replay], examiner: Examiner) -> str:
    return next((problem for replay in found if (problem := examiner.problem(replay))), "")


def test_a_committed_step_survives_a_power_cut_at_any_moment(recording: Recording, examiner: Examiner):
    problem = first_problem(replays(recording), examiner)
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


# ---------------------------------------------------------------- a process dies first, the power fails later


@pytest.mark.long
def test_a_successor_is_as_safe_as_the_first(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    """What the dead one left half-done, visible but not durable, is durable before the successor builds on it."""
    played = [tmp_path_factory.mktemp("killed") for _ in range(80)]
    runs = list(itertools.takewhile(lambda run: not run[1], (killed_run(root, place) for place, root in enumerate(played))))
    monkeypatch.setattr(os, "fsync", lambda _: None)
    assert 15 < len(runs) < len(played)
    problems: list[str] = []
    power_cuts = 0
    places = range(len(runs)) if os.environ.get("RAYSTATE_ALL") else random.Random(SEED).sample(range(len(runs)), 5)
    for place in places:
        examiner, recording = Examiner(tmp_path / str(place), PLACE, restores=False), runs[place][0]
        if problem := first_problem(replays(recording, after="successor", exhaustive_up_to=128), examiner):
            death = next(before for before, event in itertools.pairwise(recording.events) if event.path == "successor")
            problems.append(f"killed before the fsync after {death}: {problem}")
        power_cuts += examiner.replays
    print(f"{len(places)} of {len(runs)} deaths, {power_cuts} power cuts after them; RAYSTATE_SEED={SEED}")  # noqa: T201
    assert not problems, "\n\n".join(problems)
