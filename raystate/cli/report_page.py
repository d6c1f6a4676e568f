"""The page of `raystate report`: what is drawn where. The template says how it looks, and escapes every text."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2

from raystate import __version__
from raystate.cli.console import figure, size, span
from raystate.cli.report_axes import Axis, clock, moment, number
from raystate.cli.report_events import gathered, without_storage
from raystate.cli.report_facts import ReportContent, ReportedSave
from raystate.cli.report_life import PHASES, REQUESTS, Start
from raystate.cli.report_time import KINDS, goodput_section, phases_of, timeline_section
from raystate.core.coordinator.context import NAMED, named
from raystate.core.coordinator.slow_ranks import place
from raystate.core.formats.texts import brief, counted, duration, printable, with_machine
from raystate.observe.goodput import CAUSES

_LEFT, _BOTTOM, _TOP, _RIGHT = 70, 34, 14, 26
_WIDE, _SMALL = (940, 300), (460, 180)
_NARROW = (460, 260)  # the steps on a phone
_MOST_POINTS = 600  # in one drawing: it is no wider
_MOST_ROWS = 300  # of one table
_MOST_METRICS = 8


def render(report: ReportContent) -> str:
    """The page."""
    return environment().get_template("report.html.j2").render(_values(report))


def render_slide(report: ReportContent) -> str:
    """Its most important figures as an SVG of 1280 by 720, light, without a page around it."""
    return environment().get_template("report_slide.svg.j2").render(_values(report))


def _values(report: ReportContent) -> dict[str, Any]:
    history = report.history
    attempts = [] if history is None else list(history.attempts.items())[::-1]
    metrics, life = report.metrics(), report.life
    moments = gathered(life.moments)[::-1]
    how = {one.brief: one.text for one in life.attempts}
    durable = [(save.past.time_s, save.past.step, save.past.fate) for save in report.saves if save.past.time_s is not None]
    newest = max((save.past.step for save in report.saves if save.past.fate == "live"), default=None)
    return {
        "report": report,
        "version": __version__,
        "title": (history.run if history is not None else "") or report.url,
        "newest": newest,
        "kept": [save for save in report.saves if save.past.fate == "live"],
        "removed": [save for save in report.saves if save.past.fate == "retired"],
        "aside": [save for save in report.saves if save.past.fate == "set aside"],
        "nbytes": sum(save.nbytes or 0 for save in report.saves),
        "summary": _summary(report, newest),
        "steps": [one for form, size in {"wide": _WIDE, "narrow": _NARROW}.items() if (one := _steps_drawing(report, form, size))],
        "metrics": [_metric_drawing(name, points) for name, points in list(metrics.items())[:_MOST_METRICS]],
        "metrics_left": max(0, len(metrics) - _MOST_METRICS),
        "rows": list(reversed(report.saves))[:_MOST_ROWS],
        "rows_left": max(0, len(report.saves) - _MOST_ROWS),
        "restarts": list(reversed(report.restarts))[:_MOST_ROWS],
        "restarts_left": max(0, len(report.restarts) - _MOST_ROWS),
        "attempts": [(number, how.get(str(number), told)) for number, told in attempts[:_MOST_ROWS]],
        "where": goodput_section(report.goodput, report.timeline) if report.goodput is not None else None,
        "line": timeline_section(life, report.timeline, durable),
        "moments": moments[:_MOST_ROWS],
        "moments_left": max(0, len(moments) - _MOST_ROWS),
        "slow": life.slow[-_MOST_ROWS:],
        "starts": list(reversed(life.starts))[:_MOST_ROWS],
        "phases": PHASES,
        "storage": [one for one in (_growth_drawing(report), _requests_drawing(report)) if one is not None],
        "requests": _requests_rows(report),
        "width": 1280,
        "attempts_left": max(0, len(attempts) - _MOST_ROWS),
    }


@functools.cache
def environment() -> jinja2.Environment:
    """Of all templates here."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    made = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    made.filters |= {
        "size": size,
        "figure": figure,
        "counted": counted,
        "duration": duration,
        "span": span,
        "moment": moment,
        "plain": printable,
        "short": lambda cause: CAUSES[cause].name,
        "kind": lambda kind: KINDS[kind][1],
        "phases_of": phases_of,
        "place": place,
        "with_machine": with_machine,
    }
    made.globals["version"] = __version__
    made.finalize = lambda value: brief(printable(value)) if isinstance(value, str) and not hasattr(value, "__html__") else value
    return made


# ---------------------------------------------------------------- drawings


Point = tuple[float, float]  # wall clock, step


