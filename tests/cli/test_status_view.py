"""`raystate status`, once and while it watches: verdicts, screens, and the process that asks."""

from __future__ import annotations

import dataclasses
import io
import math
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console, RenderableType
from rich.live import Live

import raystate
from raystate.cli.asking import Asker, Heard
from raystate.cli.console import screen_out, span
from raystate.cli.status_stored import stored_block, stored_run
from raystate.cli.status_view import run_block, runs_table, safety
from raystate.cli.watching import Screen
from raystate.core.coordinator.slow_ranks import SlowRank
from raystate.core.formats.messages import HostId
from raystate.observe.counted import MEMORY_CAP, MEMORY_USED
from raystate.observe.ledger.lines import ALL_CLOSED, AttemptBegan, Noted, RunLeft, batch_name, batch_of, line_of
from raystate.observe.status import HostStatus, RunReport, RunStatus, SaveStatus
from raystate.waits import COORDINATOR_STARTS_S
from tests.cli.transfers import raystate_command
from tests.patience import PATIENCE_S

HOST = HostStatus(
    host="h1",
    up=True,
    why_down="",
    silent_s=0.5,
    ranks=(0,),
    steps=(7, 8),
    nbytes=64,
    counts=((MEMORY_USED, 512.0), (MEMORY_CAP, 2048.0)),
)
LEAVES = dataclasses.replace(HOST, host="5a0b4dfa99", ranks=(), leaves_in_s=19.2, why_leaves="Ray drains it")
SINCE = "since attempt 4 of the Coordinator began"
SLOW = SlowRank(rank=5, host=HostId("77ab01cdef"), section="data", by_s=0.113, since_step=1100)
RUN = RunStatus(
    attempt=1, lineage="1.1.x", training=True, world=2, newest_step=1234, memory_step=1233, durable_step=1200, snapshot_every=1,
    step_s=None, snapshot_s=None, save_every_s=None, save_every_steps=None, save_s=None, recovery="idle", end="open",
    saves=(SaveStatus(step=1240, phase="writing", since_s=3.0, tries=2),),
    hosts=(HOST,), newest_age_s=0.2, snapshot_age_s=0.5, durable_age_s=34.0, steps_per_s=4.0,
    slow=(SLOW,),
    goodput=(("steps", 0.95), ("saves", 0.03), ("start", 0.0199), ("hosts", 0.0001)),
)  # fmt: skip
REPORT = RunReport(run="lm", storage="gs://bucket/lm", status=RUN, name="c", said=("12:00:00 raystate lm: step 1200 is durable",))


def of(**changes: Any) -> RunReport:
    return dataclasses.replace(REPORT, status=dataclasses.replace(RUN, **changes))


def text(shown: RenderableType, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("report", "word", "why"),
    [
        (REPORT, "SAFE", "if a rank dies, the run repeats 1 step (250 ms); if all hosts are lost, 34 steps (8.5 s)"),
        (of(memory_step=-1, durable_step=-1), "NOT SAFE", "if a rank dies, the run repeats all 1,234 steps"),
        (of(durable_step=-1), "MEMORY ONLY", "if all hosts are lost, 1,234 steps"),
        (of(memory_step=1230, steps_per_s=0.3), "BEHIND", "if a rank dies, the run repeats 4 steps"),
        (of(memory_step=1230), "SAFE", "if a rank dies, the run repeats 4 steps (1.0 s)"),
        (of(storage_problem="the disk is full"), "STORAGE FAILS", "if all hosts are lost, 34 steps"),
        (of(memory_step=1230, snapshot_every=2), "SAFE", "if a rank dies, the run repeats 4 steps"),
        (of(memory_step=-1, snapshot_every=0), "SAFE", "if a rank dies, the run repeats 34 steps"),
        (of(hosts=(dataclasses.replace(HOST, up=False),)), "HOST DOWN", "; down: h1"),
        (of(hosts=(LEAVES,)), "HOST LEAVES", "if a rank dies, the run repeats 1 step"),
        (of(newest_age_s=61.0), "NO STEPS", "no step for 61.0 s; if a rank dies, the run repeats 1 step"),
        (of(newest_age_s=61.0, steps_per_s=0.1), "SAFE", ""),
        (of(training=False), "NO TRAINER", "it goes on from step 1233"),
        (of(newest_step=-1), "STARTS", "no step has been saved yet"),
        (of(recovery="asking"), "RESTORES", "asking"),
        (of(end="closing"), "ENDS", "closing"),
        (RunReport(name="c", problem="c does not answer"), "NO ANSWER", "c does not answer"),
        (RunReport(run="lm", storage="x"), "WAITS", "another run uses its storage"),
    ],
)
def test_whether_a_run_is_safe_now(report: RunReport, word: str, why: str) -> None:
    found = safety(report)
    assert found.word == word and why in found.why


