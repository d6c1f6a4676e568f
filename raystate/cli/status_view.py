"""A run as `raystate status` shows it: the same once and while it watches."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from raystate.cli.console import at_utc, count, size, span
from raystate.core.coordinator.context import step_text
from raystate.core.coordinator.slow_ranks import place
from raystate.core.formats.texts import duration, printable, with_machine
from raystate.observe.counted import MEMORY_CAP, MEMORY_USED
from raystate.observe.goodput import CAUSES
from raystate.observe.metrics import interval_s
from raystate.observe.status import HostStatus, RunReport, RunStatus
from raystate.waits import SAID_AGAIN_S, TOLD_AFTER_S

_HOSTS = 16  # rows of one run, while it is watched
_LINES = 6  # of its log
_STILL = 20  # steps that have not come
_NAMED = 0.001  # smaller shares of the time are not
_SLOW = 4  # ranks
_LABEL = 10  # columns
_OVERDUE = 2  # intervals of durable saves without one
_ANY = 10_000  # columns
_TABLE = 88  # columns that the table of hosts needs, without the names of their machines


@dataclass(frozen=True, slots=True, kw_only=True)
class Safety:
    """Whether a run is safe now, in a word, its colour, and what a loss would cost."""

    word: str
    style: str
    why: str


def safety(report: RunReport) -> Safety:
    """How much a loss would cost now."""
    run = report.status
    if report.problem:
        return Safety(word="NO ANSWER", style="bold red", why=report.problem)
    if run is None:
        return Safety(word="WAITS", style="yellow", why="another run uses its storage")
    if run.end != "open":
        return Safety(word="ENDS", style="cyan", why=run.end)
    if run.recovery != "idle":
        return Safety(word="RESTORES", style="yellow", why=run.recovery)
    best = max(run.memory_step, run.durable_step)
    if not run.training:
        text = f"no trainer is there; it goes on from step {step_text(best)}" if best >= 0 else "no trainer is there, and no step"
        return Safety(word="NO TRAINER", style="yellow", why=text)
    if run.newest_step < 0:
        return Safety(word="STARTS", style="cyan", why="no step has been saved yet")
    if best < 0:
        return Safety(
            word="NOT SAFE", style="bold red", why=f"if a rank dies, the run repeats all {count(run.newest_step, 'step')}"
        )
    why = f"if a rank dies, the run repeats {_loss(run, best)}; if all hosts are lost, {_loss(run, run.durable_step)}"
    # A step that is captured, one on its way, and one more that has begun since.
    behind = run.newest_step - best > 3 * max(1, run.snapshot_every) and _seconds(run, best) > TOLD_AFTER_S
    if run.snapshot_every and behind:
        return Safety(word="BEHIND", style="bold yellow", why=why)
    if run.steps_per_s and run.newest_age_s and run.newest_age_s > max(SAID_AGAIN_S, _STILL / run.steps_per_s):
        return Safety(word="NO STEPS", style="bold yellow", why=f"no step for {span(run.newest_age_s)}; {why}")
    if down := [_named(host) for host in run.hosts if not host.up]:
        return Safety(word="HOST DOWN", style="bold yellow", why=f"{why}; down: {', '.join(down[:4])}")
    if run.storage_problem:
        return Safety(word="STORAGE FAILS", style="bold yellow", why=why)
    if any(host.leaves_in_s is not None for host in run.hosts):
        return Safety(word="HOST LEAVES", style="yellow", why=why)
    if run.durable_step < 0:
        return Safety(word="MEMORY ONLY", style="yellow", why=why)
    return Safety(word="SAFE", style="bold green", why=why)


def _loss(run: RunStatus, step: int) -> str:
    steps = max(0, run.newest_step - max(0, step))
    if not steps:
        return "no step"
    step_s = run.step_s or (1 / run.steps_per_s if run.steps_per_s else 0.0)  # of late, else over the last minute
    seconds = f" ({span(steps * step_s)})" if step_s else ""
    return f"{count(steps, 'step')}{seconds}"


def _seconds(run: RunStatus, step: int) -> float:
    """The time from that step to the newest; inf: not known."""
    return (run.newest_step - step) / run.steps_per_s if run.steps_per_s else math.inf


def run_block(report: RunReport, *, full: bool, at_s: float | None = None) -> RenderableType:
    """All of a run.

    Args:
        report: its answer.
        full: each host, and no line of its log.
        at_s: when it answered, in seconds since 1970; None: now.
    """
    judged = safety(report)
    head = Text()
    head.append(printable(report.run or report.name), "bold")
    head.append(f"  {judged.word}", judged.style)
    head.append(f"  {printable(report.storage)}")
    lines: list[RenderableType] = [head, line("safe now?", printable(judged.why))]
    if report.status is not None:
        lines += _troubles(report.status, time.time() if at_s is None else at_s)
        lines += _about(report, report.status)
    if not full and report.said:
        told = [said.replace(f"raystate {report.run}: ", "", 1) for said in report.said[-_LINES:]]
        lines += [line("log" if not number else "", printable(said)) for number, said in enumerate(told)]
    if report.status is not None:  # the last: a low screen shows no more than its top
        hosts = report.status.hosts if full else report.status.hosts[:_HOSTS]
        if hosts:
            lines.append(_Hosts(hosts))
        if left := len(report.status.hosts) - len(hosts):
            lines.append(Text(f"and {count(left, 'host')} more"))
    return Group(*lines)


@dataclass(frozen=True, slots=True)
class _Fact:
    """Goes on under itself where the line ends; in a pipe it is one line."""

    label: str
    text: str
    style: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        label, text = Text(f"{self.label:<{_LABEL}}", "dim"), Text(self.text, self.style)
        if options.no_wrap:
            yield label + text
            return
        for number, row in enumerate(text.wrap(console, max(1, options.max_width - _LABEL), overflow="fold")):
            yield (Text(" " * _LABEL) if number else label) + row


def line(label: str, text: str, style: str = "") -> RenderableType:
    """A fact under its label."""
    return _Fact(label, text, style)


def _troubles(run: RunStatus, at_s: float) -> Iterator[RenderableType]:
    for host in run.hosts:
        if (in_s := host.leaves_in_s) is not None:
            by = at_utc(at_s + in_s)
            when = f"leaves by {by}, in {span(in_s)}" if in_s >= 0 else f"should have left by {by}, {span(-in_s)} ago"
            yield line("leaving", printable(f"host {_named(host)} {when}: {host.why_leaves}"), "yellow")
    if overdue := _overdue(run):
        yield line("overdue", overdue, "yellow")
    if run.storage_problem:
        yield line("storage", f"fails: {printable(run.storage_problem)}", "yellow")
    machines = {host.host: host.machine for host in run.hosts}
    for slow in run.slow[:_SLOW]:
        who = f"rank {slow.rank} (host {with_machine(slow.host, machines.get(slow.host, ''))})"
        text = (
            f"{who} takes {duration(slow.by_s)} a step longer than the others, {place(slow.section)}, since step {slow.since_step}"
        )
        yield line("slow", printable(text), "yellow")


def _overdue(run: RunStatus) -> str:
    """Of durable saves, by the run's own interval, which is a step at least; "": they come as they should."""
    every_s, age_s = interval_s(run), run.durable_age_s
    if every_s is None or age_s is None or not run.training or not run.steps_per_s or run.newest_step <= run.durable_step:
        return ""
    if age_s < _OVERDUE * max(every_s, 1 / run.steps_per_s):
        return ""
    return f"durable saves are overdue: no step has become durable for {span(age_s)}, and one is due every {span(every_s)}"


