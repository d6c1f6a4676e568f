"""Who gets a run: decided from what its Coordinator has heard. Pure: neither Ray nor a clock."""

from __future__ import annotations

import dataclasses
import pickle
import threading
from typing import Any

import pytest
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN
from orbax.checkpoint.checkpoint_managers import save_decision_policy as save_policies
from ray import cloudpickle

import raystate
from raystate.actors.kept import check_travels
from raystate.core.formats.messages import (
    Advice,
    Advise,
    Answer,
    Ask,
    HostDown,
    HostId,
    HostReported,
    HostSummary,
    Joined,
    JoinReply,
    LeaveAsked,
    Staged,
    TrainerExited,
    TrainerWord,
)
from raystate.runtime.tenancy import Admission, Owner, Presence, admit, differences, in_use, occupancy, told_differences

HOST = HostId("a" * 56)
SCRIPT = Owner(job_id="01", node=HOST, launch="script", pid=7)
FIT = Owner(job_id="02", node=HOST, launch="fit", pid=8, launched=True)
OTHER = Owner(job_id="03", node=HOST, launch="other", pid=9)
CONFIG = raystate.StateConfig(storage="/runs/a", run="a", keep_last=1)


def joins(presence: Presence, now_s: float, lineage: str = "1.1.x", world: int = 1) -> None:
    for rank in range(world):
        ask = Ask(f"{lineage}-{rank}")
        presence.observe(Joined(ask=ask, group="g", rank=rank, world=world, host=HOST), now_s)
    for rank in range(world):
        reply = JoinReply(lineage=lineage, attempt=1, host_count=1, newest_step=-1)
        presence.observe(Answer(ask=Ask(f"{lineage}-{rank}"), reply=reply), now_s)


def reports(presence: Presence, now_s: float, *ranks: int, lineage: str = "1.1.x", held: int = -1) -> None:
    trainers = tuple(TrainerWord(rank=rank, world=2, lineage=lineage, newest_step=held) for rank in ranks)
    staged = () if held < 0 else (Staged(rank=0, world=1, lineage=lineage, step=held, layout="l", promised=False),)
    summary = HostSummary(host=HOST, incarnation="i", seq=int(now_s * 10), trainers=trainers, staged=staged)
    presence.observe(HostReported(summary=summary), now_s)


def exits(presence: Presence, now_s: float, rank: int = 0, *, clean: bool = False, lineage: str = "1.1.x") -> None:
    presence.observe(TrainerExited(host=HOST, lineage=lineage, rank=rank, clean=clean, reason="died"), now_s)


def admitted(owner: Owner, asking: Owner, presence: Presence, now_s: float, *, takeover: bool = False, owner_s: float = 0.0) -> Any:
    return admit(owner, asking, presence, config=CONFIG, owner_s=owner_s, now_s=now_s, takeover=takeover)


def test_a_trainer_is_alive_from_its_join_to_its_exit():
    presence = Presence()
    assert not presence.alive(0.0)
    joins(presence, 1.0)
    assert presence.alive(2.0), "it is about to connect to its HostActor"
    reports(presence, 3.0, 0)
    assert presence.alive(4.0)
    exits(presence, 5.0)
    assert not presence.alive(5.0)


@pytest.mark.parametrize("clean", [True, False])
def test_every_exit_counts_also_a_clean_one(clean: bool):
    """After `Interrupted` a plain script has detached on purpose: it was taken for alive until the run was idle for 15 minutes."""
    presence = Presence()
    joins(presence, 1.0)
    reports(presence, 2.0, 0)
    exits(presence, 3.0, clean=clean)
    assert occupancy(SCRIPT, presence, owner_s=0.0, now_s=3.0) == "free"


def test_a_trainer_that_never_connects_is_gone_once_its_host_does_not_list_it():
    presence = Presence()
    joins(presence, 1.0)
    reports(presence, 3.0)
    assert presence.alive(3.0), "the report may be from before it has connected"
    reports(presence, 7.0)
    assert not presence.alive(7.0)


def test_one_that_waits_for_the_other_ranks_is_alive_although_no_host_lists_it():
    presence = Presence()
    presence.observe(Joined(ask=Ask("1"), group="g", rank=0, world=2, host=HOST), 0.0)
    reports(presence, 30.0)
    assert presence.alive(30.0)
    assert not presence.alive(61.0)


