"""When the launcher starts again and when it gives up. Pure: no Ray cluster is started here."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.train.v2.api.exceptions import TrainingFailedError

from raystate import RayTrainCallback, StateConfig
from raystate.actors import launch_context
from raystate.actors.blame import raised
from raystate.actors.launch_context import LaunchContext, Restart, saves_so_far
from raystate.cli.report_life import life_of
from raystate.core.formats.errors import ConfigError, StorageError
from raystate.core.formats.names import HostId
from raystate.manager.opening import is_launched
from raystate.observe.ends import End, Told
from raystate.observe.ledger.lines import GroupJoined, GroupRestored, LoggedRecovery, Noted, Sampled
from raystate.train import endings, standby, telling
from raystate.train import result as result_module
from raystate.train.callback import Outcome
from raystate.train.policy import Ending, RetryPolicy, pinned_nodes, signature_of
from raystate.train.result import recoveries, run_result

FAILED = Ending(kind="failed", cause="the process of rank 1 died", rank=1)
INTERRUPTED = Ending(kind="interrupted", cause="rank 0 raised Interrupted")
WAITING = Ending(kind="waiting", cause="no room yet for 2 workers")
FINAL = Ending(kind="final", cause="rank 0 raised StaleAttemptError")


def _raised(message: str) -> Ending:
    return Ending(kind="failed", cause="rank 0 raised", rank=0, signature=signature_of(ValueError(message)))


def _run(max_failures: int, base: int | None, endings: Sequence[tuple[Ending, int | None]]) -> list[str | None]:
    """The policy's answers to endings, each with the newest step at that time."""
    policy = RetryPolicy(max_failures, start_limit_s=100.0)
    policy.started(lambda: base, 0.0)
    answers: list[str | None] = []
    for now, (ending, step) in enumerate(endings):
        answers.append(policy.ended(ending, lambda step=step: step, float(now)))
        policy.started(lambda step=step: step, float(now))
    return answers


def _failed(*steps: int) -> list[tuple[Ending, int | None]]:
    return [(FAILED, step) for step in steps]


X, Y = _raised("x"), _raised("y")
# limit, newest step at the start, endings with the newest step by then, answers (...: it gives up, in other words)
ANSWERS: dict[str, tuple[int, int | None, list[tuple[Ending, int | None]], list[Any]]] = {
    "too many without a new step": (
        3, -1, _failed(49, 49, 49, 49), [None] * 3 + ["3 failed starts in a row without a new step (newest step 49)"],
    ),
    "a new step starts the count again": (2, 10, _failed(10, 11, 11, 12, 12, 12), [None] * 5 + [...]),
    "steps after a rollback are new": (3, 0, _failed(1000, 500, 700, 900), [None] * 4),
    "none of them is new": (3, 0, _failed(1000, 500, 500, 500), [None] * 3 + [...]),
    "before the first step": (2, -1, _failed(-1, -1), [None, "2 failed starts in a row without a new step (no step yet)"]),
    "no failure is allowed": (0, 5, _failed(5), ["max_failures is 0"]),
    "not even with progress": (0, 5, _failed(9), ["max_failures is 0"]),
    "one is": (1, 5, _failed(5), ["1 failed start without a new step (newest step 5)"]),
    "one is, with progress": (1, 5, _failed(9), [None]),
    "it never gives up": (-1, 5, _failed(*[5] * 20), [None] * 20),
    "not even what repeats": (-1, 5, [(X, 5)] * 20, [None] * 20),
    "it repeats although each attempt gains a step": (
        3, 10, [(_raised(f"bad step {step}"), step) for step in (11, 12, 13)],
        [None, None, "3 starts in a row failed in the same way within 3 steps (newest step 13)"],
    ),
    "one failure repeats nothing": (1, 10, [(X, 11), (X, 12)], [None, ...]),
    "what differs does not repeat": (2, 10, [(X, 11), (Y, 12), (X, 13), (Y, 14), (X, 15)], [None] * 5),
    "nor what is far apart": (2, 10, [(X, 10 * number) for number in range(2, 12)], [None] * 10),
    "deaths can't be told apart": (2, 10, _failed(*range(11, 30)), [None] * 19),
    "a death between": (2, 10, [(X, 11), (FAILED, 12), (X, 13), (FAILED, 14), (X, 15)], [None] * 5),
    "an interruption between hides nothing": (2, 10, [(X, 11), (INTERRUPTED, 11), (X, 12)], [None, None, ...]),
    "interruptions do not count": (
        2, 5, [(INTERRUPTED, 5), (FAILED, 5), (INTERRUPTED, 5), (INTERRUPTED, 5), (FAILED, 5)], [None] * 4 + [...],
    ),
    "unknown progress is none": (2, None, [(FAILED, None)] * 2, [None, ...]),
    "what is final": (-1, 5, [(FINAL, 9)], ["trying again cannot help"]),
}  # fmt: skip


