"""Ranks that take longer than the others are found, with where and by how much; an even run has none."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest

from raystate.core.coordinator.clocks import HostClocks
from raystate.core.coordinator.slow_ranks import LATE, SAVE, WINDOWS, Key, OwnTimes, SlowRank, Streaks, excess
from raystate.core.formats.messages import HostId, HostReported, HostSummary, TrainerWord
from raystate.observe.ledger.lines import Line, Slowed
from raystate.observe.ledger.slow_ranks import SlowLines
from raystate.observe.pace import Pace
from raystate.observe.status import status_of
from tests.core.driver import Driver

REPORT_S = 0.05
STEP_S = 0.2


@dataclass
class Rank:
    """The sums of one process."""

    number: int
    host: str
    lived_s: float = 0.0
    steps: int = 0
    spent: dict[str, float] = field(default_factory=dict[str, float])
    reached: dict[int, float] = field(default_factory=dict[int, float])

    def word(self, lineage: str, world: int) -> TrainerWord:
        return TrainerWord(
            lineage=lineage, rank=self.number, world=world, number=self.steps + 1, newest_step=self.steps, steps=self.steps,
            lived_s=self.lived_s, spent=tuple(self.spent.items()), reached=tuple(self.reached.items())[-4:],
        )  # fmt: skip


class Training:
    """Ranks in virtual time, each on a host with a clock of its own. All leave a step's collective together.

    Args:
        data: rank, step -> seconds in its section "data"; likewise `save` (in save()) and `silent` (outside of all sections).
        runs_ahead: the ranks wait for each other in save(), where the state is copied, and not before it.
    """

    def __init__(
        self,
        seed: int,
        ranks: int,
        *,
        data: Callable[[int, int], float] = lambda *_: 0.005,
        save: Callable[[int, int], float] = lambda *_: 0.001,
        silent: Callable[[int, int], float] = lambda *_: 0.0,
        runs_ahead: bool = False,
        every: int = 1,
    ):
        self.rng = Random(seed)
        self.data, self.save, self.silent = data, save, silent
        self.runs_ahead, self.every = runs_ahead, every
        self.driver = Driver()
        self.driver.join([f"h{rank // 2}" for rank in range(ranks)])
        self.driver.restore()
        self.ranks = [Rank(rank, f"h{rank // 2}") for rank in range(ranks)]
        self.clocks = {one.host: self.rng.uniform(0, 1e6) for one in self.ranks}
        self.free_s = [self.driver.now_s] * ranks
        self.told_s = dict.fromkeys(self.clocks, self.driver.now_s)

    def run(self, steps: int) -> tuple[SlowRank, ...]:
        for _ in range(steps):
            self._step()
        return self.slow

    @property
    def slow(self) -> tuple[SlowRank, ...]:
        return status_of(self.driver.core, self.driver.now_s, Pace()).slow

    def _step(self) -> None:
        step = self.ranks[0].steps + 1
        noise = self.rng.lognormvariate
        computed_s = STEP_S * noise(0, 0.02)
        for rank, one in enumerate(self.ranks):
            data_s = self.data(rank, step)
            self.free_s[rank] += data_s + self.silent(rank, step)
            one.spent["section:data"] = one.spent.get("section:data", 0.0) + data_s
        begins_s = max(self.free_s)  # of the collective
        for rank, one in enumerate(self.ranks):
            enters_s = self.free_s[rank] if self.runs_ahead else begins_s + computed_s
            if step % self.every == 0:
                one.reached[step] = enters_s + self.clocks[one.host]
            leaves_s = max(enters_s, begins_s + computed_s) + (self.save(rank, step) if step % self.every == 0 else 0.0)
            one.spent["saves"] = one.spent.get("saves", 0.0) + leaves_s - enters_s
            self.free_s[rank] = leaves_s
            one.steps = step
            one.lived_s = leaves_s
        self._report(max(self.free_s))

    def _report(self, now_s: float) -> None:
        """Each host's report takes its time; it is heard of at the same time as the others', or later."""
        for host in self.clocks:
            if now_s - self.told_s[host] < REPORT_S:
                continue
            self.told_s[host] = now_s
            driver = self.driver
            driver.now_s = now_s + 0.001 + self.rng.expovariate(1 / 0.003)
            driver.seq[host] += 1
            words = tuple(one.word(driver.lineage, len(self.ranks)) for one in self.ranks if one.host == host)
            summary = HostSummary(
                host=HostId(host), incarnation=f"{host}i1", seq=driver.seq[host], trainers=words, clock_s=now_s + self.clocks[host]
            )
            driver.send(HostReported(summary=summary))


def noisy(rng: Random, seconds: float, *, often: float = 0.03, most: float = 30) -> float:
    """Heavy-tailed: now and then `most` times as long, and seldom a second."""
    draw = rng.random()
    if draw < 0.002:
        return rng.uniform(0.3, 2.0)
    return seconds * (rng.uniform(3, most) if draw < often else rng.lognormvariate(0, 0.4))


def even(seed: int, *, ranks: int, steps: int) -> Training:
    rng = Random(-seed - 1)
    training = Training(
        seed,
        ranks,
        data=lambda *_: noisy(rng, 0.01),
        save=lambda *_: noisy(rng, 0.004),
        silent=lambda *_: noisy(rng, 0.004),
        runs_ahead=bool(seed % 2),
        every=(1, 1, 5)[seed % 3],
    )
    training.run(steps)
    return training


def alarms(training: Training) -> list[str]:
    return [line for line in training.driver.lines if "the other ranks" in line]


def test_an_even_run_has_no_slow_rank():
    for seed in range(30):
        assert alarms(even(seed, ranks=(2, 3, 4, 8)[seed % 4], steps=200)) == [], seed


@pytest.mark.more
def test_a_thousand_even_runs_have_none():
    for seed in range(1000, 2000):
        assert alarms(even(seed, ranks=(2, 3, 4, 8)[seed % 4], steps=150)) == [], seed


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("delay_s", [0.05, 0.5])
def test_a_slow_section_is_found_with_its_size(ranks: int, runs_ahead: bool, delay_s: float):
    for seed in range(5):
        rng = Random(seed)

        def data(rank: int, step: int, rng: Random = rng) -> float:
            return noisy(rng, 0.005, often=0.01, most=10) + (delay_s if rank == 1 and 30 < step <= 400 else 0.0)

        training = Training(seed, ranks, data=data, runs_ahead=runs_ahead)
        assert training.run(30) == ()
        (found,) = training.run(250)
        assert (found.rank, found.host, found.section) == (1, "h0", "data")
        assert found.by_s == pytest.approx(delay_s, rel=0.05)
        assert 20 <= found.since_step <= 140
        assert training.run(250) == ()
        begun, ended = (line for line in training.driver.lines if "rank 1 (host h0)" in line)
        assert f"a step longer than the other ranks since step {found.since_step}, in section 'data'; a step takes" in begun
        assert ended.startswith("rank 1 (host h0) is as fast as the others in section 'data' again; from step")


def test_it_is_found_within_fifty_steps():
    training = Training(1, 2, data=lambda rank, step: 0.2 if rank == 1 and step > 30 else 0.005)
    assert training.run(30) == ()
    (found,) = training.run(50)
    assert found.rank == 1 and 25 <= found.since_step <= 35


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_rank_whose_saves_take_longer_is_found(ranks: int):
    for seed in range(5):
        training = Training(seed, ranks, save=lambda rank, _: 0.06 if rank == 0 else 0.001)
        (found,) = training.run(200)
        assert (found.rank, found.section) == (0, SAVE)
        assert found.by_s == pytest.approx(0.059, rel=0.05)


def test_a_section_named_as_save_hides_no_slow_save():
    """Both are `save()` to people, and count together."""
    training = Training(1, 4, save=lambda rank, _: 0.06 if rank == 0 else 0.001)
    for one in training.ranks:
        one.spent |= {"saves": 0.0, "section:save()": 0.0}
    (found,) = training.run(200)
    assert found.by_s == pytest.approx(0.059, rel=0.05)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_rank_that_comes_late_for_what_no_section_names_is_found(ranks: int):
    """The others wait for it in their save(): they are not slow there."""
    for seed in range(5):
        training = Training(seed, ranks, silent=lambda rank, _: 0.1 if rank == 1 else 0.0, runs_ahead=True)
        (found,) = training.run(200)
        assert (found.rank, found.section) == (1, LATE)
        assert found.by_s == pytest.approx(0.1, rel=0.05)
        (line,) = alarms(training)
        assert line.startswith("rank 1 (host h0) comes to save()") and "no section tells why" in line


def test_a_pause_now_and_then_is_no_slow_rank():
    """Rank 0 evaluates every fifty steps, for five steps' time."""
    training = Training(1, 4, data=lambda rank, step: 1.0 if rank == 0 and step % 50 == 0 else 0.005)
    assert training.run(500) == ()
    assert alarms(training) == []