def _steps_drawing(report: ReportContent, form: str, size: tuple[int, int]) -> dict[str, Any] | None:
    """Steps over time: as they were trained, where the ledger has samples of them; None: neither they nor durable steps make a line."""
    width, height = size
    timed = [(save.past.time_s, save) for save in report.saves if save.past.time_s is not None]
    timed.sort(key=lambda one: one[0])
    thinned = _thinned(timed)
    restarts = report.restarts
    trained = _thinned_lines(report.life.trained_by)
    if not trained and len(timed) < 2:
        return None
    lines = trained or _lines(thinned, restarts)
    began_s = {one.brief: one.begin_s for one in report.life.attempts} or _first_saves(timed)
    times = [*(time_s for line in lines for time_s, _ in line), *(time_s for time_s, _ in timed), *list(began_s.values())[1:]]
    begin_s = min([*times, *(one.at_s - one.seconds for one in restarts)])
    end_s = max([*times, *(one.at_s for one in restarts)])
    x = Axis(low=begin_s, high=end_s, begin=_LEFT, end=width - _RIGHT)
    steps = [step for line in lines for _, step in line] + [save.past.step for _, save in thinned]
    top, low = max(steps), min(steps)
    y = Axis(low=min(low, top - 1), high=top, begin=height - _BOTTOM, end=_TOP)
    return {
        "form": form, "width": width, "height": height, "left": _LEFT, "right": width - _RIGHT, "top": _TOP, "bottom": height - _BOTTOM,
        "lines": [" ".join(f"{x.at(time_s)},{y.at(step)}" for time_s, step in line) for line in lines if len(line) > 1],
        "points": [{"x": x.at(time_s), "y": y.at(save.past.step), "save": save} for time_s, save in thinned],
        "bands": [
            {"x": x.at(one.at_s - one.seconds), "width": max(1.5, round(x.at(one.at_s) - x.at(one.at_s - one.seconds), 1)), "restart": one}
            for one in restarts[-_MOST_POINTS:]
        ],
        "attempts": [
            {"x": x.at(max(begin_s, at_s)), "number": number}  # the first began before there was a step
            for number, at_s in list(began_s.items())[-_MOST_ROWS:]
            if len(began_s) > 1
        ],
        "x_ticks": [{"x": x.at(at_s), "text": text} for at_s, text in clock(begin_s, end_s)],
        "y_ticks": [{"y": y.at(tick), "text": number(tick)} for tick in y.ticks() if tick == int(tick)],
        "thinned": len(thinned) < len(timed), "trained": bool(trained),
    }  # fmt: skip


def _lines(timed: Sequence[tuple[float, ReportedSave]], restarts: Sequence[Start]) -> list[list[Point]]:
    """The saves of each lineage; before a restart also the step that it had reached, after it the one from which it went on."""
    by_lineage: dict[tuple[int, str], list[Point]] = {}
    for time_s, save in timed:
        by_lineage.setdefault((save.past.attempt, save.past.lineage), []).append((time_s, float(save.past.step)))
    lines = list(by_lineage.values())
    for one in restarts:
        back_s, died_s = one.at_s, one.at_s - one.seconds
        if one.step < 0 or not one.back:
            continue
        before = max((line for line in lines if line[-1][0] <= died_s), key=lambda line: line[-1][0], default=[])
        after = min((line for line in lines if line[0][0] >= back_s), key=lambda line: line[0][0], default=[])
        if before:
            before.append((died_s, float(one.step + (one.repeated or 0))))
        if after:
            after.insert(0, (back_s, float(one.step)))
    return lines


def _metric_drawing(name: str, points: Sequence[tuple[int, float]], *, is_sum: bool = False) -> dict[str, Any]:
    width, height = _SMALL
    steps, values = [step for step, _ in points], [value for _, value in points]
    x = Axis(low=min(steps), high=max(steps), begin=_LEFT, end=width - _RIGHT)
    y = Axis(low=min(values), high=max(values), begin=height - _BOTTOM, end=_TOP)
    smallest, largest = min(points, key=lambda one: one[1]), max(points, key=lambda one: one[1])
    thinned = _thinned(list(points))
    return {
        "name": name, "width": width, "height": height, "left": _LEFT, "right": width - _RIGHT, "top": _TOP, "bottom": height - _BOTTOM,
        "line": " ".join(f"{x.at(step)},{y.at(value)}" for step, value in thinned),
        "dots": [(x.at(step), y.at(value)) for step, value in thinned] if len(thinned) <= 60 else [],
        "smallest": smallest, "largest": largest, "last": points[-1],
        "marks": [] if is_sum else [(x.at(step), y.at(value)) for step, value in (smallest, largest)], "is_sum": is_sum,
        "x_ticks": [{"x": x.at(tick), "text": number(tick)} for tick in x.ticks() if tick == int(tick)],
        "y_ticks": [{"y": y.at(tick), "text": number(tick)} for tick in y.ticks()],
    }  # fmt: skip