@pytest.mark.parametrize("case", ANSWERS)
def test_when_the_launcher_gives_up(case: str) -> None:
    limit, base, given, expected = ANSWERS[case]
    answers = _run(limit, base, given)
    assert [... if wanted is ... and answer else answer for answer, wanted in zip(answers, expected, strict=True)] == expected


def test_what_failed_before_another_kind_of_group_does_not_count() -> None:
    policy = RetryPolicy(2, start_limit_s=100.0)
    policy.started(lambda: 5, 0.0)
    failed = [policy.ended(_raised("the same"), lambda: 5, 1.0) for _ in range(2)]
    assert failed == [None, "2 failed starts in a row without a new step (newest step 5)"]
    policy.begin_again()
    assert policy.ended(_raised("the same"), lambda: 5, 2.0) is None
    assert policy.ended(_raised("the same"), lambda: 5, 3.0) is not None


def test_numbers_and_addresses_make_no_difference() -> None:
    first, second = (ValueError(f"loss 1.{n}e-5 is nan at step {n}: <object at 0x7f{n}>") for n in (1, 23))
    assert signature_of(first) == signature_of(second)
    assert signature_of(first) != signature_of(KeyError(str(first)))


def test_waiting_for_room_has_a_deadline_and_does_not_count() -> None:
    policy = RetryPolicy(1, start_limit_s=100.0)
    assert [policy.ended(WAITING, lambda: 5, now) for now in (0.0, 50.0, 99.0)] == [None, None, None]
    assert policy.ended(WAITING, lambda: 5, 101.0) == "the workers could not be placed for 101 s"
    policy.started(lambda: 5, 102.0)
    assert policy.ended(WAITING, lambda: 5, 150.0) is None, "a start ends the wait"


def test_probes_are_waited_for_only_when_they_matter() -> None:
    looked: list[int] = []
    policy = RetryPolicy(3, start_limit_s=100.0)
    policy.started(lambda: looked.append(0) or 5, 0.0)
    for number in (1, 2):
        assert policy.ended(FAILED, lambda number=number: looked.append(number) or 5, 0.0) is None
    assert looked == []
    assert policy.ended(FAILED, lambda: looked.append(3) or 5, 0.0) is not None
    assert looked == [0, 1, 2, 3]


def test_ranks_stay_where_they_were() -> None:
    everywhere = frozenset("abc")
    assert pinned_nodes([], everywhere, 2) == [None, None]
    assert pinned_nodes(["a", "b"], everywhere, 2) == ["a", "b"]
    assert pinned_nodes(["a", "b"], frozenset("b"), 2) == [None, "b"]


def test_a_group_of_another_size_begins_on_the_nodes_that_stay() -> None:
    """What is restored lies there."""
    assert pinned_nodes(["a", "b"], frozenset("b"), 1) == ["b"]
    assert pinned_nodes(["a", "b"], frozenset("ab"), 1) == ["a"]
    assert pinned_nodes(["b"], frozenset("b"), 3) == ["b", None, None]
    assert pinned_nodes(["a", "b", "c"], frozenset("c"), 2) == ["c", None]


def test_a_rank_whose_node_is_gone_takes_a_process_that_waits() -> None:
    assert pinned_nodes(["a", "b"], frozenset("b"), 2, ["c", "d"]) == ["c", "b"]
    assert pinned_nodes(["a", "b", "a"], frozenset("b"), 3, ["c"]) == ["c", "b", None]
    assert pinned_nodes(["a"], frozenset("a"), 2, ["c"]) == ["a", "c"]


def test_processes_wait_where_a_rank_could_go(monkeypatch: pytest.MonkeyPatch) -> None:
    room, killed, prepared = {"c": 3, "d": 1, "e": 5, "f": 0}, list[str](), list[Any]()
    waits = standby.Standby("/runs/a", lambda _: None, lambda: room, prepared.append)

    def start(node: str, count: int) -> None:
        waits._waiting += [standby._Waiting(actor=None, node=node) for _ in range(count)]

    monkeypatch.setattr(waits, "_start", start)
    monkeypatch.setattr(standby, "_kill", lambda those: killed.extend(one.node for one in those))
    waits._own = Counter(a=2, b=1)
    for node, count in waits._own.items():
        start(node, count)
    waits._look_for_spares()
    assert waits.spares() == ["c", "c", "d"], "as many as one node's ranks, where there is room, on few nodes"
    waits._look_for_spares()
    assert prepared == [{"c", "d"}, {"c", "d"}], "told at each look"
    del room["c"]
    waits._look_for_spares()
    assert (waits.spares(), killed, prepared) == (["d", "e", "e"], ["c", "c"], [{"c", "d"}, {"c", "d"}, {"d", "e"}])


