"""The drill's parts that need no cluster: which faults a seed names, which count, what they are judged by, tables, JSON, exit codes."""

from __future__ import annotations

import io
import itertools
import json
import os
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import raystate
from jobs.drill import __main__ as command
from jobs.drill import training
from jobs.drill.fit import through
from jobs.drill.outcomes import NONE, Before, Outcome, Report, check, least_step, rows, spread, why_not_counted
from jobs.drill.plan import FIXED, KINDS, PHASES, faults
from jobs.drill.strikes import limits
from jobs.drill.table import KIND_NAMES, show
from jobs.drill.watch import TooLate, phase_of
from raystate.core.formats.errors import lost_steps
from tests.processes import run_python

CLOCK = Path(command.__file__).parent / "clock"


def before(**facts: Any) -> Before:
    return Before(**{"alive": True, "trained": 50, "stable": 49, "durable": 40, "phase": "idle", **facts})


def outcome(**facts: Any) -> Outcome:
    return Outcome(**{"number": 1, "kind": "trainer", "aim": "any", "target": "rank 0", "before": before(), **facts})


def report(*outcomes: Outcome, **facts: Any) -> Report:
    given = {
        "seed": 7,
        "wanted": len(outcomes),
        "outcomes": outcomes,
        "not_counted": (),
        "left_out": {},
        "bit_equal": True,
        "violations": (),
        "steps": 700,
        "took_s": 60.0,
        "unasked": 0,
    }
    return Report(**{**given, **facts})


# ---------------------------------------------------------------- the choice


def test_a_seed_names_a_sequence() -> None:
    first, again, other = (list(itertools.islice(faults(seed), 40)) for seed in (7, 7, 8))
    assert first == again != other
    assert [fault.number for fault in first] == list(range(1, 41))


def test_each_round_has_every_kind_once() -> None:
    names = [fault.kind.name for fault in itertools.islice(faults(3, KINDS), 3 * len(KINDS))]
    for begin in range(0, len(names), len(KINDS)):
        assert sorted(names[begin : begin + len(KINDS)]) == sorted(KIND_NAMES)


def test_every_phase_is_aimed_at() -> None:
    assert {fault.aim for fault in itertools.islice(faults(0), 100)} == {*PHASES[1:], "any"}


# ---------------------------------------------------------------- which count, and what they are judged by


def test_which_faults_count() -> None:
    assert why_not_counted(before(), 49) == ""
    assert "no new step" in why_not_counted(before(), 50)
    assert "not alive" in why_not_counted(before(alive=False), 10)


def test_the_bound_of_loss() -> None:
    # What spares memory may cost nothing that was ever safe there; a lost node nothing that had its copies just before.
    assert least_step(before(), spares_memory=True, kept=55) == 55
    assert least_step(before(), spares_memory=False, kept=55) == 49
    assert least_step(before(stable=NONE), spares_memory=False, kept=55) == 40


@pytest.mark.parametrize(
    ("start", "durable_after", "wrong", "said"),
    [
        (49, 40, [], []),
        (None, 60, [], []),
        (48, 40, [], ["the run went on from step 48, and step 49 was safe in memory"]),
        (49, 39, [], ["the newest durable step went from 40 back to 39"]),
        (49, 40, ["durable step 40 can't be read"], ["durable step 40 can't be read"]),
    ],
)
def test_what_is_broken_is_said(start: int | None, durable_after: int, wrong: list[str], said: list[str]) -> None:
    one = outcome(start=start)
    check(one, least=49, durable_after=durable_after, restored_wrong=wrong)
    assert one.violations == said


def test_steps_lost() -> None:
    assert outcome(start=45, reached=50).steps_lost == 5
    assert outcome(start=50, reached=50).steps_lost == 0
    assert outcome(start=None, reached=50).steps_lost == 0, "nobody started again"


