"""Who gets a run: decided from what its Coordinator has heard. Pure: neither Ray nor a clock."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
import threading
from concurrent.futures import Future
from typing import Any
from unittest import mock

import pytest
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN
from orbax.checkpoint.checkpoint_managers import save_decision_policy as save_policies
from ray import cloudpickle

import raystate
from raystate.actors.coordinator import CoordinatorActor
from raystate.actors.kv_store import check_travels
from raystate.core.coordinator.machine import Coordinator
from raystate.core.coordinator.tenancy import (
    Admission,
    Owner,
    Presence,
    admit,
    differences,
    in_use,
    occupancy,
    told_differences,
)
from raystate.core.formats.log import claim_entry
from raystate.core.formats.messages import (
    Answer,
    Ask,
    Claimed,
    Event,
    Failure,
    HostDown,
    HostId,
    HostReported,
    HostSummary,
    Joined,
    JoinReply,
    LeaveAsked,
    Settings,
    Staged,
    TrainerExited,
    TrainerWord,
)

HOST = HostId("a" * 56)
SCRIPT = Owner(job_id="01", node=HOST, launch="script", pid=7)
FIT = Owner(job_id="02", node=HOST, launch="fit", pid=8, launched=True)
OTHER = Owner(job_id="03", node=HOST, launch="other", pid=9)
CONFIG = raystate.StateConfig(storage="/runs/a", run="a", keep_last=1)


class Run:
    """A run's Coordinator, which hears of trainers on one host. Times are seconds of its clock."""

    def __init__(self) -> None:
        self.core = Coordinator(Settings(run="a", storage="s", replicas=0, host_timeout_s=1e6))
        self.lineage, self.asks = "", 0
        self.hears(Claimed(entry=claim_entry(None, "w", "a"), hosts=(), dead=()), 0.0)

    def hears(self, event: Event, now_s: float) -> None:
        for command in self.core.handle(event, now_s):
            if isinstance(command, Answer) and isinstance(command.reply, JoinReply):
                self.lineage = command.reply.lineage

    def joins(self, now_s: float, *ranks: int, world: int = 1, group: str = "g") -> None:
        for rank in ranks or range(world):
            self.asks += 1
            self.hears(Joined(ask=Ask(f"q{self.asks}"), group=group, rank=rank, world=world, host=HOST), now_s)

    def reports(self, now_s: float, *ranks: int, held: int = -1) -> None:
        trainers = tuple(TrainerWord(rank=rank, world=2, lineage=self.lineage, newest_step=held) for rank in ranks)
        staged = () if held < 0 else (Staged(rank=0, world=1, lineage="1.1.g", step=held, layout="l", promised=False),)
        summary = HostSummary(host=HOST, incarnation="i", seq=int(now_s * 10), trainers=trainers, staged=staged)
        self.hears(HostReported(summary=summary), now_s)

    def exits(self, now_s: float, rank: int = 0, *, clean: bool = False) -> None:
        self.hears(TrainerExited(host=HOST, lineage=self.lineage, rank=rank, clean=clean, reason="died"), now_s)

    def at(self, now_s: float) -> Presence:
        return self.core.presence(now_s)


def admitted(owner: Owner, asking: Owner, presence: Presence, now_s: float, *, takeover: bool = False, owner_s: float = 0.0) -> Any:
    return admit(owner, asking, presence, config=CONFIG, owner_s=owner_s, now_s=now_s, takeover=takeover)


def test_a_trainer_is_alive_from_its_join_to_its_exit():
    run = Run()
    assert not run.at(0.0).alive
    run.joins(1.0)
    assert run.at(2.0).alive, "it is about to connect to its HostActor"
    run.reports(3.0, 0)
    assert run.at(4.0).alive
    run.exits(5.0)
    assert not run.at(5.0).alive


@pytest.mark.parametrize("clean", [True, False])
def test_every_exit_counts_also_a_clean_one(clean: bool):
    """After `Interrupted` a plain script has detached on purpose: it was taken for alive until the run was idle for 15 minutes."""
    run = Run()
    run.joins(1.0)
    run.reports(2.0, 0)
    run.exits(3.0, clean=clean)
    assert occupancy(SCRIPT, run.at(3.0), owner_s=0.0, now_s=3.0) == "free"


