"""Delays that a test injects are named by the status, the log and the run's ledger, and as long there as the test has measured them."""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
from ray._private import worker

import raystate
from raystate.core.coordinator.slow_ranks import SlowRank
from raystate.machine.fault_points import FOLDER
from raystate.observe.goodput import goodput
from raystate.observe.ledger.lines import GroupEnded, LoggedSave, Sampled, Slowed, StorageChanged
from raystate.observe.ledger.reader import LedgerContent, read_ledger
from raystate.observe.timeline import timeline_of
from raystate.storage import open_storage
from tests.cluster.training import Training, wait_for

DELAY_S = 0.25
CLOSE = 0.05  # relative: the ledger beside the test's own clock
HELD_TIMES = 40  # as long as a save usually takes
LEAST_HELD_S, MOST_HELD_S = 12.0, 45.0
SLOW, ENDS = "slow", "ends"  # files of the test, for the trainers

pytestmark = pytest.mark.usefixtures("by_value")


def train(loop: dict[str, Any]) -> None:
    """Tells what is known of its start; at its end, for each step, its number and the seconds of its section, measured within it."""
    import json as text
    import time
    from pathlib import Path as Folder

    import jax
    import jax.numpy as jnp
    from jax.experimental import multihost_utils

    from raystate.actors.launch_context import ages

    out, rank = Folder(loop["out"]), jax.process_index()
    measured: list[tuple[int, float]] = []
    with raystate.StateManager() as manager:
        restored = manager.restore_or_init(lambda: {"x": jnp.zeros(4)})
        state, step, ends = restored.state, restored.step, False
        (out / f"ages-{rank}").write_text(text.dumps(dict(ages())))
        while not ends:
            with manager.section("data"):
                began_s = time.perf_counter()
                time.sleep(DELAY_S if rank == 1 and (out / SLOW).exists() else 0.02)
                measured.append((step + 1, time.perf_counter() - began_s))
            # A value that all ranks have to agree on keeps them in step, as a training's own collectives do.
            ends = bool(multihost_utils.broadcast_one_to_all((out / ENDS).exists()))
            state, step = {"x": state["x"] + 1}, step + 1
            manager.save(step, state)
    (out / f"measured-{rank}").write_text(text.dumps(measured))


@pytest.mark.long
def test_a_slow_rank_a_slow_section_and_a_slow_disk(ray_cluster: Any, make_run: Any, tmp_path: Path) -> None:
    def ledger() -> LedgerContent:
        return read_ledger(open_storage(config.storage))

    def of(kind: type[Any]) -> list[Any]:
        return [one.what for one in ledger().lines if isinstance(one.what, kind)]

    run, out, points = make_run(), tmp_path / "out", Path(os.environ[FOLDER])
    out.mkdir()
    config = raystate.StateConfig(storage=run.storage, run=run.run, save_every_steps=50, keep_last=2, hang_timeout_s=600.0)
    training = Training(config, out, train_fn=train, devices=1)
    failed = lambda: training.error  # noqa: E731

    # A disk that takes no write for a while.
    wait_for(lambda: len(of(LoggedSave)) >= 5, "five saves", failed=failed)
    usual_s = statistics.median(one.seconds for one in of(LoggedSave))
    for old in points.glob("writing.*"):
        old.unlink()
    (points / "writing.hold").touch()
    try:
        wait_for(lambda: len(list(points.glob("writing.*.reached"))) == 2, "both hosts at the disk", failed=failed)
        began_s = time.monotonic()
        time.sleep(min(MOST_HELD_S, max(LEAST_HELD_S, HELD_TIMES * usual_s)))  # what is measured, not a way to wait
    finally:
        (points / "writing.hold").unlink()
        held_s = time.monotonic() - began_s
    wait_for(lambda: any(one.seconds >= held_s for one in of(LoggedSave)), "the save that was held up", failed=failed)
    (slow_save,) = [one for one in of(LoggedSave) if one.seconds >= held_s]
    assert slow_save.seconds - usual_s == pytest.approx(held_s, rel=CLOSE)
    assert slow_save.writing_s == pytest.approx(held_s, rel=CLOSE), "it was the writing"
    wait_for(lambda: [one.works for one in of(StorageChanged)][-1:] == [True], "storage that works again", failed=failed)
    assert StorageChanged(works=False, why="it stands still") in of(StorageChanged)

    # A rank that is slow in a section.
    (out / SLOW).touch()
    (begun,) = wait_for(lambda: of(Slowed), "a slow rank", failed=failed)
    (out / ENDS).touch()
    training.finish()
    assert (begun.rank, begun.section, begun.ends) == (1, "data", False)
    measured = [dict(json.loads((out / f"measured-{rank}").read_text())) for rank in (0, 1)]
    excess_s = [measured[1][step] - measured[0][step] for step in measured[1] if step > begun.since_step]
    assert begun.by_s == pytest.approx(statistics.median(excess_s), rel=CLOSE)

    # The section's share of all the time.
    assert not of(GroupEnded) or of(GroupEnded)[-1].how == "ended"
    last = of(Sampled)[-1]
    spent_s = statistics.fmean(sum(one.values()) for one in measured)
    assert last.spent["section:data"] == pytest.approx(spent_s, rel=CLOSE)
    assert goodput(timeline_of(ledger().lines)).waiting["data"] == pytest.approx(spent_s, rel=CLOSE)


def logged(run: str, pattern: str) -> list[str]:
    """Lines of a run in the actors' logs."""
    assert worker._global_node is not None
    logs = Path(worker._global_node.get_logs_dir_path())
    lines = [line for path in logs.glob("worker-*.err") for line in path.read_text(errors="replace").splitlines()]
    return [line for line in lines if f"raystate {run}: " in line and pattern in line]


def test_a_slow_rank_is_named(ray_cluster: Any, make_run: Any, tmp_path: Path) -> None:
    from raystate.actors.reporting import run_reports

    def slow() -> list[SlowRank] | None:
        found = [one.status for one in run_reports() if one.run == run.run and one.status is not None]
        return list(found[0].slow) if found and found[0].newest_step > 0 else None

    run, out = make_run(), tmp_path / "out"
    out.mkdir()
    (out / SLOW).touch()
    config = raystate.StateConfig(storage=run.storage, run=run.run, save_every_steps=10_000)
    training = Training(config, out, train_fn=train, devices=1)
    failed = lambda: training.error  # noqa: E731
    (found,) = wait_for(slow, "a slow rank", failed=failed)
    assert (found.rank, found.section) == (1, "data")
    assert 0.5 * DELAY_S < found.by_s < 2 * DELAY_S
    (out / SLOW).unlink()
    wait_for(lambda: slow() == [], "the end of its slowness", failed=failed)
    (out / ENDS).touch()
    training.finish()
    (line,) = logged(run.run, "longer than the other ranks")
    assert f"(host {found.host[:8]})" in line and "in section 'data'" in line
    (line,) = logged(run.run, "is as fast as the others in section 'data' again")
    for rank in (0, 1):
        known = json.loads((out / f"ages-{rank}").read_text())
        assert list(known) == ["called", "asked", "placed", "process", "function", "manager"]
        assert known["called"] >= known["asked"] >= known["placed"] >= known["function"] >= known["manager"] >= 0
        assert known["process"] >= known["function"]