@pytest.mark.parametrize(
    ("answers", "at_s"),
    [
        ([2], 3.4),  # asked at 3, heard at the next look
        ([0, 1, 7], 4.0),
        ([None], 15.0),  # it hangs
        ([0] * 99, 15.0),  # it doesn't save
    ],
)
def test_processes_start_once_the_group_has_done_its_first_steps(
    monkeypatch: pytest.MonkeyPatch, answers: list[int | None], at_s: float
) -> None:
    asked: list[Any] = []
    trainer = SimpleNamespace(execute=SimpleNamespace(remote=lambda question: asked.append(question) or told[len(asked) - 1]))
    group = SimpleNamespace(get_workers=lambda: [SimpleNamespace(actor=trainer)])
    answered = SimpleNamespace(wait=lambda refs, timeout: ([ref for ref in refs if ref != "hangs"], []), get=lambda ref: ref)
    monkeypatch.setattr(standby, "ray", answered)
    told = ["hangs" if one is None else one for one in answers]
    waits = standby.Standby("/runs/a", lambda _: None, dict, lambda _: None)
    begun: list[float] = []
    monkeypatch.setattr(waits, "_begin", lambda *_: begun.append(now_s))
    waits.group_started(group, 0.0)
    for now_s in (fifth / 5 for fifth in range(100)):
        waits.tick(now_s)
        if begun:
            break
    assert len(begun) == 1 and begun[0] == pytest.approx(at_s, abs=0.21)
    assert set(asked) == {saves_so_far}


def test_a_smaller_group_takes_the_processes_that_wait_on_its_nodes() -> None:
    a, b, again = (standby._Waiting(actor=name, node=name[0]) for name in ("a", "b", "a2"))
    assert standby._match([a, b], ["b"]) == [b]
    assert standby._match([a, again, b], ["a", "b", "a"]) == [a, b, again]
    assert standby._match([a, b], ["a", "a"]) is None
    assert standby._match([a], ["a", "b"]) is None


def test_when_nobody_says_who_was_first_the_living_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one has raised says more than that another has died."""
    died, mine = End(rank=0, kind="missing", reason=""), raised(1, ValueError("mine"))
    callback = RayTrainCallback(StateConfig(storage="/runs/a", run="a"))
    callback._group.workers = ["of rank 0", "of rank 1"]
    monkeypatch.setattr(callback._group, "end_workers", lambda: None)
    monkeypatch.setattr(endings, "failures", lambda _: {0: died})
    leaving = iter([frozenset({HostId("a")}), frozenset[HostId]()])  # the second question is asked without time to look
    monkeypatch.setattr(endings, "told", lambda _hash, _group, seen, **_: Told(ends=tuple(seen.values()), leaving=next(leaving)))
    monkeypatch.setattr(endings, "late_failures", lambda _, failed, **how: {1: mine} if failed == {0} and how["once"] else {})
    callback.after_worker_group_poll_status(SimpleNamespace(worker_statuses={}))
    ending = endings.classify(TrainingFailedError(), callback._group.told)
    assert (ending.rank, str(ending.error)) == (1, "mine")
    assert callback._places.leaving_hosts == {"a"}


def test_the_coordinator_is_told_of_a_start_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has not heard of that group otherwise, and would count the next restart from the end before."""
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(telling, "not_started", lambda _, group, cause: told.append((group, cause)))
    callback = RayTrainCallback(StateConfig(storage="/runs/a", run="a"))
    callback._again(Ending(kind="waiting", cause="no room yet"))
    callback._group.name = "g2"
    for cause in ("the workers could not be started", "before the next group had a name"):
        callback._again(Ending(kind="failed", cause=cause))
    assert told == [("g2", "the workers could not be started")]


def noted(group: str, step: int, **more: Any) -> Noted:
    facts = {"tier": "memory", "seconds": 5.0, "steps_repeated": 1, "cause": "rank 1 died", **more}
    return Noted(1, 1, 0.0, LoggedRecovery(attempt=1, group=group, step=step, **facts))