def _growth_drawing(report: ReportContent) -> dict[str, Any] | None:
    """Bytes that durable saves have written, all together, over the steps; None: the ledger knows of too few."""
    total, points = 0, list[tuple[int, float]]()
    for _, save in sorted(report.life.saves, key=lambda one: one[0]):
        total += save.nbytes
        points.append((save.step, float(total)))
    if len(points) < 2 or total <= 0:
        return None
    power = min(3, max(0, int(math.log2(total)) // 10 - 1))
    width, unit = 1 << (10 * (power + 1)), ("KiB", "MiB", "GiB", "TiB")[power]
    return _metric_drawing(
        f"{unit} written by durable saves, all together", [(step, one / width) for step, one in points], is_sum=True
    )


def _requests_drawing(report: ReportContent) -> dict[str, Any] | None:
    points = report.life.requested
    return _metric_drawing("requests to storage, all together", points, is_sum=True) if len(points) > 1 else None


def _requests_rows(report: ReportContent) -> list[dict[str, Any]]:
    """By kind, and those that went wrong; none: the ledger does not tell."""
    told, saves = report.life.requests, len(report.saves)
    rows = [(kind, told[kind], means) for kind, means in REQUESTS.items() if told.get(kind)]
    return [{"kind": kind, "many": many, "each": many / saves if saves else None, "means": means} for kind, many, means in rows]


def _thinned(points: list[Any]) -> list[Any]:
    """Of very many every so-many-th, and the last."""
    stride = max(1, math.ceil(len(points) / _MOST_POINTS))
    kept = points[::stride]
    return kept if not points or kept[-1] is points[-1] else [*kept, points[-1]]


def _thinned_lines(lines: Iterable[Sequence[Point]]) -> list[list[Point]]:
    """Those with a length, of very many points every so-many-th and each line's last."""
    drawn = [one for one in lines if len(one) > 1]
    stride = max(1, math.ceil(sum(map(len, drawn)) / _MOST_POINTS))
    return [[*one[:-1:stride], one[-1]] for one in drawn]


def _first_saves(timed: Iterable[tuple[float, ReportedSave]]) -> dict[str, float]:
    """By attempt, in the order of time: all that is known of when each began, where no ledger tells."""
    found: dict[str, float] = {}
    for time_s, save in timed:
        if save.past.attempt:
            found.setdefault(str(save.past.attempt), time_s)
    return found


# ---------------------------------------------------------------- words


def _summary(report: ReportContent, newest: int | None) -> str:
    """The run's story in a few sentences: whether it is safe comes first."""
    durable = f"step {newest:,} is the newest durable step" if newest is not None else "no step is durable"
    state = _state(report)
    told = [
        f"{state}; {durable}{_safety(report, newest)}." if state else f"{durable[0].upper()}{durable[1:]}{_safety(report, newest)}."
    ]
    restarts = report.restarts if report.history is not None else ()
    if restarts:
        took_s = sum(one.seconds for one in restarts)
        repeated = sum(max(0, one.repeated or 0) for one in restarts)
        last = restarts[-1]
        origin = f", the last from step {last.step:,} ({last.tier})" if last.tier and last.step >= 0 else ""
        told.append(f"{counted(len(restarts), 'restart')} took {span(took_s)} and repeated {counted(repeated, 'step')}{origin}.")
    elif report.history is not None:
        told.append("No restart was needed.")
    if outages := list(without_storage(report.life.moments)):
        last_s = report.life.last_s or 0.0
        sum_s = sum(max(0.0, (last_s if end is None else end.at_s) - begin_s) for begin_s, end in outages)
        still = "" if outages[-1][1] is not None else ", and still fails"
        told.append(f"Storage failed{f' {len(outages)} times' if len(outages) > 1 else ''}, for {span(sum_s)} in all{still}.")
    if gone := sum(one.kind == "coordinator" for one in report.life.moments):
        told.append(f"The Coordinator was lost and replaced{f' {gone} times' if gone > 1 else ''}.")
    for rank in sorted({one.rank for one in report.life.slow})[:NAMED]:
        costs = [one.cost_s for one in report.life.slow if one.rank == rank and one.cost_s is not None]
        told.append(f"Rank {rank} was slow{f', which cost about {span(sum(costs))}' if costs else ''}.")
    if report.problems:
        damaged = counted(len(report.problems), "thing that lies there is", "things that lie there are")
        told.append(f"{damaged} damaged.")
    return " ".join(told)


def _state(report: ReportContent) -> str:
    """How the run ended, or that it did not. "": no ledger tells."""
    life = report.life
    if life.last_s is None or report.history is None:
        return ""
    if life.left:
        return f"The run ended ({life.left})"
    return f"The run has not ended (its last word: {moment(life.last_s)})"


def _safety(report: ReportContent, newest: int | None) -> str:
    """Whether `save` had promised more than is durable."""
    lost = sorted({one.step for one in report.life.moments if one.kind == "lost"})
    floor = newest if newest is not None else -1
    gone = [step for step in lost if step > floor]
    if gone:
        after = f"the steps after {newest:,} are lost" if newest is not None else "all steps are lost"
        return f", and {after}: save() had promised {named([*map(str, gone)])}"
    if newest is None or report.life.last_s is None or report.history is None:
        return ""
    older = f": the {counted(len(lost), 'save that was', 'saves that were')} given up {_is(len(lost))} older" if lost else ""
    if not report.life.left and (more := report.life.trained - newest) > 0:
        return f", and no promised step after it is lost{older}; {counted(more, 'step')} after it {_is(more)} not durable yet"
    return f", and nothing is lost{older}"


def _is(many: int) -> str:
    return "is" if many == 1 else "are"