def test_a_trainer_that_never_connects_is_gone_once_its_host_does_not_list_it():
    run = Run()
    run.joins(1.0)
    run.reports(3.0)
    assert run.at(3.0).alive, "the report may be from before it has connected"
    run.reports(7.0)
    assert not run.at(7.0).alive


def test_one_that_waits_for_the_other_ranks_is_alive_although_no_host_lists_it():
    run = Run()
    run.joins(0.0, 0, world=2)
    run.reports(30.0)
    assert run.at(30.0).alive
    assert not run.at(61.0).alive


def test_one_of_two_is_enough_and_silence_is_no_life():
    run = Run()
    run.joins(0.0, world=2)
    run.reports(1.0, 0, 1)
    run.exits(2.0, rank=1)
    assert run.at(2.0).alive
    assert not run.at(12.0).alive, "its host has said nothing for more than 10 s"
    run.reports(13.0, 0)
    run.hears(HostDown(host=HOST, reason="gone"), 14.0)
    assert not run.at(14.0).alive


def test_a_killed_script_frees_the_run_at_once_and_a_launcher_is_waited_for():
    run = Run()
    run.joins(1.0)
    run.reports(2.0, 0)
    for owner in (SCRIPT, FIT):
        refused = admitted(owner, OTHER, run.at(3.0), 3.0)
        assert refused.failure.details["starting"] is False
        assert admitted(owner, OTHER, run.at(3.0), 3.0, takeover=True) == Admission()
        assert admitted(owner, owner, run.at(3.0), 3.0) == Admission()
    run.exits(100.0)
    assert admitted(SCRIPT, OTHER, run.at(100.0), 100.0) == Admission()
    refused = admitted(FIT, OTHER, run.at(105.0), 105.0)
    assert refused.failure.details["starting"] is True, "its launcher starts the next worker group"
    assert admitted(FIT, OTHER, run.at(111.0), 111.0) == Admission()


def test_a_refusal_says_whose_reports_it_rests_on():
    """They may be older than the question: a script that was killed a moment ago was said to use its run."""
    run = Run()
    run.joins(1.0)
    assert admitted(SCRIPT, OTHER, run.at(1.5), 1.5).rests_on == (), "no host has listed it: it waits for the other ranks"
    run.reports(2.0, 0)
    assert admitted(SCRIPT, OTHER, run.at(3.0), 3.0).rests_on == (HOST,)
    sibling = dataclasses.replace(SCRIPT, job_id="09", pid=11)
    assert admitted(SCRIPT, sibling, run.at(3.0), 3.0).rests_on == (), "it waits for this one: asking again would not help"
    run.exits(4.0)
    assert admitted(SCRIPT, OTHER, run.at(4.0), 4.0) == Admission()
    assert admitted(FIT, OTHER, run.at(4.0), 4.0).rests_on == (), "its launcher starts the next worker group"


def test_processes_of_one_jax_job_that_are_two_ray_jobs_are_told_how_to_be_one():
    """Each was told of a stranger, to end or to take over, and it was the other process of its own training."""
    run = Run()
    run.joins(1.0)
    sibling = dataclasses.replace(SCRIPT, job_id="09", pid=11)
    for known in (Presence(), run.at(2.0)):  # before and after the first has joined
        failure = admitted(SCRIPT, sibling, known, 2.0).failure
        assert failure.error == "RunInUseError"
        assert failure.message.startswith(
            "run 'a' on file:///runs/a is in use by Ray job 01 (pid 7 on node aaaaaaaa, last heard from"
        )
        assert "another process of this JAX job" in failure.message
        assert "docs/howto/launch.md" in failure.message
        assert not failure.details["starting"], "it would ask again until its deadline"
    again = dataclasses.replace(SCRIPT, job_id="09")  # the process has left Ray, and come back
    assert "JAX job" not in admitted(SCRIPT, again, run.at(2.0), 2.0).failure.message
    assert "JAX job" not in admitted(SCRIPT, OTHER, run.at(2.0), 2.0).failure.message