def test_recoveries_are_joined_by_group() -> None:
    restarts = (
        Restart(start=2, group="g2", cause="died", seconds=3.0),
        Restart(start=3, group="g3", cause="told to", interrupted=True, seconds=4.0),
    )
    known = [noted("g3", 7)]
    first, second = recoveries(restarts, [noted("g1", 3), *known])
    assert (first.attempt, first.cause, first.step, first.seconds) == (2, "died", None, 3.0)
    assert (second.step, second.tier, second.seconds, second.steps_repeated, second.interrupted) == (7, "memory", 5.0, 1, True)
    failed = noted("g2", 6, seconds=2.0, steps_repeated=0, back=False)
    first, second = recoveries(restarts, [failed, *known])
    assert (first.step, first.seconds, second.seconds) == (6, 3.0, 5.0), "it made no step: to the training function"
    first, _ = recoveries(restarts, [noted("g2", -1, tier="", seconds=2.0, steps_repeated=0, back=False), *known])
    assert (first.step, first.tier, first.steps_repeated) == (None, "", None), "it ended before the step was settled"
    guessed = dataclasses.replace(restarts[1], is_known=False)
    assert [recovery.cause for recovery in recoveries([restarts[1], guessed], known)] == ["told to", "rank 1 died"]


def test_a_restart_that_no_coordinator_has_noted_is_told_by_what_its_groups_did() -> None:
    """The old group's Coordinator died with it; the report tells the same of it."""
    told = [
        (1, 10.0, Sampled(group="g1", step=1157, steps=1157)),
        (2, 30.0, GroupJoined(group="g2", world=2, ages={"function": 1.0})),
        (2, 36.0, GroupRestored(group="g2", step=1151, tier="peer")),
        (2, 36.5, Sampled(group="g2", step=1151)),
    ]
    lines = [Noted(attempt, number, at_s, what) for number, (attempt, at_s, what) in enumerate(told)]
    restart = Restart(start=2, group="g2", cause="the process of rank 0 died", seconds=15.5)
    (before,) = recoveries([restart], lines)
    assert (before.step, before.tier, before.seconds) == (1151, "peer", 15.5), "to the training function: it made no step"
    lines.append(Noted(2, 9, 38.0, Sampled(group="g2", step=1152, steps=1)))
    (found,) = recoveries([restart], lines)
    assert (found.cause, found.step, found.tier, found.steps_repeated) == ("the process of rank 0 died", 1151, "peer", 6)
    assert found.seconds == pytest.approx(15.5 + 1.0 + 8.0)
    start = life_of(lines).starts[-1]
    assert (start.step, start.tier, start.repeated) == (1151, "peer", 6)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({}, "it made no StateManager(), or never called save"),
        ({"step": -1}, "its StateManager's save was never called, or only for step 0"),
        ({"step": 0}, ""),
        ({"step": 3}, ""),
    ],
)
def test_a_training_that_saved_nothing_is_told(
    facts: dict[str, Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_module, "newest_step", lambda _: None)  # it asks Ray first
    outcome = Outcome("returned", facts)
    result = run_result(SimpleNamespace(return_value=outcome, metrics=None), StateConfig(storage=tmp_path / "run", run="a"))
    assert result.step == facts.get("step", -1)
    told = [record.getMessage() for record in caplog.records if "nothing was saved" in record.getMessage()]
    assert told == ([f"train_fn has returned and nothing was saved: {said}"] if said else [])


def test_a_run_that_a_script_keeps_beside_the_launched_one(tmp_path: Path) -> None:
    """Its steps and metrics are not the launch's result, and it is released with its own manager."""
    launched = StateConfig(storage=tmp_path / "run", run="a")
    context = LaunchContext(config=launched, group="g", rank=0, world=1, launch="l")
    assert is_launched(launched.replace(keep_last=7), context)
    assert not is_launched(StateConfig(storage=tmp_path / "side", run="a"), context)
    assert not is_launched(launched, None)


def test_what_a_failed_run_says_of_its_release() -> None:
    assert endings.release_text(StorageError("no room")) == "the run could not be released: StorageError: no room"


def test_check_world() -> None:
    launch_context.check_world(2, 2)
    with pytest.raises(ConfigError, match=r"JaxConfig\(use_gpu=True\).*JAX_PLATFORMS") as caught:
        launch_context.check_world(4, 1)
    assert (caught.value.expected, caught.value.got) == (4, 1)


def test_a_new_context_forgets_old_notes() -> None:
    launch_context.note(step=3)
    try:
        launch_context.set_context(LaunchContext(config=None, group="g", rank=0, world=1, launch="l"))
        assert launch_context.summary() == {}
        launch_context.note(step=4, metrics={})
        launch_context.note(step=5)
        assert launch_context.summary() == {"step": 5, "metrics": {}}
    finally:
        launch_context.set_context(None)
    assert launch_context.current() is None