def test_one_that_is_slow_again_and_again_is_told_of_seldom():
    training = Training(1, 2, data=lambda rank, step: 0.2 if rank == 1 and step // 150 % 2 else 0.005)
    training.run(1200)
    assert len(alarms(training)) == 4, "all of them"
    warnings = [one for one in training.driver.out if getattr(one, "level", "") == "warning"]
    assert len(warnings) == 1
    assert len([one for one in training.driver.out if getattr(one, "level", "") == "info" and "as fast" in one.text]) == 1


def test_the_ledger_is_told_when_each_begins_and_ends():
    training = Training(1, 2, data=lambda rank, step: 0.2 if rank == 1 and step < 200 else 0.005)
    noted: list[Line] = []
    lines = SlowLines(training.driver.core, noted.append)
    for _ in range(400):
        training.run(1)
        lines.look()
    begun, ended = noted
    assert isinstance(begun, Slowed) and isinstance(ended, Slowed)
    assert (begun.rank, begun.host, begun.section, begun.ends) == (1, "h0", "data", False)
    assert begun.machine == ended.machine == "machine-h0"
    assert begun.by_s == pytest.approx(0.195, rel=0.05)
    assert (ended.rank, ended.since_step, ended.ends) == (1, begun.since_step, True)


def test_a_new_group_begins_with_no_slow_rank():
    training = Training(1, 2, data=lambda rank, _: 0.1 if rank == 1 else 0.005)
    assert len(training.run(200)) == 1
    training.driver.join(["h0", "h0"], group="again")
    assert training.slow == ()


@pytest.mark.parametrize("values", [[1.0, 5.0], [1.0, 5.0, 2.0], [4.0, 4.0, 1.0, 9.0], [0.0] * 5, [3.0, 1.0, 2.0, 2.0, 8.0]])
def test_each_is_compared_with_the_median_of_the_others(values: list[float]):
    found = excess(dict(enumerate(values)), len(values))
    for rank, value in enumerate(values):
        others = values[:rank] + values[rank + 1 :]
        assert found[rank] == value - statistics.median_high(others)


def test_a_rank_without_a_value_has_none_of_it():
    values = {2: 1.0, 5: 0.0, 6: 3.0}
    whole = excess({rank: values.get(rank, 0.0) for rank in range(7)}, 7)
    assert excess(values, 7) == {rank: whole[rank] for rank in values}
    assert excess({0: 2.0}, 2) == {0: 2.0}


def test_names_that_only_one_rank_has_cost_nothing_for_the_others():
    """A thousand ranks with a name each took eight seconds of the Coordinator's thread, each second."""
    training = Training(1, 40)
    for rank in training.ranks:
        rank.spent[f"section:{rank.number}"] = 0.0
    training.run(40)
    group = training.driver.core.joins.group
    assert group is not None
    own = OwnTimes()
    own.begin(group, 0.0)
    training.run(20)
    found = own.spent(group)
    assert len(found) == 42 and sum(map(len, found.values())) == 2 * 40 + 40


def test_half_of_what_is_slow_ends_it():
    streaks, key = Streaks(), Key(1, "data")
    for window in range(WINDOWS):
        assert not streaks.slow
        begun, _ = streaks.judge({key: 0.3}, 0.1, 10 * window)
    assert begun == [key] and (streaks.slow[key].by_s, streaks.slow[key].since_step) == (0.3, 0)
    for _ in range(3 * WINDOWS):
        assert streaks.judge({key: 0.06}, 0.1, 200) == ([], []), "less than it takes to begin"
    ends = [streaks.judge({key: 0.04}, 0.1, 300) for _ in range(WINDOWS // 2 + 1)]
    assert ends[-1] == ([], [key])


def test_a_clock_is_known_by_its_quickest_report():
    clocks = HostClocks()
    host = HostId("a")
    for late_s in (0.5, 0.001, 0.3):
        clocks.heard(host, 100.0, 7100.0 + late_s)
    assert clocks.here(host, 50.0) == pytest.approx(7050.001)