def test_a_script_that_has_just_said_hello_and_not_joined_yet_is_starting():
    refused = admitted(SCRIPT, OTHER, Presence(), 5.0)
    assert refused.failure.details["starting"] is True
    assert admitted(SCRIPT, OTHER, Presence(), 11.0) == Admission()


def test_the_refusal_names_everything():
    failure = in_use(SCRIPT, "in use", age_s=12.3, storage="file:///runs/a", run="a")
    assert failure.message == (
        "run 'a' on file:///runs/a is in use by Ray job 01 (pid 7 on node aaaaaaaa, last heard from 12 s ago); "
        "end it, use another storage, or pass takeover=True to end it from here"
    )
    assert {failure.details[name] for name in ("run", "job_id", "node", "pid", "age_s")} == {"a", "01", HOST, 7, 12.3}
    other = in_use(SCRIPT, "in use", age_s=0.0, storage="file:///runs/a", run="a", asked_run="b")
    assert "run 'b' can't use file:///runs/a: run 'a' uses it, in Ray job 01 (pid 7" in other.message


# ---------------------------------------------------------------- configurations


def test_another_launch_gets_its_own_configuration():
    run = Run()
    run.joins(1.0)
    run.exits(2.0)
    asking = dataclasses.replace(OTHER, config=CONFIG.replace(keep_last=None, host_memory="10%"))
    admission = admitted(SCRIPT, asking, run.at(100.0), 100.0)
    assert admission.replaces
    assert admission.replaces == {"keep_last": (1, None), "host_memory": ("40%", "10%")}
    assert admitted(SCRIPT, dataclasses.replace(OTHER, config=CONFIG.replace()), run.at(100.0), 100.0) == Admission()
    # The second rank of that launch asks the same Coordinator: it is told the same.
    assert admitted(asking, dataclasses.replace(asking, rank=1), run.at(100.0), 100.0, owner_s=100.0).replaces


def test_the_processes_of_one_launch_have_one_configuration():
    run = Run()
    first = dataclasses.replace(FIT, config=CONFIG)
    second = dataclasses.replace(FIT, rank=1, config=CONFIG.replace(keep_last=3, save_every_steps=10))
    refused = admitted(first, second, run.at(1.0), 1.0)
    assert refused.failure.error == "ConfigError"
    assert "keep_last is 1 there and 3 here" in refused.failure.message
    assert "save_every_steps is None there and 10 here" in refused.failure.message
    assert refused.failure.details["field"] == "save_every_steps"


def test_a_notebook_may_change_its_mind_between_two_managers():
    run = Run()
    run.joins(1.0)
    run.reports(2.0, 0)
    cell, edited = (dataclasses.replace(SCRIPT, config=config) for config in (CONFIG, CONFIG.replace(keep_last=7)))
    assert admitted(cell, edited, run.at(3.0), 3.0).failure.error == "ConfigError", "the first is still open"
    run.exits(4.0, clean=True)
    assert admitted(cell, edited, run.at(5.0), 5.0).replaces


def test_an_arena_that_holds_what_storage_does_not_have_is_not_left_behind():
    run = Run()
    run.reports(99.0, held=20)
    held, asking = run.at(100.0), dataclasses.replace(OTHER, config=CONFIG.replace(arena_dir="/mnt/hugepages"))
    refused = admitted(SCRIPT, asking, held, 100.0)
    assert refused.failure.error == "ConfigError"
    assert "step 20 of run 'a' lies only in memory, in the system's shared memory" in refused.failure.message
    assert "the newest durable step is none" in refused.failure.message
    assert admitted(SCRIPT, asking, held, 100.0, takeover=True).replaces
    assert admitted(SCRIPT, asking, dataclasses.replace(held, durable_step=20), 100.0).replaces
    run.hears(HostDown(host=HOST, reason="died"), 101.0)
    assert admitted(SCRIPT, asking, run.at(101.0), 101.0).replaces, "what a lost host held keeps no launch out"


class Plain:
    """A policy of the user's, without an equality of its own."""

    def __init__(self, keep: int):
        self.keep = keep

    def should_preserve(self, *_: Any) -> list[bool]:
        return []