PEER, LOST, REPLACED = ("recoveries/interrupted/peer", 2.0), ("recoveries/died/none", 1.0), ("recoveries/coordinator/kept", 1.0)


@pytest.mark.parametrize(
    ("restarts", "counts", "told"),
    [
        (3, (PEER, LOST), "3 of the trainers: 2 interrupted (from peer), 1 died"),
        (3, (REPLACED,), f"3 of the trainers, {SINCE}: none of them; the Coordinator was replaced: this is its attempt 4"),
        (5, (PEER, REPLACED), f"5 of the trainers, {SINCE}: 2 interrupted (from peer); the Coordinator was replaced"),
        (0, (REPLACED,), "none of the trainers; the Coordinator was replaced: this is its attempt 4"),
        (None, (REPLACED,), f"0 of the trainers {SINCE}; the Coordinator was replaced: this is its attempt 4"),
    ],
)
def test_restarts_of_the_trainers_are_one_count(restarts: int | None, counts: tuple[tuple[str, float], ...], told: str) -> None:
    shown = " ".join(text(run_block(of(restarts=restarts, counts=counts, attempt=4), full=True)).split())
    assert f"restarts {told}" in shown and "from none" not in shown and "1 coordinator" not in shown
    assert "restarts" not in text(run_block(of(restarts=0), full=True))


@pytest.mark.parametrize("width", [60, 120])
def test_a_host_that_is_to_leave_is_named_with_the_time_of_its_end(width: int) -> None:
    shown = " ".join(text(run_block(of(hosts=(HOST, LEAVES)), full=True, at_s=1_000_000_000.0), width).split())
    assert "leaving host 5a0b4dfa leaves by 2001-09-09 01:46:59 UTC, in 19.2 s: Ray drains it" in shown
    assert shown.endswith("0.5 s ago, leaving") and shown.count("leaving") == 2, "the other host stays"
    late = dataclasses.replace(LEAVES, leaves_in_s=-0.9)
    assert "should have left by 2001-09-09 01:46:39 UTC, 900 ms ago" in text(run_block(of(hosts=(late,)), full=True, at_s=1e9))
    assert "leav" not in text(run_block(REPORT, full=True))


MACHINE = dataclasses.replace(LEAVES, machine="gpu-node-7")


@pytest.mark.parametrize("width", [60, 100, 120])
def test_hosts_are_told_with_the_names_of_their_machines(width: int) -> None:
    slow = dataclasses.replace(SLOW, host=HostId(MACHINE.host))
    down = dataclasses.replace(
        MACHINE, host="90ab12cd34", machine="gpu[9]", up=False, why_down="its node is gone", leaves_in_s=None
    )
    report = of(hosts=(HOST, MACHINE, down), slow=(slow, SLOW))
    shown = text(run_block(report, full=True, at_s=1e9), width)
    told = " ".join(shown.split())
    for said in (
        "leaving host 5a0b4dfa (gpu-node-7) leaves by",
        "slow rank 5 (host 5a0b4dfa (gpu-node-7)) takes",
        "slow rank 5 (host 77ab01cd) takes",
    ):
        assert said in told
    assert safety(report).why.endswith("; down: 90ab12cd (gpu[9])")
    rows = [" ".join(row.split()) for row in shown.splitlines() if row.startswith(("h1", "5a0b4dfa", "90ab12cd"))]
    assert [row.partition(" 7, 8")[0] for row in rows] == (
        ["h1 0", "5a0b4dfa (gpu-node-7) -", "90ab12cd (gpu[9]) -"]
        if width == 120
        else ["h1 rank 0; holds", "5a0b4dfa (gpu-node-7) holds", "90ab12cd (gpu[9]) holds"]
    ), "the table is for a screen on which its rows fit"
    file = io.StringIO()
    Console(file=file, width=60, soft_wrap=True).print(run_block(report, full=True))
    assert re.search(r"^5a0b4dfa \(gpu-node-7\) .* 512 B of 2\.0 KiB \(25%\) .* ago, leaving", file.getvalue(), re.MULTILINE), (
        "in a pipe"
    )


