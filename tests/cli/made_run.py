"""The report of a run that was never trained: of each kind of line that its ledger may have."""

from __future__ import annotations

from raystate.cli.report_facts import ReportContent, ReportedSave
from raystate.cli.report_life import life_of
from raystate.inspection.history import PastStep, RunHistory
from raystate.observe.goodput import goodput
from raystate.observe.ledger.lines import (
    AttemptBegan,
    GroupEnded,
    GroupJoined,
    GroupRestored,
    HostChanged,
    Hung,
    Line,
    LoggedRecovery,
    LoggedSave,
    Noted,
    Noticed,
    RunLeft,
    Sampled,
    SaveLost,
    Slowed,
    StorageChanged,
)
from raystate.observe.timeline import timeline_of

BEGIN_S = 1_800_000_000.0
AGES = {"asked": 22.0, "placed": 18.0, "process": 14.0, "function": 6.0, "manager": 1.0}


class Lines:
    """The lines of its Coordinators. Times are seconds since `BEGIN_S`."""

    def __init__(self) -> None:
        self.noted: list[Noted] = []
        self.requests: dict[int, dict[str, float]] = {}  # attempt -> to storage

    def add(self, attempt: int, at_s: float, what: Line) -> None:
        self.noted.append(Noted(attempt, len(self.noted), BEGIN_S + at_s, what))

    def asks(self, attempt: int, **more: float) -> dict[str, float]:
        """The requests of all processes to storage by then."""
        now = self.requests.setdefault(attempt, {})
        now |= {kind: now.get(kind, 0.0) + many for kind, many in more.items()}
        return dict(now)

    def group(self, attempt: int, name: str, at_s: float, *, step: int, steps: int, step_s: float, world: int, tier: str) -> float:
        """It joins, restores, and trains; when it has done its last step."""
        hosts = tuple(f"host{number}abcdef12" for number in range(world))
        self.add(attempt, at_s, GroupJoined(group=name, world=world, hosts=hosts, ages=AGES))
        self.add(attempt, at_s + 3, GroupRestored(group=name, step=step, tier=tier))
        now_s, spent = at_s + 12, {"restore": 3.0, "compilation": 7.0, "saves": 0.0, "section:data": 0.0}
        for done in range(60, steps + 1, 60):
            now_s += 60 * step_s * 1.03 + 2.1
            spent |= {"saves": spent["saves"] + 1.1, "section:data": spent["section:data"] + 1.0}
            many = self.asks(attempt, read=2 if tier == "memory" else 9, write=14, list=1, delete=4)
            sample = Sampled(
                group=name, step=max(step, 0) + done, steps=done, step_s=step_s, lived=now_s - at_s, spent=dict(spent), requests=many
            )  # fmt: skip
            self.add(attempt, now_s, sample)
        return now_s


def made_lines() -> list[Noted]:
    """Three groups of two attempts: a host is preempted, a rank hangs, the Coordinator is killed, the run grows."""
    lines = Lines()
    lines.add(1, 0, AttemptBegan(reason="claimed by a new launch", host="head-0"))
    end_s = lines.group(1, "g1", 30, step=-1, steps=900, step_s=0.5, world=8, tier="init")
    lines.add(1, end_s, Noticed(host="3f2a9c11bb", reason="maintenance of its host", within_s=30.0))
    lines.add(1, end_s + 20, HostChanged(host="3f2a9c11bb", state="down", why="its node is gone"))
    lines.add(1, end_s + 21, GroupEnded(group="g1", how="died", cause="the process of rank 3 died: SIGKILL"))
    back = LoggedRecovery(
        attempt=1, group="g2", cause="the process of rank 3 died: SIGKILL", step=898, tier="memory", seconds=37.2, steps_repeated=2
    )
    lines.add(1, end_s + 58, back)
    lines.asks(1, retries=11, failures=2)
    end_s = lines.group(1, "g2", end_s + 46, step=898, steps=660, step_s=0.5, world=8, tier="memory")
    lines.add(1, end_s - 200, Slowed(rank=5, host="77ab01cd", section="data", by_s=0.113, since_step=1320))
    lines.add(1, end_s - 80, Slowed(rank=5, host="77ab01cd", section="data", by_s=0.113, since_step=1320, ends=True))
    lines.add(1, end_s - 170, StorageChanged(works=False, why="it stands still, or is too slow"))
    lines.add(1, end_s - 100, StorageChanged(works=True))
    lines.add(1, end_s - 150, SaveLost(step=1400, why="storage stood still for 10 s"))
    lines.add(1, end_s, Hung(group="g2", ranks=(2,), section="data"))
    lines.add(1, end_s + 60, GroupEnded(group="g2", how="hung", cause="rank 2 made no step for 60 s"))
    lines.add(2, end_s + 200, AttemptBegan(reason="the Coordinator was killed, and began again", host="head-0"))
    end_s = lines.group(2, "g3", end_s + 240, step=1558, steps=1500, step_s=0.4, world=12, tier="storage")
    for number in range(1, 26):
        attempt = 1 if number < 13 else 2
        save = LoggedSave(
            attempt=attempt, step=number * 120, save=f"a{attempt}k{number}", seconds=4.2, writing_s=3.9, nbytes=3 << 30
        )
        lines.add(attempt, 60 + number * (end_s - 80) / 26, save)
    lines.add(2, end_s + 4, RunLeft(reason="all ranks have closed", closing_s=3.0, requests=lines.asks(2, write=20, retries=1)))
    return lines.noted


def made_report(url: str = "gs://bucket/experiments/lm-7b") -> ReportContent:
    """Its report."""
    lines = made_lines()
    timeline = timeline_of(lines)
    past = tuple(
        PastStep(
            step=one.what.step, save=one.what.save, attempt=one.attempt, time_s=one.t, lineage=f"{one.attempt}.1.x",
            metrics={"loss": 5 / one.what.step, "accuracy": 1 - 1 / one.what.step},
            fate="set aside" if one.what.step == 1080 else "live" if one.what.step > 2600 else "retired",
            why="a flipped bit" if one.what.step == 1080 else "keep_last=3",
        )
        for one in lines if isinstance(one.what, LoggedSave)
    )  # fmt: skip
    attempts = {1: "claimed by a new launch", 2: "the Coordinator was killed, and began again"}
    return ReportContent(
        url=url,
        history=RunHistory(run="lm-7b", entries=70, attempts=attempts, steps=past, damaged=()),
        saves=tuple(
            ReportedSave(past=one, seconds=4.2, writing_s=3.9, nbytes=3 << 30 if one.fate == "live" else None) for one in past
        ),
        recoveries=tuple((one.t, one.what) for one in lines if isinstance(one.what, LoggedRecovery)),
        goodput=goodput(timeline),
        timeline=timeline,
        life=life_of(lines),
    )