def travelled(policy: Any) -> raystate.StateConfig:
    """A configuration as the Coordinator gets it."""
    made = CONFIG.replace(keep_policy=policy, keep_last=None)
    return pickle.loads(cloudpickle.dumps(made))  # pyright: ignore[reportPrivateImportUsage]


def test_policies_of_one_launch_are_compared_by_what_they_hold() -> None:
    one, same, other = (CONFIG.replace(keep_policy=Plain(keep), keep_last=None) for keep in (1, 1, 2))
    assert differences(one, same, doubt=False) == {}
    assert set(differences(one, other, doubt=False)) == {"keep_policy"}
    assert differences(None, CONFIG, doubt=False) == {}


def test_another_launch_brings_its_own_policy_and_is_told_so_plainly() -> None:
    """Only an equality of its own says that a policy is the same: the code behind one that looks the same may be another."""
    one, same = (CONFIG.replace(keep_policy=Plain(1), keep_last=None) for _ in range(2))
    changed = differences(one, same, doubt=True)
    assert told_differences(changed) == "keep_policy is Plain(keep=1) of another launch, whose code may differ"
    equal = [CONFIG.replace(keep_policy=BestN(get_metric_fn=len, n=2), keep_last=None) for _ in range(2)]
    assert differences(*equal, doubt=True) == {}


def test_policies_that_differ_are_told_by_what_they_hold():
    """They were named by the addresses of two objects, which said that they differ and not how."""
    configs = [CONFIG.replace(keep_policy=Plain(keep), keep_last=None) for keep in (1, 2)]
    owner, asking = (dataclasses.replace(FIT, rank=rank, config=config) for rank, config in enumerate(configs))
    message = admitted(owner, asking, Presence(), 1.0).failure.message
    assert message.endswith("keep_policy is Plain(keep=1) there and Plain(keep=2) here")


def test_what_a_script_made_in_each_process_is_one_policy_within_a_launch_and_another_one_in_the_next() -> None:
    def config(keep: int, names: list[str]) -> raystate.StateConfig:
        class Mine(Plain):
            def again(self) -> Any:
                return super().should_preserve()

        mine: Any = Mine(keep)
        mine.names, mine.itself = set(names), mine
        return travelled(AnyPreservationPolicy([mine, BestN(get_metric_fn=lambda metrics: metrics["acc"], n=2)]))

    one = config(1, ["acc", "f1", "loss"])
    assert differences(one, config(1, ["loss", "f1", "acc"]), doubt=False) == {}
    assert set(differences(one, config(2, ["acc", "f1", "loss"]), doubt=False)) == {"keep_policy"}
    assert set(differences(one, config(1, ["acc", "f1", "loss"]), doubt=True)) == {"keep_policy"}


def test_a_script_that_was_edited_is_not_held_to_its_old_policy() -> None:
    """A helper, a list: what the policy only calls or reads looked the same, and the old one went on to remove steps."""

    def config(bounds: list[int]) -> raystate.StateConfig:
        class Mine(Plain):
            BOUNDS = bounds

            @staticmethod
            def best(metrics: Any) -> float:
                return metrics["acc"]

        mine: Any = Mine(1)
        return travelled(mine)

    old, new = config([1, 2]), config([3, 4])

    def admission(asking: Owner) -> Admission:
        owner = dataclasses.replace(SCRIPT, config=old)
        return admit(owner, asking, Presence(), config=old, owner_s=0.0, now_s=20.0, takeover=False)

    assert set(admission(dataclasses.replace(OTHER, config=new)).replaces) == {"keep_policy"}
    another = dataclasses.replace(SCRIPT, config=config([1, 2]))
    assert admission(another) == Admission(), "another process of the same launch"
    used = Presence(joined_s=1.0, heard_s=1.0)
    again = admit(dataclasses.replace(SCRIPT, config=old), another, used, config=old, owner_s=0.0, now_s=2000.0, takeover=False)
    assert set(again.replaces) == {"keep_policy"}, "a notebook whose cell was edited opens the run again"


