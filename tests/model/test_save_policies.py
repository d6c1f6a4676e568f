"""Orbax's save policies in whole runs without Ray: all ranks promise the same steps, whatever their clocks say and however fast they go."""

from __future__ import annotations

import datetime
import itertools
from typing import Any

import numpy as np
import pytest
from orbax.checkpoint import checkpoint_managers as cm
from orbax.checkpoint import options

import raystate
from raystate.orbax.save_policies import NAMES
from tests.model.world import ModelLink, Rank, World, state

STEPS = 24
STEP_S = 0.02


class Run:
    """Two ranks on two nodes, of which one takes three times as long in every wait, with clocks that have nothing in common."""

    def __init__(self, policy: Any, seed: int = 1, **config: Any):
        self.world = World(seed, ranks=2, nodes=2, paces=(1.0, 3.0), save_policy=policy, keep_last=None, **config)
        self.under_way: list[tuple[int, int]] = []  # (a step that was not durable yet, the one that was promised then)
        self.promised_s: list[float] = []  # when rank 0 was promised each

    def train(self, first: int = 1, last: int = STEPS, *, step_s: float = STEP_S, close: bool = True, every: int = 1) -> list[int]:
        """The steps for which save() returned True, the same on both ranks. They call it for multiples of `every`."""
        promised: list[list[int]] = [[], []]
        durable: list[int] = []

        def script(rank: Rank) -> None:
            manager = rank.open(f"from {first}")
            manager.restore(state(0))
            for step in range(first, last + 1):
                rank.rest(step_s)
                if step % every:
                    continue
                says, now_s = manager.should_save(step), self.world.now_s
                if manager.save(step, state(step)):
                    self.under_way += [(one, step) for one in promised[rank.number] if one not in manager.all_steps()]
                    promised[rank.number].append(step)
                    self.promised_s += [now_s] if rank.number == 0 else []
                else:
                    assert not says
            manager.wait_until_finished()
            durable[:] = manager.all_steps()
            if close:
                manager.close()

        ranks = [Rank(self.world, number, script) for number in range(2)]
        self.world.run(ranks)
        if not close:
            for rank in ranks:
                rank.kill()
        assert promised[0] == promised[1]
        assert set(promised[0]) <= set(durable)
        return promised[0]


@pytest.fixture(autouse=True)
def _clocks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelLink, "clock", lambda self: self.world.now_s + 5000.0 * self.rank.number)


def of_orbax(policy: Any) -> list[int]:
    """The steps at which Orbax's own loop would save."""

    class Info:
        metrics = None
        time = datetime.datetime.fromtimestamp(0, datetime.UTC)

        def __init__(self, step: int):
            self.step = step

    context = cm.DecisionContext(
        is_saving_in_progress=False, reached_preemption=False, multiprocessing_options=options.MultiprocessingOptions()
    )
    saved: list[Info] = []
    for step in range(1, STEPS + 1):
        if policy.should_save(Info(step), saved, context=context):
            saved.append(Info(step))
    return [info.step for info in saved]


BY_STEP = {
    "every n": cm.FixedIntervalPolicy(7),
    "given steps": cm.SpecificStepsPolicy({2, 3, 19, 1000}),
    "first": cm.InitialSavePolicy(),
    "preemption": cm.PreemptionCheckpointingPolicy(),
    "any of": cm.AnySavePolicy(
        [
            cm.AnySavePolicy([cm.InitialSavePolicy(), cm.FixedIntervalPolicy(10)]),
            cm.SpecificStepsPolicy([5]),
            cm.PreemptionCheckpointingPolicy(),
        ]
    ),
    "a range": cm.SpecificStepsPolicy(range(4, 10**12, 5)),
    "an array": cm.SpecificStepsPolicy(np.array([3, 9])),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_STEP)
def test_the_steps_of_a_policy_are_those_that_orbax_would_save(name: str):
    run = Run(BY_STEP[name])
    with run.world:
        assert run.train() == of_orbax(BY_STEP[name])


@pytest.mark.parametrize("every", [1, 7])
@pytest.mark.parametrize("seed", range(3))
def test_continuous_saves_are_agreed_on(seed: int, every: int):
    run = Run(cm.ContinuousCheckpointingPolicy(), seed, save_timeout_s=600.0)
    run.world.slow = True  # storage
    with run.world:
        often = run.train(last=60 * every, step_s=0.5 / every, every=every)
    assert len(often) >= 2, "as often as storage is free"
    assert not run.under_way, "never while a save is under way"