def test_one_of_two_is_enough_and_silence_is_no_life():
    presence = Presence()
    joins(presence, 0.0, world=2)
    reports(presence, 1.0, 0, 1)
    exits(presence, 2.0, rank=1)
    assert presence.alive(2.0)
    assert not presence.alive(12.0), "its host has said nothing for more than 10 s"
    reports(presence, 13.0, 0)
    presence.observe(HostDown(host=HOST, reason="gone"), 14.0)
    assert not presence.alive(14.0)


def test_a_killed_script_frees_the_run_at_once_and_a_launcher_is_waited_for():
    presence = Presence()
    joins(presence, 1.0)
    reports(presence, 2.0, 0)
    for owner in (SCRIPT, FIT):
        refused = admitted(owner, OTHER, presence, 3.0)
        assert refused.failure.details["starting"] is False
        assert admitted(owner, OTHER, presence, 3.0, takeover=True) == Admission()
        assert admitted(owner, owner, presence, 3.0) == Admission()
    exits(presence, 100.0)
    assert admitted(SCRIPT, OTHER, presence, 100.0) == Admission()
    refused = admitted(FIT, OTHER, presence, 105.0)
    assert refused.failure.details["starting"] is True, "its launcher starts the next worker group"
    assert admitted(FIT, OTHER, presence, 111.0) == Admission()


def test_a_refusal_says_whose_reports_it_rests_on():
    """They may be older than the question: a script that was killed a moment ago was said to use its run."""
    presence = Presence()
    joins(presence, 1.0)
    assert admitted(SCRIPT, OTHER, presence, 1.5).rests_on == (), "no host has listed it: it waits for the other ranks"
    reports(presence, 2.0, 0)
    assert admitted(SCRIPT, OTHER, presence, 3.0).rests_on == (HOST,)
    sibling = dataclasses.replace(SCRIPT, job_id="09", pid=11)
    assert admitted(SCRIPT, sibling, presence, 3.0).rests_on == (), "it waits for this one: asking again would not help"
    exits(presence, 4.0)
    assert admitted(SCRIPT, OTHER, presence, 4.0) == Admission()
    assert admitted(FIT, OTHER, presence, 4.0).rests_on == (), "its launcher starts the next worker group"


def test_processes_of_one_jax_job_that_are_two_ray_jobs_are_told_how_to_be_one():
    """Each was told of a stranger, to end or to take over, and it was the other process of its own training."""
    presence = Presence()
    joins(presence, 1.0)
    sibling = dataclasses.replace(SCRIPT, job_id="09", pid=11)
    for known in (Presence(), presence):  # before and after the first has joined
        failure = admitted(SCRIPT, sibling, known, 2.0).failure
        assert failure.error == "RunInUseError"
        assert failure.message.startswith(
            "run 'a' on file:///runs/a is in use by Ray job 01 (pid 7 on node aaaaaaaa, last heard from"
        )
        assert "another process of this JAX job" in failure.message
        assert "docs/howto/launch.md" in failure.message
        assert not failure.details["starting"], "it would ask again until its deadline"
    again = dataclasses.replace(SCRIPT, job_id="09")  # the process has left Ray, and come back
    assert "JAX job" not in admitted(SCRIPT, again, presence, 2.0).failure.message
    assert "JAX job" not in admitted(SCRIPT, OTHER, presence, 2.0).failure.message


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
    presence = Presence()
    joins(presence, 1.0)
    exits(presence, 2.0)
    asking = dataclasses.replace(OTHER, config=CONFIG.replace(keep_last=None, host_memory="10%"))
    admission = admitted(SCRIPT, asking, presence, 100.0)
    assert admission.replaces
    assert admission.replaces == {"keep_last": (1, None), "host_memory": ("40%", "10%")}
    assert admitted(SCRIPT, dataclasses.replace(OTHER, config=CONFIG.replace()), presence, 100.0) == Admission()
    # The second rank of that launch asks the same Coordinator: it is told the same.
    assert admitted(asking, dataclasses.replace(asking, rank=1), presence, 100.0, owner_s=100.0).replaces