@pytest.mark.parametrize(
    ("changes", "every"),
    [
        ({"save_every_s": 15.0}, "15.0 s"),
        ({"save_every_steps": 40}, "10.0 s"),  # at 4 steps/s
        ({"save_every_s": 15.0, "durable_step": -1}, "15.0 s"),
        ({"save_every_s": 18.0}, ""),
        ({"save_every_s": 15.0, "durable_step": 1234}, ""),
        ({"save_every_s": 15.0, "training": False}, ""),
        ({"save_every_s": 15.0, "steps_per_s": 0.05}, ""),  # no step comes sooner
        ({}, ""),
    ],
)
def test_durable_saves_are_overdue_by_the_runs_own_interval(changes: dict[str, Any], every: str) -> None:
    shown = " ".join(text(run_block(of(**changes), full=True)).split())
    told = f"durable saves are overdue: no step has become durable for 34.0 s, and one is due every {every}"
    assert told in shown if every else "overdue" not in shown


def test_times_for_people() -> None:
    assert [span(one) for one in (None, 0.26, 34.4, 600.0, 7200.0, 86400.0, 400000.0, math.inf)] == [
        "?", "260 ms", "34.4 s", "10.0 min", "120.0 min", "24.0 h", "4.6 d", "inf d",
    ]  # fmt: skip


def test_the_screen_tells_of_each_run_and_of_many_in_rows() -> None:
    screen = Screen(None, lambda reports: list(reports), every_s=1.0)
    assert "asks the Ray cluster" in text(screen.turn(None, 0.0))
    shown = text(screen.turn(Heard(address="h:1", reports=(REPORT,)), 1.0))
    for said in (
        "Ray at h:1, 1 run",
        "lm  SAFE  gs://bucket/lm",
        "newest 1234 (200 ms ago)",
        "4 steps/s",
        "writing for 3.0 s, try 2",
    ):
        assert said in shown
    assert "log       12:00:00 step 1200 is durable" in shown
    one_line = " ".join(shown.split())
    assert (
        one_line.count("rank 5 (host 77ab01cd) takes 113 ms a step longer than the others, in section 'data', since step 1100") == 1
    )
    assert "storage" not in shown and "restarts" not in shown
    assert "no answer for" not in text(screen.turn(None, 5.0))
    assert "\nno answer for 99.0 s: this is what was\n" in text(screen.turn(None, 100.0)), "a narrow terminal shows it"
    report = of(
        step_s=1.5,
        snapshot_s=0.12,
        storage_problem="the disk is full " * 20,
        counts=(("recoveries/interrupted/peer", 2.0), ("saves_lost", 9.0)),
    )
    shown = " ".join(text(screen.turn(Heard(address="h:1", reports=(report,)), 100.0)).split())
    assert "restarts 2 of the trainers since attempt 1 of the Coordinator began: 2 interrupted (from peer)" in shown
    assert shown.count("the disk is full") == 20, "nothing of it is cut"
    assert "every step: it costs 120 ms, and a step takes 1.5 s" in shown
    many = [dataclasses.replace(of(durable_step=-1, memory_step=-1) if not n else REPORT, run=f"r{9 - n}") for n in range(9)]
    rows = text(screen.turn(Heard(address="h:1", reports=tuple(many)), 101.0)).splitlines()
    assert [row.split()[0] for row in rows if row.startswith("r") and "SAFE" in row] == ["r9", *(f"r{n}" for n in range(1, 9))]
    assert "34.0 s" in text(runs_table(many)) and "NO ANSWER" in text(runs_table([RunReport(name="c", problem="p")]))


@pytest.mark.parametrize("width", [35, 80, 110])
def test_no_word_is_cut_on_a_narrow_screen(width: int) -> None:
    why = "host h1 could not write: StorageError: writing item 'state': " + "it refuses the request " * 5 + "with 503"
    said = f"12:00:00 raystate lm: WARNING: step 878 will not be durable: {why}"
    report = dataclasses.replace(of(storage_problem=why), said=(said,))
    shown = Screen(None, lambda reports: list(reports), every_s=1.0).turn(Heard(address="h:1", reports=(report,)), 1.0)
    file = io.StringIO()
    console = Console(file=file, width=width, height=100, force_terminal=True, color_system=None, soft_wrap=screen_out.soft_wrap)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        live.update(shown, refresh=True)
    rows = [row.rstrip() for row in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue()).splitlines()]
    assert max(map(len, rows)) <= width
    words = " ".join(" ".join(rows).split())
    assert words.count(why) == 2 and "in section 'data', since step 1100" in words
    assert "blocked by saves 3.0%, start 2.0%" in words and "0.5 s ago" in words, "goodput and the host"
    assert words.index("storage fails") < words.index("trains on") < words.index("12:00:00") < words.index("0.5 s ago")