def test_continuous_saves_keep_their_interval():
    run = Run(cm.ContinuousCheckpointingPolicy(minimum_interval_secs=0.5))  # pyright: ignore[reportArgumentType] # seconds are seconds
    with run.world:
        promised = run.train(last=60)
    assert len(promised) >= 2
    assert all(b - a >= 0.5 / 2 for a, b in itertools.pairwise(run.promised_s)), "about half a second"


def test_a_run_that_has_a_step_saves_no_first_one_again():
    run = Run(cm.InitialSavePolicy())
    with run.world:
        assert run.train(1, 5, close=False) == [1]
        assert run.train(6, 9) == []


@pytest.mark.parametrize(
    ("policy", "again"),
    [
        (cm.InitialSavePolicy(), True),
        (cm.AnySavePolicy([cm.SpecificStepsPolicy([2]), cm.AnySavePolicy([cm.InitialSavePolicy()])]), True),
        (cm.SpecificStepsPolicy([1]), False),
    ],
    ids=["first", "any of", "given steps"],
)
def test_a_first_save_that_is_lost_is_made_later_and_a_given_step_is_not(policy: Any, again: bool):
    """Orbax's InitialSavePolicy asks for a save until one has been made; its SpecificStepsPolicy for these steps only."""
    run = Run(policy, save_timeout_s=60.0)
    promised: list[list[int]] = [[], []]
    durable: list[int] = []

    def script(rank: Rank) -> None:
        manager = rank.begin(state(0))
        run.world.storage.out = True
        for step in range(1, 201):
            rank.rest(0.2)
            if step == 100:
                run.world.storage.out = False
            if manager.save(step, state(step)):
                promised[rank.number].append(step)
        with pytest.raises(raystate.StorageError, match="step 1"):
            manager.wait_until_finished()
        durable[:] = manager.all_steps()
        manager.close()

    with run.world:
        run.world.play(script)
    assert promised[0] == promised[1]
    if again:
        assert durable == promised[0][-1:], "the first one that could be made, and no other"
        assert 2 < durable[0] < 200
    else:
        assert promised[0] == [1]
        assert durable == []


class Own(cm.FixedIntervalPolicy):
    """Somebody's own."""


class Moody:
    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        return True


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (Own(3), "Own is not one of Orbax's own policies"),
        (Moody(), r"Moody is not one of Orbax's own.*save\(step, state, force=…\)"),
        (cm.AnySavePolicy([cm.FixedIntervalPolicy(2), Moody()]), "Moody is not one"),
        (cm.FixedIntervalPolicy(0), "can't be asked: ZeroDivisionError"),
        (cm.SpecificStepsPolicy(3), "can't be asked: TypeError"),  # pyright: ignore[reportArgumentType]
        (cm.ContinuousCheckpointingPolicy(minimum_interval_secs=-1), "seconds >= 0"),
        (cm.FixedIntervalPolicy, "SaveDecisionPolicy object"),
        (cm.SpecificStepsPolicy(step for step in (1, 2)), "a range of steps, not a generator"),  # pyright: ignore[reportArgumentType]
        (cm.SpecificStepsPolicy({1: 2}.keys()), "not a dict_keys"),
        (cm.SpecificStepsPolicy(["1"]), "'1' is none"),
        (cm.SpecificStepsPolicy([5, True]), "True is none"),
        (cm.SpecificStepsPolicy([]), "never saves"),
        (cm.AnySavePolicy([]), "never saves"),
        (cm.AnySavePolicy([cm.InitialSavePolicy(), cm.AnySavePolicy([])]), "never saves"),
    ],
    ids=range(14),
)
def test_what_hosts_might_answer_differently_is_refused(policy: Any, said: str):
    with pytest.raises(raystate.ConfigError, match=said) as caught:
        raystate.StateConfig(storage="/nonexistent/lm", run="lm", save_policy=policy)
    assert caught.value.field == "save_policy"


def test_a_policy_decides_alone():
    with pytest.raises(raystate.ConfigError, match="save_every_steps = 5: save_policy decides alone"):
        raystate.StateConfig(storage="/nonexistent/lm", run="lm", save_policy=cm.FixedIntervalPolicy(3), save_every_steps=5)
    config = raystate.StateConfig(storage="/nonexistent/lm", run="lm", save_policy=cm.FixedIntervalPolicy(3))
    assert config.effective_save_every_s is None, "no automatic saves beside it"
    assert config.core_settings().save_every_s is None


def test_v1_has_the_same_classes():
    from orbax.checkpoint import v1

    theirs = v1.training.save_decision_policies
    names = [name for name in dir(theirs) if name.endswith("Policy") and name != "SaveDecisionPolicy"]
    assert sorted(names) == sorted(NAMES), "policies of a newer Orbax: raystate has to say what they mean"
    assert all(getattr(theirs, name) is getattr(cm, name) for name in names)
