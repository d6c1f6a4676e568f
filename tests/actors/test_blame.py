"""Who failed first, from what was told; and that an exception survives the way to the launcher."""

from __future__ import annotations

import dataclasses
import pickle
import secrets
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import pytest

import raystate
from raystate.actors.blame import check_sendable, pickles_anywhere, raised, unpacked
from raystate.core.formats.messages import HostId, RestoreChoice, RestoreTried, TrainerExited
from raystate.observe.ends import End, Ends, cause_of, first_to_fail, is_collateral
from raystate.observe.ledger import ledger as ledger_module
from raystate.observe.ledger.ledger import REMEMBERED_GROUPS, Ledger
from raystate.observe.ledger.lines import LoggedRecovery
from raystate.observe.ledger.reader import read_ledger
from raystate.storage.objects import ObjectStorage
from tests.core.driver import AB, Driver


def died(rank: int) -> End:
    return End(rank=rank, kind="died", reason=f"trainer rank {rank} died")


def ended(rank: int) -> End:
    return End(rank=rank, kind="ended", reason=f"trainer rank {rank} was ended")


def missing(rank: int) -> End:
    return End(rank=rank, kind="missing", reason=f"the process of rank {rank} died")


def gloo(rank: int) -> End:
    return raised(rank, ValueError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer"))


def rank_of(*ends: End) -> int | None:
    first = first_to_fail(ends)
    return None if first is None else first.rank


def test_the_first_counts_unless_raystate_ended_it():
    assert rank_of() is None
    assert rank_of(died(1), ended(0)) == 1
    assert rank_of(ended(0), died(1)) == 1, "the news of the end that followed was faster"
    assert rank_of(raised(1, KeyError("k")), ended(0)) == 1
    assert rank_of(raised(1, KeyError("k")), raised(0, KeyError("k"))) == 1


def test_rank_0_takes_the_others_with_it():
    assert rank_of(died(2), died(0), died(1)) == 0
    assert rank_of(died(2), ended(0), died(1)) == 2


def test_a_collective_that_fails_is_no_cause_while_there_is_another():
    assert rank_of(gloo(0), died(1)) == 1
    assert rank_of(gloo(0), raised(1, KeyError("k"))) == 1
    assert rank_of(gloo(0), ended(1)) == 0


def test_what_a_user_raises_from_such_an_error_is_one_too():
    def training() -> None:
        try:
            raise ValueError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer")
        except ValueError as error:
            raise RuntimeError("training has failed") from error

    with pytest.raises(RuntimeError) as caught:
        training()
    assert raised(0, caught.value).collateral
    assert not is_collateral(ValueError("bad learning rate"))


class Odd(Exception):  # noqa: N818 - as users name them
    """Pickles, and can't be made again."""

    def __init__(self, path: str, *, needed: int):
        super().__init__(f"{path} needs {needed}")


class Doubled(ValueError):  # noqa: N818
    """Pickles, and comes back with another text."""

    def __init__(self, needed: int):
        super().__init__(f"needs {needed}")


class Holds(OSError):  # noqa: N818
    """Can't be pickled, and has no text either."""

    def __init__(self) -> None:
        super().__init__(2, "gone")
        self.lock = threading.Lock()

    def __str__(self) -> str:
        return str(self.lock.fileno)  # pyright: ignore[reportAttributeAccessIssue] - a mistake of the user's


def a_tracer_error() -> Exception:
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        jax.jit(lambda x: -x if x else x)(1.0)
    return caught.value


@pytest.mark.parametrize("make", [a_tracer_error, lambda: Odd("a", needed=2), lambda: Doubled(3), Holds, lambda: KeyError("k")])
def test_an_exception_comes_by_type_and_text_over_any_number_of_processes(make: Callable[[], BaseException]) -> None:
    error = make()
    error.add_note("batch 7")
    here = pickles_anywhere(error)
    assert here is error
    for _ in range(3):  # worker, controller, driver
        here = pickle.loads(pickle.dumps(here))
        assert isinstance(here, type(error)) and type(here).__qualname__ == type(error).__qualname__
        assert "batch 7" in here.__notes__
        if not isinstance(error, Holds):
            assert str(here) == str(error)


def test_an_exception_whose_class_is_not_known_here_keeps_its_name_and_is_what_its_base_is(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("only_the_worker_has_it")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec("class Missing(KeyError):\n    pass", vars(module))
    end = raised(1, module.Missing("k"))
    monkeypatch.delitem(sys.modules, module.__name__)
    assert end.error is not None
    told = unpacked(end.error)
    assert isinstance(told, KeyError)
    assert f"{type(told).__module__}.{type(told).__qualname__}: {told}" == "only_the_worker_has_it.Missing: 'k'"
    assert "only_the_worker_has_it.Missing" in end.traceback


def test_what_cannot_be_sent_is_a_mistake_that_is_named() -> None:
    assert check_sendable({"loss": 1.5}) == {"loss": 1.5}
    with pytest.raises(raystate.ConfigError, match=r"the lock that train_fn has returned can't be sent .*'_thread.lock'"):
        check_sendable(threading.Lock())


def added(*those: End) -> list[tuple[int, str]]:
    ends = Ends()
    for one in those:
        ends.add(one)
    return [(end.rank, end.kind) for end in ends.in_order]


def test_the_first_word_of_a_rank_counts_unless_another_one_says_more():
    assert added(raised(1, KeyError("k")), ended(0), died(1)) == [(1, "raised"), (0, "ended")]
    assert added(died(1), ended(0), raised(0, KeyError("k"))) == [(1, "died"), (0, "raised")], "as its launcher sees it"
    assert added(missing(1), missing(2), died(2), died(1)) == [(2, "died"), (1, "died")], "in the order of the real news"


def test_which_of_several_that_are_missing_was_first_is_not_guessed():
    assert rank_of(missing(1), ended(0)) == 1, "the news of that one has not come"
    both = (missing(0), missing(1))
    assert rank_of(*both) is None
    assert cause_of(both) == "the processes of ranks 0 and 1 died; which of them was first is not known yet"
    assert cause_of(both, is_all=True) == "the process of rank 0 died", "nothing better will be known"
    assert rank_of(*both, raised(2, KeyError("k"))) == 2, "an exception kills no process, but what it led to may have"
    assert rank_of(gloo(0), missing(1)) == 1


def test_what_no_restart_can_help_comes_first_and_then_what_was_asked_for():
    final, stop = raised(2, raystate.ConfigError("bad")), raised(1, raystate.Interrupted("stop"))
    assert (rank_of(died(0), stop, final), rank_of(died(0), stop)) == (2, 1)
    assert cause_of((raised(0, OSError("disk full")), stop, gloo(2))) == "stop; rank 0 raised OSError: disk full"


# ---------------------------------------------------------------- the ledger


class Groups(Driver):
    """Worker groups of two ranks, each on a host of its own, that come and go; and the ledger that looks on."""

    def __init__(self, name: str):
        super().__init__()
        self.storage = ObjectStorage(f"memory://{name}-{secrets.token_hex(4)}")
        self.ledger = Ledger(self.storage, self.core)
        self.ledger.begin(1)

    def send(self, event: Any) -> list[Any]:
        commands = super().send(event)
        if "ledger" in vars(self):
            self.ledger.look(event, self.now_s)
        return commands

    def try_of(self, choice: RestoreChoice, rank: int, **more: Any) -> RestoreTried:
        return super().try_of(choice, rank, tier="memory", **more)

    def starts(self, number: int, now_s: float, *, restored_s: float | None = None) -> None:
        """A group joins, and restores, if it gets so far."""
        self.now_s = now_s
        self.join(AB, f"g{number}")
        if restored_s is not None:
            self.now_s = restored_s
            self.restore()

    def steps(self, step: int, now_s: float) -> None:
        """Each rank has made it."""
        self.now_s = now_s
        self.say(step)

    def end(self, rank: int, now_s: float, **more: Any) -> None:
        self.now_s = now_s
        self.seen[self.host_of[rank]] = []
        self.exits(rank, **more)

    @property
    def recoveries(self) -> list[LoggedRecovery]:
        return [one.what for one in self.ledger.news((-1, -1)) if isinstance(one.what, LoggedRecovery)]

    def told(self) -> list[tuple[str, str, float, int, bool]]:
        """(the group, why the one before it ended, seconds, steps repeated, whether it came back) of each restart."""
        return [(one.group, one.cause, one.seconds, one.steps_repeated, one.back) for one in self.recoveries]

    @property
    def kinds(self) -> list[tuple[int, str]]:
        """Of the ends of the first group."""
        return [(end.rank, end.kind) for end in self.ledger.ends("g1").ends]


def trained(name: str) -> Groups:
    """Group 1 has step 5 in memory, and has made step 7."""
    groups = Groups(name)
    groups.starts(1, 0.0, restored_s=0.0)
    groups.stage(5)
    groups.steps(7, 9.0)
    return groups


def trained_and_died(name: str) -> Groups:
    """The same, and it dies at 10 s."""
    groups = trained(name)
    groups.end(1, 10.0)
    groups.end(0, 10.5)
    return groups


def cause(groups: Groups) -> str:
    """What the ledger gives after another group has made a step."""
    groups.starts(2, 12.0, restored_s=13.0)
    groups.steps(6, 15.0)
    (recovery,) = groups.recoveries
    assert (recovery.group, recovery.step, recovery.tier) == ("g2", 5, "memory")
    return recovery.cause


def test_the_ledger_names_the_rank_that_died():
    groups = trained("l1")
    groups.end(1, 10.0)
    groups.end(0, 10.5, ended=True)
    assert cause(groups) == "the process of rank 1 died"
    groups = trained_and_died("l2")
    assert cause(groups) == "the process of rank 0 died", "jax has ended rank 1"
    assert groups.kinds == [(1, "died"), (0, "died")]
    assert groups.ledger.ends("g2").ends == ()


def test_who_was_ended_because_a_node_goes_away_has_not_failed():
    groups = trained("l6")
    groups.core.joins.end("the node of rank 1 goes away", announced=True)
    for rank in (0, 1):
        groups.end(rank, 10.0, ended=True, reason=f"trainer rank {rank} was ended")
    assert groups.kinds == [(0, "interrupted"), (1, "interrupted")]
    assert cause(groups) == "trainer rank 0 was ended"
    other = trained("l7")
    other.core.joins.end("the node of rank 1 goes away", announced=True)
    other.end(1, 10.0)
    other.end(0, 10.0, ended=True, reason="trainer rank 0 was ended")
    assert other.kinds == [(1, "died"), (0, "interrupted")]
    assert cause(other) == "trainer rank 0 was ended", "as its launcher counts it"


def test_what_only_the_launcher_has_seen_counts_too():
    groups = trained("l3")
    groups.ledger.seen("g1", [raised(1, KeyError("k"))], 9.5)  # outside of its StateManager
    groups.end(0, 10.0)
    assert cause(groups) == "rank 1 raised KeyError: 'k'"


def test_an_exception_is_told_before_the_exit():
    groups = trained("l4")
    groups.ledger.raised(groups.lineage, raised(1, KeyError("k")))
    groups.end(1, 10.0)
    groups.end(0, 10.0, ended=True)
    assert cause(groups) == "rank 1 raised KeyError: 'k'"


# ---------------------------------------------------------------- restarts that fail


def test_each_restart_counts_from_the_end_that_led_to_it() -> None:
    groups = trained_and_died("r1")
    groups.starts(2, 12.0, restored_s=13.0)
    groups.end(1, 15.0)
    groups.end(0, 15.5)
    groups.starts(3, 17.0, restored_s=18.0)
    groups.steps(6, 19.0)
    assert groups.told() == [
        ("g2", "the process of rank 0 died", 5.0, 0, False),
        ("g3", "the process of rank 0 died", 4.0, 2, True),
    ]
    assert [(one.step, one.tier) for one in groups.recoveries] == [(5, "memory")] * 2
    assert groups.ledger.restarts == 2
    groups.ledger.close()
    assert [one for _, one in read_ledger(groups.storage).recoveries] == groups.recoveries


def test_a_restart_that_ends_before_it_has_joined_is_one_too() -> None:
    """Only the launcher hears of it."""
    groups = trained_and_died("r2")
    groups.ledger.seen("g2", [End(rank=-1, kind="raised", reason="the workers could not be started")], 14.0)
    told = groups.ledger.ends("g2")
    assert (told.has_joined, told.is_all) == (False, True)
    groups.starts(3, 16.0, restored_s=17.0)
    groups.steps(8, 19.0)
    assert groups.told() == [
        ("g2", "the process of rank 0 died", 4.0, 0, False),
        ("g3", "the workers could not be started", 5.0, 2, True),
    ]
    assert (groups.recoveries[0].step, groups.recoveries[0].tier) == (-1, "")


def test_a_first_start_that_failed_is_no_end_of_the_run() -> None:
    groups = Groups("r8")
    groups.ledger.seen("g1", [raised(0, OSError("no data"))], 1.0)
    groups.starts(2, 2.0, restored_s=2.0)
    groups.steps(1, 3.0)
    assert groups.told() == []


def test_a_restart_with_nothing_to_restore_goes_on_from_step_0() -> None:
    groups = Groups("r9")
    groups.starts(1, 0.0, restored_s=0.0)
    groups.steps(3, 9.0)
    groups.end(1, 10.0)
    groups.end(0, 10.5)
    groups.starts(2, 12.0, restored_s=13.0)
    groups.steps(1, 14.0)
    assert [(one.step, one.steps_repeated) for one in groups.recoveries] == [(0, 3)]


def test_a_restart_with_nothing_left_to_do_is_known_when_all_have_closed() -> None:
    groups = trained_and_died("r10")
    last = groups.key(5)
    groups.starts(2, 12.0, restored_s=13.0)
    groups.leave(last, ranks=[0])
    assert groups.told() == []
    groups.now_s = 20.0
    groups.leave(last, ranks=[1])
    assert groups.told() == [("g2", "the process of rank 0 died", 3.0, 0, True)]
    assert [(one.step, one.tier) for one in groups.recoveries] == [(5, "memory")]


@pytest.mark.parametrize(("nice", "says"), [(15, True), (0, False)])
def test_many_steps_that_are_repeated_on_a_ray_of_low_priority_are_explained(
    nice: int, says: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ledger_module, "niceness", lambda: nice)
    groups = trained("r11")
    groups.steps(12, 9.5)
    groups.end(1, 10.0)
    groups.end(0, 10.5)
    with caplog.at_level("INFO", "raystate"):
        groups.starts(2, 12.0, restored_s=13.0)
        groups.steps(6, 15.0)
    assert groups.told() == [("g2", "the process of rank 0 died", 5.0, 7, True)]
    assert any("RAY_worker_niceness=0" in line for line in caplog.messages) == says


def test_a_restart_that_is_interrupted_before_a_new_step() -> None:
    groups = trained_and_died("r3")
    groups.starts(2, 12.0, restored_s=13.0)
    for rank in (0, 1):
        groups.end(rank, 14.0 + rank / 2, clean=True)
    groups.ledger.seen("g2", [raised(rank, raystate.Interrupted("the node of rank 1 goes away")) for rank in (0, 1)], 14.6)
    groups.starts(3, 17.0, restored_s=18.0)
    groups.steps(8, 20.0)
    assert groups.told() == [
        ("g2", "the process of rank 0 died", 4.0, 0, False),
        ("g3", "the node of rank 1 goes away", 6.0, 2, True),
    ]


def test_trainers_that_leave_and_come_back_are_a_restart_and_those_that_leave_for_good_are_none() -> None:
    groups = trained("r9")
    for rank in (0, 1):
        groups.end(rank, 10.0 + rank, clean=True)
    assert groups.ledger._open is None, "another group may come, or none"
    groups.starts(2, 12.0, restored_s=12.0)
    groups.release()
    groups.tick()
    groups.end(0, 13.0, ended=True)
    assert groups.told() == []
    assert groups.ledger._open is not None and groups.ledger._open.since_s == 10.0


def test_late_news_of_an_end_begins_no_restart() -> None:
    groups = trained_and_died("r4")
    groups.ledger.seen("g2", [raised(0, KeyError())], 12.0)  # faster than its own Joined
    groups.starts(2, 12.1, restored_s=12.1)
    groups.steps(6, 12.1)
    groups.end(0, 12.2)
    groups.send(TrainerExited(host=HostId("a"), lineage="1.2.g1", rank=0, clean=True, reason="left"))
    groups.starts(3, 13.0, restored_s=14.0)
    groups.steps(8, 15.0)
    groups.send(TrainerExited(host=HostId("b"), lineage="1.3.g2", rank=1, clean=False, reason="died"))
    assert groups.told() == [("g2", "the process of rank 0 died", 2.0, 0, False), ("g3", "rank 0 raised KeyError", 3.0, 2, True)]


def test_a_coordinator_that_is_new_in_the_midst_of_a_recovery_begins_it_with_the_ends_that_are_told_again() -> None:
    groups = Groups("r10")
    for rank, host in enumerate(AB):
        groups.send(TrainerExited(host=HostId(host), lineage="0.2.g1", rank=rank, clean=False, reason="died", ended=rank == 0))
    groups.starts(2, 102.0, restored_s=103.0)
    groups.steps(1, 104.0)
    assert groups.told() == [("g2", "the process of rank 1 died", 4.0, 0, True)]


def test_a_rank_that_its_launcher_ends_has_not_died_whichever_news_is_faster() -> None:
    groups = trained("r5")
    groups.ledger.seen("g1", [missing(1)], 9.9)
    assert not groups.ledger.ends("g1").is_all
    groups.ledger.sweeps("g1")
    groups.end(0, 10.0)
    groups.end(1, 10.5)
    assert groups.kinds == [(0, "ended"), (1, "died")]
    groups.ledger.seen("g1", [missing(1)], 10.6)  # as its launcher asks again
    assert groups.ledger.ends("g1").is_all
    groups.starts(2, 12.0, restored_s=13.0)
    groups.steps(8, 15.0)
    assert groups.told() == [("g2", "the process of rank 1 died", 5.1, 2, True)]


def test_ranks_that_hang_are_awaited_until_they_have_said_where_they_are() -> None:
    groups = Groups("r6")
    groups.core.settings = groups.core._context.settings = dataclasses.replace(groups.core.settings, hang_timeout_s=30.0)
    groups.starts(1, 0.0, restored_s=0.0)
    groups.steps(7, 9.0)
    groups.live(700.0)
    for rank in (0, 1):
        told = groups.ledger.ends("g1")
        assert told.hanging == set(range(rank, 2)) and not told.is_all
        groups.exits(rank, reason="no step", hung=True, stack=f"at {rank}")
    assert groups.ledger.ends("g1").is_all
    assert [(end.kind, end.traceback) for end in groups.ledger.ends("g1").ends] == [("hung", "at 0"), ("hung", "at 1")]


def test_what_a_group_of_long_ago_does_is_no_recovery_and_its_facts_are_forgotten() -> None:
    groups = Groups("r7")
    for number in range(1, 31):
        groups.starts(number, 10.0 * number, restored_s=10.0 * number)
        groups.stage(number)
        groups.end(0, 10.0 * number + 2)
        groups.ledger.seen(f"g{number}", [missing(0)], 10.0 * number + 3)
    groups.starts(31, 310.0, restored_s=310.0)
    groups.send(TrainerExited(host=HostId("a"), lineage="1.2.g1", rank=0, clean=False, reason="died"))  # a node that was cut off
    assert [one.group for one in groups.recoveries] == [f"g{number}" for number in range(2, 31)]
    groups.steps(32, 312.0)
    assert groups.told()[-1] == ("g31", "the process of rank 0 died", 10.0, 0, True)
    kept = [one for one in vars(groups.ledger).values() if isinstance(one, dict | set)]
    assert all(len(one) <= REMEMBERED_GROUPS for one in kept)