def test_without_a_cluster_the_screen_says_so_and_what_storage_knows(tmp_path: Path) -> None:
    storage = saved(tmp_path)
    shown = text(Screen(None, lambda _: [], every_s=1.0).turn(Heard(problem="no Ray cluster runs here"), 0.0))
    assert "no Ray cluster runs here" in shown
    shown = text(Screen(str(storage), lambda _: [], every_s=1.0).turn(Heard(problem="no Ray cluster runs here"), 0.0))
    assert "ONLY IN STORAGE" in shown and "step 3 (" in shown and "no Ray cluster runs here" in shown


NO_RUN, NO_RAY = Heard(address="h:1"), Heard(problem="no Ray cluster runs here")


def leaves(storage: Path, attempt: int, reason: str = ALL_CLOSED) -> None:
    """Its ledger says so."""
    (storage / ".raystate/events").mkdir(exist_ok=True)
    lines = [line_of(Noted(attempt, 1, 1_800_000_000.0, RunLeft(reason=reason)))]
    (storage / batch_name(attempt, 1)).write_bytes(batch_of(attempt, lines))


def watched(storage: Path) -> tuple[Screen, Heard]:
    """A screen that has had this answer, at 0 s."""
    answer = Heard(address="h:1", reports=(dataclasses.replace(REPORT, storage=str(storage)),))
    screen = Screen(None, lambda reports: list(reports), every_s=1.0)
    screen.turn(answer, 0.0)
    return screen, answer


@pytest.mark.parametrize("after", [NO_RUN, NO_RAY])
def test_a_run_that_left_has_finished_with_its_newest_step_and_its_last_picture_stays(tmp_path: Path, after: Heard) -> None:
    storage = saved(tmp_path)
    leaves(storage, 1)
    screen, answer = watched(storage)
    told, _, picture = text(screen.turn(after, 9.0)).partition("seen last ")
    assert "lm  FINISHED  step 3 is durable  file://" in told and "ago, at 2027-01-15 08:00:00 UTC: all ranks have closed" in told
    assert "ago, at 1970-01-01 00:16:43 UTC)" in told, "when step 3 became durable"
    assert "NO ANSWER" not in told and "wait" not in told
    assert re.match(r"at [0-9:]{8} UTC, 9\.0 s ago:", picture) and "newest 1234" in picture and "step 1200 is durable" in picture
    again = text(screen.turn(answer, 10.0))
    assert "seen last" not in again and "FINISHED" not in again and "newest 1234" in again


def test_a_run_that_was_released_has_ended_and_not_finished(tmp_path: Path) -> None:
    storage = saved(tmp_path)
    leaves(storage, 1, "another launch took it over")
    told = text(watched(storage)[0].turn(NO_RUN, 9.0))
    assert "lm  ENDED  step 3 is durable" in told and "another launch took it over" in told and "FINISHED" not in told


@pytest.mark.parametrize("after", [NO_RUN, NO_RAY, Heard(reports=(RunReport(name="c", problem="c does not answer: it is busy"),))])
def test_a_run_whose_coordinator_is_silent_may_train_on(tmp_path: Path, after: Heard) -> None:
    storage = saved(tmp_path)
    leaves(storage, 0)  # an earlier attempt: this one has not left
    screen, answer = watched(storage)
    told = " ".join(text(screen.turn(after, 9.0)).partition("seen last ")[0].split())
    assert "lm NO ANSWER" in told and "its Coordinator does not answer for 9.0 s" in told
    assert "Its trainers may train on" in told and "wait, and start no second run" in told and "durable step 3 (" in told
    assert not [word for word in ("no more", "ONLY IN STORAGE", "FINISHED", "DIED") if word in told]
    long = " ".join(text(screen.turn(after, COORDINATOR_STARTS_S + 1)).split())
    assert "lm MAY HAVE DIED" in long and "does not answer for 121.0 s" in long and "nothing says that it has ended" in long
    assert "NO ANSWER" not in long and "wait" not in long.partition("seen last")[0]
    assert "seen last" not in text(screen.turn(answer, 200.0))
    leaves(storage, 1)
    assert "FINISHED" in text(screen.turn(after, 201.0)), "what was read while it was silent before is not used again"


def test_one_of_two_runs_that_is_silent_stays_on_the_screen(tmp_path: Path) -> None:
    screen, answer = watched(saved(tmp_path))
    other = dataclasses.replace(REPORT, run="other", name="d")
    screen.turn(dataclasses.replace(answer, reports=(*answer.reports, other)), 1.0)
    shown = text(screen.turn(Heard(address="h:1", reports=(other,)), 9.0))
    assert "other  SAFE" in shown and "lm  NO ANSWER" in shown and shown.index("other  SAFE") < shown.index("lm  NO ANSWER")
    assert "no Coordinator of it is on the Ray cluster at h:1" in " ".join(shown.split())