def _about(report: RunReport, run: RunStatus) -> Iterator[RenderableType]:
    owner = report.owner
    if run.training:
        whose = f": Ray job {owner.job_id}, pid {owner.pid} on node {owner.node[:8]}" if owner is not None else ""
        yield line("trains on", f"{count(run.world or 0, 'rank')}{whose}; attempt {run.attempt}")
    told = [
        f"{what} {step_text(step)}" + (f" ({span(age_s)} ago)" if age_s is not None and step >= 0 else "")
        for what, step, age_s in (
            ("newest", run.newest_step, run.newest_age_s),
            ("in memory", run.memory_step, run.snapshot_age_s),
            ("durable", run.durable_step, run.durable_age_s),
        )
    ]
    yield line("steps", ", ".join(told))
    if run.steps_per_s:
        rate = run.steps_per_s
        yield line("pace", f"{f'{rate:.3g} steps/s' if rate >= 0.1 else f'{span(1 / rate)} a step'} of late")
    if restarts := _restarts(run):
        yield line("restarts", restarts)
    if run.goodput:
        rest = sorted((share, cause) for cause, share in run.goodput if cause != "steps" and share >= _NAMED)[::-1]
        more = ", ".join(f"{CAUSES[cause].name} {share:.1%}" for share, cause in rest[:5])
        steps = f"{dict(run.goodput).get('steps', 0.0):.1%} since this attempt of the Coordinator began"
        yield line("goodput", f"{steps}; {more}" if more else steps)
    every = {0: "only of steps that become durable", 1: "every step"}.get(run.snapshot_every, f"every {run.snapshot_every} steps")
    costs = ""
    if run.step_s and run.snapshot_s is not None:
        costs = f": it costs {duration(run.snapshot_s)}, and a step takes {duration(run.step_s)}"
    yield line("snapshot", f"{every}{costs}")
    if run.save_every_s is not None:
        costs = f"it costs {duration(run.save_s)}" if run.save_s else "what it costs is not measured yet"
        yield line("saves", f"every {run.save_every_s:.0f} s: {costs}")
    far = {(one.what, one.step): f"; {text}" for one in report.going if (text := one.text())}
    for save in run.saves:
        tries = f", try {save.tries}" if save.tries > 1 else ""
        text = f"step {save.step}: {save.phase} for {save.since_s:.1f} s{tries}{far.get(('saving', save.step), '')}"
        yield line("saving", text)
    for one in report.going:
        if one.what == "restoring":
            yield line("restoring", f"step {one.step} for {span(one.since_s)}{far.get(('restoring', one.step), '')}")