@pytest.mark.parametrize(
    ("status", "phase"),
    [
        (None, "unknown"),
        ({"recovery": "asking"}, "recovering"),
        ({"training": False}, "recovering"),
        ({"saves": ["queued", "packaging"]}, "committing"),
        ({"saves": ["queued", "writing"]}, "saving"),
        ({"saves": ["queued"]}, "staging"),
        ({"memory_step": 9}, "staging"),
        ({}, "idle"),
    ],
)
def test_what_a_coordinator_is_doing(status: dict[str, Any] | None, phase: str) -> None:
    given: Any = None
    if status is not None:
        given = SimpleNamespace(**{"recovery": "idle", "training": True, "saves": [], "memory_step": 10, **status})
        given.saves = [SimpleNamespace(phase=one) for one in given.saves]
    assert phase_of(given, 10) == phase


def test_deadlines_fit_the_machine() -> None:
    fast, slow = limits(3.0, 0.5, 60.0), limits(60.0, 20.0, 60.0)
    assert fast.patience_s == 60.0
    assert slow.hang_s > 20.0 > fast.hang_s > 0.5
    assert slow.patience_s > 60.0


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, ("step 40: storage failed",)),
        (lost_steps(("step 80: storage failed",), released=True), TooLate),
        (raystate.RunFailedError("rank 0 raised"), TooLate),
    ],
)
def test_an_end_that_names_lost_steps_is_an_end(error: Exception | None, said: Any) -> None:
    """Anything else that a training ends with is a failure."""
    result = SimpleNamespace(lost=("step 40: storage failed",))
    fit: Any = SimpleNamespace(thread=SimpleNamespace(is_alive=lambda: False), error=error, result=result)
    watch: Any = SimpleNamespace(look=lambda: None, newest=80)
    if said is TooLate:
        with pytest.raises(TooLate, match="the training failed"):
            through(watch, fit, 1.0)
    else:
        assert through(watch, fit, 1.0) == said


# ---------------------------------------------------------------- sums, JSON, table, exit code


def test_spread() -> None:
    found = spread([float(value) for value in range(1, 101)])
    assert (found.median, found.p95, found.max) == (50.5, 95.0, 100.0)
    assert spread([2.0]) == spread([2.0, 2.0])
    assert spread([]).max is None


def test_rows_are_in_order_and_count_what_came_back() -> None:
    found = [outcome(kind="node", seconds=4.0, safe_s=1.0), outcome(seconds=2.0, safe_s=0.5), outcome(seconds=3.0)]
    trainer, node = rows(found, lambda one: one.kind, KIND_NAMES)
    assert (trainer.name, trainer.faults, trainer.recovered, trainer.seconds.max) == ("trainer", 2, 1, 3.0)
    assert (node.name, node.safe_s.median) == ("node", 1.0)


good = outcome(seconds=1.0, safe_s=0.1)