def test_the_processes_of_one_launch_have_one_configuration():
    presence = Presence()
    first = dataclasses.replace(FIT, config=CONFIG)
    second = dataclasses.replace(FIT, rank=1, config=CONFIG.replace(keep_last=3, save_every_steps=10))
    refused = admitted(first, second, presence, 1.0)
    assert refused.failure.error == "ConfigError"
    assert "keep_last is 1 there and 3 here" in refused.failure.message
    assert "save_every_steps is None there and 10 here" in refused.failure.message
    assert refused.failure.details["field"] == "save_every_steps"


def test_a_notebook_may_change_its_mind_between_two_managers():
    presence = Presence()
    joins(presence, 1.0)
    reports(presence, 2.0, 0)
    cell, edited = (dataclasses.replace(SCRIPT, config=config) for config in (CONFIG, CONFIG.replace(keep_last=7)))
    assert admitted(cell, edited, presence, 3.0).failure.error == "ConfigError", "the first is still open"
    exits(presence, 4.0, clean=True)
    assert admitted(cell, edited, presence, 5.0).replaces


def test_an_arena_that_holds_what_storage_does_not_have_is_not_left_behind():
    presence = Presence()
    reports(presence, 99.0, held=20)
    asking = dataclasses.replace(OTHER, config=CONFIG.replace(arena_dir="/mnt/hugepages"))
    refused = admitted(SCRIPT, asking, presence, 100.0)
    assert refused.failure.error == "ConfigError"
    assert "step 20 of run 'a' lies only in memory, in the system's shared memory" in refused.failure.message
    assert "the newest durable step is none" in refused.failure.message
    assert admitted(SCRIPT, asking, presence, 100.0, takeover=True).replaces
    presence.observe(Advise(host=HOST, advice=Advice(attempt=1, seq=1, lineage="", durable_step=20)), 101.0)
    assert admitted(SCRIPT, asking, presence, 102.0).replaces


@pytest.mark.parametrize(("gone", "after_s", "kept"), [(False, 30.0, True), (False, 90.0, False), (True, 1.0, False)])
def test_what_a_host_held_that_is_gone_for_good_keeps_nobody_out(gone: bool, after_s: float, kept: bool):
    """A node that is lost, or says nothing any more for long, leaves nothing."""
    presence = Presence()
    reports(presence, 1.0, held=20)
    if gone:
        presence.observe(HostDown(host=HOST, reason="died"), 2.0)
    asking = dataclasses.replace(OTHER, config=CONFIG.replace(arena_dir="/mnt/hugepages"))
    admission = admitted(SCRIPT, asking, presence, 1.0 + after_s, owner_s=-100.0)
    assert (admission.failure is not None) == kept


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
        presence = Presence()
        return admit(owner, asking, presence, config=old, owner_s=0.0, now_s=20.0, takeover=False)

    assert set(admission(dataclasses.replace(OTHER, config=new)).replaces) == {"keep_policy"}
    another = dataclasses.replace(SCRIPT, config=config([1, 2]))
    assert admission(another) == Admission(), "another process of the same launch"
    used = Presence()
    used.observe(Joined(ask=Ask("1"), group="g", rank=0, world=1, host=HOST), 1.0)
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
    presence = Presence()
    owner = dataclasses.replace(FIT, config=CONFIG)
    asking = dataclasses.replace(FIT, config=CONFIG.replace(keep_last=2))
    joins(presence, 1.0, world=2)
    reports(presence, 2.0, 0, 1)
    assert admitted(owner, asking, presence, 3.0).failure.error == "ConfigError", "they train with another one"
    presence.observe(LeaveAsked(ask=Ask("x"), lineage="1.1.x", rank=1), 4.0)
    refusal = admitted(owner, asking, presence, 5.0).failure
    assert refusal.error == "RunInUseError"
    assert refusal.details["starting"], "it asks again"
    joins(presence, 6.0, lineage="1.2.y", world=2)
    assert admitted(owner, asking, presence, 7.0).failure.error == "ConfigError"


def test_after_a_rollback_what_came_after_it_lies_only_in_memory():
    """It counted as durable, and a start with another `arena_dir` gave it up without a word."""
    presence = Presence()
    for seq, durable in ((1, 100), (2, 50)):
        presence.observe(Advise(host=HOST, advice=Advice(attempt=1, seq=seq, lineage="", durable_step=durable)), 100.0)
    reports(presence, 101.0, 0, held=80)
    assert presence.only_in_memory(102.0) == (80, 50)