def test_a_silent_run_whose_storage_can_not_be_read(tmp_path: Path) -> None:
    told = text(watched(tmp_path / "nothing")[0].turn(NO_RUN, 9.0))
    assert "lm  NO ANSWER" in told and "it can't be read now" in told


def test_the_head_of_each_screen_has_the_date_in_utc() -> None:
    screen = Screen(None, lambda reports: list(reports), every_s=1.0)
    for heard in (None, NO_RAY, NO_RUN, Heard(address="h:1", reports=(REPORT,))):
        assert re.match(r"raystate status  \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC  ", text(screen.turn(heard, 0.0)))


def saved(folder: Path) -> Path:
    """A run of steps 1 and 3, as its log has them."""
    from raystate.core.formats.log import claim_entry, next_entry
    from raystate.core.formats.messages import LiveStep
    from raystate.storage import RunLog, open_storage

    for step in (1, 3):
        raystate.save(folder / "run" / str(step), {"w": np.ones(1)})
    log = RunLog(open_storage(folder / "run"))
    entry = log.claim(lambda tail: claim_entry(tail, "w", "lm"))
    for step in (1, 3):
        commit = LiveStep(step=step, save=f"a1k{step}", time_s=1000.0 + step)
        entry = next_entry(entry, attempt=1, writer="w", carried=(), dead=(), commit=commit, reason="due")
        assert log.append(entry).outcome == "ok"
    return folder / "run"


def test_what_storage_alone_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    storage = saved(tmp_path)
    found = stored_run(str(storage))
    assert found is not None
    assert (found.run, found.attempt, found.durable_step, found.durable_s) == ("lm", 1, 3, 1003.0)
    assert "none is in the ledger" in text(stored_block(found, "why"))
    assert stored_run(str(tmp_path / "nothing")) is None
    monkeypatch.setenv("RAY_ADDRESS", "ftp://nowhere")
    code, said, _ = raystate_command(capsys, "status", storage)
    assert code == 0 and "ONLY IN STORAGE" in said and "RAY_ADDRESS='ftp://nowhere' could not be joined" in said
    code, said, _ = raystate_command(capsys, "status", storage, "--json")
    assert code == 0 and '"durable_step": 3' in said
    code, _, complaint = raystate_command(capsys, "status", tmp_path / "nothing")
    assert code == 2 and "could not be joined" in complaint
    (storage / ".raystate/events").mkdir()
    (storage / ".raystate/events/000001-0001.json").write_text("{")
    code, said, _ = raystate_command(capsys, "status", storage)
    assert code == 1 and "1 object of the ledger can't be read, left out here: 000001-0001.json" in said
    broken = [b'{"kind":"save"', line_of(Noted(1, 1, 1.0, AttemptBegan(reason=""))).replace(b"coordinator", b"telepathy")]
    (storage / batch_name(1, 1)).write_bytes(batch_of(1, broken))
    code, said, _ = raystate_command(capsys, "status", storage)
    assert code == 1 and "1 object and 1 line of the ledger can't be read" in said
    assert "1 line of the ledger was written by a newer raystate, left out here" in said
    (storage / batch_name(1, 2)).symlink_to(tmp_path)
    code, _, complaint = raystate_command(capsys, "status", storage)
    assert code == 2 and "could not be joined" in complaint and "is a symbolic link" in complaint


ASKED = """
import pathlib, pickle, sys, time
import raystate
from raystate.cli.asking import Heard
count = pathlib.Path(sys.argv[1])
number = int(count.read_text()) if count.exists() else 0
count.write_text(str(number + 1))
pickle.dump(Heard(address=f"start {number}"), sys.stdout.buffer)
sys.stdout.flush()
if number:
    time.sleep(1000)
"""


def test_an_asker_that_dies_is_followed_by_another(tmp_path: Path) -> None:
    with Asker(0.2, [sys.executable, "-c", ASKED, str(tmp_path / "count")]) as asker:
        first, second = asker.next(PATIENCE_S), asker.next(PATIENCE_S)
        assert first is not None and second is not None
        assert (first.address, second.address) == ("start 0", "start 1")
        assert asker.next(0.01) is None
    assert pickle.loads(pickle.dumps(Heard(reports=(REPORT,)))).reports == (REPORT,)