def test_a_policy_that_cannot_travel_is_refused() -> None:
    """The Coordinator could not start, and who waited for it was told of a timeout."""
    policy = BestN(get_metric_fn=threading.Lock().acquire_lock, n=2)
    with pytest.raises(raystate.ConfigError, match="keep_policy must pickle") as caught:
        check_travels(raystate.StateConfig(storage="/runs/a", run="a", keep_policy=policy))
    assert caught.value.details["field"] == "keep_policy"


def test_orbax_policies_that_came_another_way_are_the_same():
    """Its InitialSavePolicy has no equality, and a policy that holds one has one that asks it."""

    def config(steps: list[int]) -> raystate.StateConfig:
        any_of = save_policies.AnySavePolicy([save_policies.InitialSavePolicy(), save_policies.SpecificStepsPolicy(steps)])
        return raystate.StateConfig(storage="/nonexistent/lm", run="lm", save_policy=any_of)

    here, there = config([7, 9]), pickle.loads(pickle.dumps(config([7, 9])))
    assert differences(here, there, doubt=False) == differences(there, pickle.loads(pickle.dumps(here)), doubt=False) == {}
    assert set(differences(config([7]), there, doubt=False)) == {"save_policy"}


def test_a_launch_may_open_again_with_another_configuration_while_some_of_its_ranks_still_close():
    run = Run()
    owner = dataclasses.replace(FIT, config=CONFIG)
    asking = dataclasses.replace(FIT, config=CONFIG.replace(keep_last=2))
    run.joins(1.0, world=2)
    run.reports(2.0, 0, 1)
    assert admitted(owner, asking, run.at(3.0), 3.0).failure.error == "ConfigError", "they train with another one"
    run.hears(LeaveAsked(ask=Ask("x"), lineage=run.lineage, rank=1, last=None, promised=(), word=0), 4.0)
    refusal = admitted(owner, asking, run.at(5.0), 5.0).failure
    assert refusal.error == "RunInUseError"
    assert refusal.details["starting"], "it asks again"
    run.joins(6.0, world=2, group="y")
    assert admitted(owner, asking, run.at(7.0), 7.0).failure.error == "ConfigError"


# ---------------------------------------------------------------- asking, all at once


class Service:
    """What `hello` asks of a Coordinator's loop: the run is free, and its log is there."""

    attempt, failed = 1, None

    def __init__(self, *, ended: bool = False):
        self.ended = ended

    def look(self, _: object) -> Future[Presence]:
        found = Future[Presence]()
        found.set_result(Presence())
        return found

    def why_log_is_gone(self) -> str:
        return ""


def coordinator(service: Service, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("raystate.actors.coordinator.show_to", lambda *_: None)
    actor: Any = object.__new__(CoordinatorActor)
    actor._config, actor._service, actor._owner, actor._owner_s = CONFIG, service, SCRIPT, 0.0
    actor._given_up, actor._kept_owner = "", mock.Mock()
    return actor


def test_of_two_that_ask_for_a_free_run_at_once_one_gets_it(monkeypatch: pytest.MonkeyPatch):
    actor = coordinator(Service(), monkeypatch)

    async def ask() -> list[Any]:
        return await asyncio.gather(
            actor.hello(OTHER, False), actor.hello(dataclasses.replace(OTHER, launch="third", pid=10), False)
        )

    answers = asyncio.run(ask())
    (refused,) = [one for one in answers if isinstance(one, Failure)]
    assert refused.error == "RunInUseError" and refused.details["starting"], "it asks again, and hears who has the run"
    assert actor._owner in (OTHER, dataclasses.replace(OTHER, launch="third", pid=10))


@pytest.mark.parametrize("asking", [SCRIPT, dataclasses.replace(SCRIPT, config=CONFIG.replace(keep_last=2)), OTHER])
def test_a_run_that_has_been_released_is_asked_for_again(asking: Owner, monkeypatch: pytest.MonkeyPatch):
    """A rank that opened it again with another configuration was refused for good."""
    answer = asyncio.run(coordinator(Service(ended=True), monkeypatch).hello(asking, False))
    assert isinstance(answer, Failure) and answer.details["starting"]