def _restarts(run: RunStatus) -> str:
    """Of the trainers; a Coordinator that was replaced is told apart: they train on meanwhile. "": none."""
    found = [(*name.split("/")[1:], int(many)) for name, many in run.counts if name.startswith("recoveries/")]
    here = [(cause, tier, many) for cause, tier, many in found if cause != "coordinator"]
    ours = sum(many for _, _, many in here)
    each = ", ".join(f"{many} {cause}{'' if tier == 'none' else f' (from {tier})'}" for cause, tier, many in here) or "none of them"
    total, since = ours if run.restarts is None else run.restarts, f"since attempt {run.attempt} of the Coordinator began"
    told: list[str] = []
    if run.restarts is None and found:
        told.append(f"{total} of the trainers {since}" + (f": {each}" if ours else ""))
    elif total:
        told.append(f"{total} of the trainers: {each}" if total == ours else f"{total} of the trainers, {since}: {each}")
    elif found:
        told.append("none of the trainers")
    if len(here) < len(found):
        told.append(f"the Coordinator was replaced: this is its attempt {run.attempt}")
    return "; ".join(told)


@dataclass(frozen=True, slots=True)
class _Hosts:
    """A row each; where the screen is too narrow for them, a line each."""

    hosts: Sequence[HostStatus]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names_width = max(len(_named(host)) for host in self.hosts) - len("01234567")
        if not options.no_wrap and options.max_width < _TABLE + max(0, names_width):
            for host in self.hosts:
                machine = f"({printable(host.machine)}) " if host.machine else ""
                ranks = f"{'ranks' if len(host.ranks) > 1 else 'rank'} {_numbers(host.ranks)}; " if host.ranks else ""
                held = f"holds {_numbers(host.steps)} ({size(host.nbytes)})"
                yield line(host.host[:8], f"{machine}{ranks}{held}; {_heard(host)}", "" if host.up else "red")
            return
        table = Table(box=None, pad_edge=False, show_edge=False)
        for name in ("host", "ranks", "steps in memory", "", "reserved, of the cap", "heard of"):
            table.add_column(name, justify="left", overflow="fold")  # a name is not cut
        for host in self.hosts:
            heard = Text(_heard(host), "" if host.up else "red")
            table.add_row(Text(_named(host)), _numbers(host.ranks), _numbers(host.steps), size(host.nbytes), _memory(host), heard)
        in_pipe = options.no_wrap and not options.is_terminal  # where a row is one line
        yield from console.render(table, options.update(max_width=_ANY) if in_pipe else options)


def _named(host: HostStatus) -> str:
    return with_machine(host.host, host.machine)


def _heard(host: HostStatus) -> str:
    heard = f"{host.silent_s:.1f} s ago" if host.up else printable(host.why_down)
    return f"{heard}, leaving" if host.leaves_in_s is not None else heard


def _memory(host: HostStatus) -> str:
    counts = dict(host.counts)
    used, cap = counts.get(MEMORY_USED), counts.get(MEMORY_CAP)
    return f"{size(used)} of {size(cap)} ({used / cap:.0%})" if used is not None and cap else "-"


def _numbers(numbers: Sequence[int]) -> str:
    """ "1, 2, 5" or, of many, "1 … 900 (700)"."""
    if len(numbers) > 8:
        return f"{numbers[0]} … {numbers[-1]} ({len(numbers)})"
    return ", ".join(map(str, numbers)) or "-"


def runs_table(reports: Sequence[RunReport]) -> Table:
    """Many runs, a row each; those that are not safe first."""
    table = Table(box=None, pad_edge=False, show_edge=False)
    for name, justify in (
        ("run", "left"), ("now", "left"), ("newest", "right"), ("memory", "right"), ("durable", "right"), ("age", "right"),
        ("steps/s", "right"), ("saving", "left"), ("ranks", "right"),
    ):  # fmt: skip
        table.add_column(name, justify="right" if justify == "right" else "left", no_wrap=name != "run", overflow="fold")
    for report in sorted(reports, key=lambda one: (safety(one).word == "SAFE", one.run)):
        judged, run = safety(report), report.status
        word = Text(judged.word, judged.style)
        if run is None:
            table.add_row(printable(report.run or report.name), word)
            continue
        rate = f"{run.steps_per_s:.3g}" if run.steps_per_s else "-"
        steps = [step_text(step) for step in (run.newest_step, run.memory_step, run.durable_step)]
        saving = ", ".join(f"{one.step} {one.phase} {span(one.since_s)}" for one in run.saves[:2]) or "-"
        age = span(run.durable_age_s) if run.durable_age_s is not None else "-"
        table.add_row(printable(report.run), word, *steps, age, rate, saving, str(run.world or "-"))
    return table