@pytest.mark.parametrize(
    ("one", "held"),
    [
        (report(good), True),
        (report(good, bit_equal=False), False),
        (report(good, bit_equal=None), False),
        (report(good, violations=("left behind: x",)), False),
        (report(outcome(seconds=1.0)), False),
        (report(outcome(seconds=1.0, safe_s=0.1, violations=["lost"])), False),
        (report(good, wanted=2), False),
        (report(good, not_durable=("step 40: storage failed",)), True),  # named, as is promised
    ],
)
def test_what_held(one: Report, held: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert one.held is held
    monkeypatch.setattr(command, "run", lambda *_: one)
    assert command.main(["--faults", str(one.wanted), "--json", str(tmp_path / "drill.json")]) == (0 if held else 1)
    facts = json.loads((tmp_path / "drill.json").read_text())
    assert facts["held"] is held
    assert facts["faults"] == 1
    assert facts["recovered"] == one.recovered
    assert facts["bit_equal"] == one.bit_equal
    assert len(facts["violations"]) == len(one.all_violations)
    assert facts["not_durable"] == list(one.not_durable)
    assert facts["by_kind"]["trainer"]["seconds"] == {"median": 1.0, "p95": 1.0, "max": 1.0}
    assert facts["by_phase"]["idle"]["steps_lost"]["max"] == 0


def test_the_tables_fit_80_columns() -> None:
    many = [
        outcome(kind=kind, seconds=123.4, safe_s=123.4, start=1, reached=12345, before=before(phase=phase))
        for kind in KIND_NAMES
        for phase in PHASES
    ]
    out = io.StringIO()
    show(
        Console(file=out, width=80),
        report(*many, violations=("it went wrong",), left_out={"clock": "not ours"}, not_durable=("x",) * 13),
    )
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    text = out.getvalue()
    firsts = [line.split()[0] for line in lines if line.strip()]
    assert set(KIND_NAMES) | set(PHASES) <= set(firsts), "every row on a line of its own"
    assert "…" not in text, "nothing is cut off"
    assert "13 due steps did not get to storage, and the run's end has named them" in text
    assert "violated: it went wrong" in text and "left out: clock: not ours" in text and "It did not hold." in text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--faults", "0"], "at least 1"),
        (["--faults", "3", "--kinds", "trainer,flood"], "'flood'"),
        (["--faults", "3", "--kinds", "trainer,shrink"], "shrink: only with --elastic"),
        (["--faults", "3", "--address", "auto"], "go together"),
        (["--faults", "3", "--address", "auto", "--storage", "/data", "--kinds", "node,clock"], "none of these"),
        (["--faults", "3", "--json", "no/such/folder/x.json"], "no such folder"),
    ],
)
def test_bad_usage_is_a_sentence(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "run", None)
    assert command.main(given) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert len(captured.err.splitlines()) == 1


def test_storage_that_is_no_place_for_a_drill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raystate.save(tmp_path / "old" / "3", {"w": np.ones(2)})
    for storage, said in ((f"{tmp_path}/old", "steps in it"), ("ftp://x/y", "unsupported scheme")):
        assert command.main(["--faults", "1", "--address", "127.0.0.1:1", "--storage", storage]) == 2
        assert said in capsys.readouterr().err


def test_what_another_cluster_leaves_out() -> None:
    args = command.parser().parse_args(["--faults", "3", "--address", "auto", "--storage", "gs://bucket/drill"])
    kinds, left_out = command.chosen(args)
    assert {kind.name for kind in kinds} == {"trainer", "host", "coordinator", "stop-trainer", "stop-host", "stop-coordinator"}
    assert {kind.name for kind in kinds} | left_out.keys() == {kind.name for kind in FIXED}
    assert all(left_out.values())


def test_the_plan_is_printed_and_nothing_done(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "run", None)
    assert command.main(["--faults", "12", "--seed", "7", "--plan"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == [fault.kind.name for fault in itertools.islice(faults(7), 12)]


def test_help_names_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--help"])
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in KIND_NAMES)


# ---------------------------------------------------------------- the training and the clock


def test_the_exact_part_is_the_same_for_numpy_and_jax() -> None:
    _, init, _, step = training.build()
    state = init()
    for position in range(3):
        state, _ = step(state, *training.batch(position))
    assert training.mark(np.asarray(state["exact"])) == training.mark(training.Exact().at(3))


def test_a_clock_that_jumps(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    program = """
import pickle, struct, time
first = time.time()
assert time.time_ns() // 10**9 - int(first) in (0, 1)
assert pickle.loads(pickle.dumps(time.time)) is time.time
with open({clock!r}, "r+b") as file:
    file.write(struct.pack("d", -86400.0))
print(time.time() - first)
"""
    clock.write_bytes(struct.pack("d", 600.0))
    environment = {**os.environ, "RAYSTATE_DRILL_CLOCK": str(clock), "PYTHONPATH": str(CLOCK)}
    done = run_python("-c", program.format(clock=str(clock)), env=environment)
    assert -86400 - 600 <= float(done.stdout) < -86000 - 600
