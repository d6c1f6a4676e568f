"""The page of `raystate report` shows a run's ledger, in Chromium, too."""

from __future__ import annotations

import dataclasses
import random
import re
from pathlib import Path
from typing import Any

import pytest

from raystate.cli.report_events import Incident
from raystate.cli.report_facts import ReportContent, facts_of
from raystate.cli.report_life import Life, Period, life_of
from raystate.cli.report_page import render, render_slide
from raystate.cli.report_runs import render_runs
from raystate.cli.report_time import KINDS, goodput_section, parts_of, timeline_section
from raystate.observe.goodput import CAUSES, Goodput
from raystate.observe.ledger.lines import AttemptBegan, GroupJoined, RunLeft, Sampled, Slowed
from raystate.observe.timeline import Timeline
from tests.browser import Browser, browser, needs_browser
from tests.cli.made_run import AGES, BEGIN_S, Lines, made_lines, made_report
from tests.cli.transfers import raystate_command

PHONE, WIDE = 390, 1100


@pytest.fixture(scope="module")
def made() -> ReportContent:
    return made_report()


def goodput_of(made: ReportContent) -> Goodput:
    assert made.goodput is not None
    return made.goodput


def test_each_cause_has_a_name_a_colour_and_a_place(made: ReportContent) -> None:
    styles = (Path(render.__code__.co_filename).parent / "report.css.j2").read_text()
    slide = (Path(render.__code__.co_filename).parent / "report_slide.svg.j2").read_text()
    assert all(f".c-{cause}" in styles and f".c-{cause}" in slide for cause in CAUSES)
    parts = parts_of(goodput_of(made))
    assert sum(one.width for one in parts) == pytest.approx(100.0)
    assert [one.at for one in parts[1:]] == pytest.approx([one.at + one.width for one in parts[:-1]])
    section = goodput_section(goodput_of(made), made.timeline)
    assert sum(row["seconds"] for row in section["rows"]) == pytest.approx(goodput_of(made).wall_s)
    assert all(sum(one.share for one in column["parts"]) == pytest.approx(1.0) for column in section["columns"])


def test_what_happened_is_told_in_the_order_of_time_however_the_lines_come() -> None:
    lines = made_lines()
    life = life_of(lines)
    random.Random(5).shuffle(lines)
    assert life_of(lines) == life
    told = [one.kind for one in life.moments]
    assert sorted({*told, "attempt"}) == sorted(KINDS), "each kind once; no attempt began after the end"
    assert [one.at_s for one in life.moments] == sorted(one.at_s for one in life.moments)
    assert [(one.label, one.text) for one in life.groups] == [
        ("8 ranks", "died: the process of rank 3 died: SIGKILL"), ("8 ranks", "hung: rank 2 made no step for 60 s"), ("12 ranks", ""),
    ]  # fmt: skip
    (slow,) = life.slow
    assert (slow.rank, slow.section, slow.by_s, slow.end_s is not None) == (5, "data", 0.113, True)


def test_a_start_is_cut_into_its_phases() -> None:
    first, second, third = life_of(made_lines()).starts
    assert list(first.phases) == ["hosts", "process", "function", "manager", "joined", "restored", "first step"]
    assert (first.why, first.world, first.step) == ("", 8, -1)
    known = {"hosts": 4.0, "process": 4.0, "function": 8.0, "manager": 5.0, "joined": 1.0, "restored": 3.0}
    assert {name: first.phases[name] for name in known} == pytest.approx(known)
    assert second.phases["noticed"] == pytest.approx(46 - 22 - (58 - 37.2))
    assert (second.step, second.tier, second.repeated, second.seconds) == (898, "memory", 2, 37.2)
    assert sum(second.phases.values()) == pytest.approx(second.seconds)
    assert (third.why, third.repeated, third.tier) == ("rank 2 made no step for 60 s", 0, "storage")


def test_a_process_that_was_there_before_its_group_takes_none_of_its_start() -> None:
    lines = Lines()
    lines.group(1, "g1", 30, step=-1, steps=60, step_s=0.5, world=2, tier="init")
    (joined,) = (one for one in lines.noted if isinstance(one.what, GroupJoined))
    early = joined._replace(what=dataclasses.replace(joined.what, ages=AGES | {"process": 500.0}))
    (start,) = life_of([early if one is joined else one for one in lines.noted]).starts
    assert (start.phases["process"], start.phases["function"]) == pytest.approx((0.0, 12.0))
    assert sum(start.phases.values()) == pytest.approx(start.seconds)


def test_a_rank_is_slow_until_the_end_of_each_of_its_sections() -> None:
    lines, slow = Lines(), {"rank": 1, "host": "h", "by_s": 0.2, "since_step": 7}
    lines.add(1, 0, Slowed(section="", **slow))
    lines.add(1, 5, Slowed(section="data", **slow))  # the section explains it from now on
    lines.add(1, 5, Slowed(section="", **slow, ends=True))
    lines.add(1, 9, Slowed(section="data", **slow, ends=True))
    assert [one.text for one in life_of(lines.noted).moments][:2] == [
        "by 200 ms a step before save()",
        "by 200 ms a step in section 'data'",
    ]
    assert [(one.section, one.begin_s - BEGIN_S, (one.end_s or 0) - BEGIN_S) for one in life_of(lines.noted).slow] == [
        ("", 0, 5), ("data", 5, 9),
    ]  # fmt: skip


def test_a_rank_is_slow_from_when_its_first_slow_step_was_done_not_from_when_it_was_named() -> None:
    lines = Lines()
    for at_s, step in ((0.0, 50), (10.0, 100), (20.0, 140), (30.0, 160)):
        lines.add(1, at_s, Sampled(group="g", step=step, steps=step))
    lines.add(1, 31.0, Slowed(rank=1, host="h", section="data", by_s=0.2, since_step=110))
    lines.add(1, 40.0, Sampled(group="g", step=180, steps=180))
    assert [one.begin_s - BEGIN_S for one in life_of(lines.noted).slow] == pytest.approx([12.5])


def test_a_new_use_of_the_run_is_no_restart_and_one_under_another_coordinator_is() -> None:
    lines = made_lines()
    third = max(one.attempt for one in lines) + 1
    again = Lines()
    again.add(third, 5000, AttemptBegan(reason="claimed after attempt 2"))
    again.group(third, "g4", 5030, step=3000, steps=60, step_s=0.4, world=12, tier="storage")
    assert [one.why for one in life_of([*lines, *again.noted]).starts][-1] == ""
    vanished = [one for one in lines if not isinstance(one.what, RunLeft)]
    last = life_of([*vanished, *again.noted]).starts[-1]
    assert (last.why, last.repeated) == ("not known", 58)


def test_requests_to_storage_are_those_of_all_attempts_whatever_line_got_lost(made: ReportContent) -> None:
    lines = made_lines()
    life = life_of(lines)
    groups = (15 * 9, 11 * 2, 25 * 9)  # the one in the middle came back from memory
    wrong = {"retries": 12, "failures": 2}
    assert life.requests == {"read": sum(groups), "write": 51 * 14 + 20, "list": 51, "delete": 51 * 4} | wrong
    steps, many = zip(*life.requested, strict=True)
    assert list(steps) == sorted(steps) and list(many) == sorted(many)
    assert many[-1] == sum(life.requests[kind] for kind in ("read", "write", "list", "delete"))
    kept = [one for one in lines if not isinstance(one.what, Sampled) or one.what.step % 120 == 0 or one.what.steps == 660]
    assert life_of(kept).requests == life.requests and len(kept) < len(lines)
    assert facts_of(made)["requests"] == life.requests
    page = render(made)
    for kind, told, each in (("write", "734", "29.4"), ("retries", "12", "0.5"), ("failures", "2", "0.1")):
        assert f'{kind}</td><td class="n" data-is="requests">{told}</td><td class="n" data-is="per durable step">{each}<' in page
    without = dataclasses.replace(made, life=dataclasses.replace(life, requests={}, requested=()))
    assert facts_of(without)["requests"] is None and "equests to storage" not in render(without)


def test_steps_are_drawn_as_they_were_trained_and_each_attempt_where_it_began(made: ReportContent) -> None:
    wide, _, _ = render(made).partition('<svg class="narrow"')
    drawing = wide[wide.index('<svg class="wide"') :]
    lines = re.findall(r'<polyline class="curve" points="([^"]+)"', drawing)
    assert [len(one.split()) for one in lines] == [len(one) for one in made.life.trained_by] and len(lines) > 2
    attempts = [float(x) for x in re.findall(r'<line class="attempt" x1="([\d.]+)"', drawing)]
    ends = [points[-1][0] for points in made.life.trained_by]
    last_x = [float(one.split()[-1].split(",")[0]) for one in lines]
    per_s = (last_x[1] - last_x[0]) / (ends[1] - ends[0])
    without_saves = render(dataclasses.replace(made, saves=()))
    assert len(re.findall(r'<polyline class="curve"', without_saves)) >= 2 * len(lines)
    assert attempts[0] == 70.0, "the run's first step comes later"
    assert attempts[1] == pytest.approx(last_x[0] + (made.life.attempts[1].begin_s - ends[0]) * per_s, abs=1.0)


def test_the_first_sentences_tell_how_long_storage_failed(made: ReportContent) -> None:
    assert "Storage failed, for 70.0 s in all." in render(made)
    fails = [one for one in made.life.moments if one.kind == "storage"]
    goes_on = dataclasses.replace(made.life, moments=tuple(fails), last_s=fails[0].at_s + 5.0)
    assert "Storage failed, for 5.0 s in all, and still fails." in render(dataclasses.replace(made, life=goes_on))


def test_marks_of_one_moment_lie_under_each_other() -> None:
    kinds = ("storage", "lost", "notice", "end")
    moments = [Incident(at_s=BEGIN_S + 500 + 0.1 * number, kind=kind, what=kind) for number, kind in enumerate(kinds)]
    later = Incident(at_s=BEGIN_S + 900, kind="end", what="the run ended")
    life = Life(groups=(Period(begin_s=BEGIN_S, end_s=BEGIN_S + 1000, label="group"),), moments=(*moments, later))
    section = timeline_section(life, None, [])
    assert section is not None
    (events,) = (one for one in section["lanes"] if one.name == "events")
    assert [one.row for one in events.marks] == [0, 1, 2, 3, 0] and events.rows == 4
    crowd = dataclasses.replace(life, moments=tuple(dataclasses.replace(later, at_s=BEGIN_S + number) for number in range(900)))
    (events,) = (one for one in (timeline_section(crowd, None, []) or {})["lanes"] if one.name == "events")
    assert events.rows == 5


def test_marks_lie_in_their_lanes_and_zooms_have_round_ticks(made: ReportContent) -> None:
    section = timeline_section(made.life, made.timeline, [(BEGIN_S + 100, 7, "live")])
    assert section is not None
    assert [one.name for one in section["lanes"]] == ["time went to", "attempts", "ranks", "events", "restores", "saves"]
    for lane in section["lanes"]:
        assert all(0 <= one.at <= 100 and one.at + one.width <= 100.001 for one in lane.marks), lane.name
    assert all(3 <= len(one) <= 12 * zoom for zoom, one in section["ticks"].items())
    assert timeline_section(Life(), Timeline(), []) is None
    many = [(BEGIN_S + number, number, "live") for number in range(10_000)]
    drawn = timeline_section(Life(), None, many)
    assert drawn is not None and drawn["lanes"][0].left == 9_000


def test_the_slide_shows_each_cause_and_is_one_svg(made: ReportContent, tmp_path: Path, capsys: Any) -> None:
    slide = render_slide(made)
    assert slide.startswith("<svg") and all(row["name"] in slide for row in goodput_section(goodput_of(made), None)["rows"])
    bare = render_slide(dataclasses.replace(made, goodput=None, timeline=None, life=Life()))
    assert "newest durable step" in bare
    png = pytest.importorskip("resvg_py", reason="resvg-py is an extra of raystate: raystate[png]")
    assert bytes(png.svg_to_bytes(svg_string=slide)).startswith(b"\x89PNG")
    code, _, complaint = raystate_command(capsys, "report", tmp_path, "--png", tmp_path / "no" / "slide.png")
    assert code == 2 and "--png: " in complaint


# ---------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


def check_calm(page: Path, shown: Browser) -> None:
    """It asked for nothing but itself, complained of nothing, is no wider than its window, and its pictures have names."""
    assert {*shown.requests} == {page.as_uri()}
    assert shown.complaints == []
    wide, window = shown.value("[document.documentElement.scrollWidth, window.innerWidth]")
    assert wide <= window, "the page scrolls sideways"
    nodes = shown.call("Accessibility.getFullAXTree")["nodes"]
    images = [one for one in nodes if one.get("role", {}).get("value") in ("image", "img") and not one.get("ignored")]
    assert images and all(one.get("name", {}).get("value") for one in images)


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(WIDE, False), (WIDE, True), (PHONE, False), (PHONE, True)])
def test_the_page_in_chromium(made: ReportContent, shown: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    page = tmp_path / "page.html"
    page.write_text(render(made))
    shown.open(page, width=width, dark=dark, phone=width == PHONE)
    check_calm(page, shown)
    rows = shown.value(
        "[...document.querySelectorAll('#causes tr[data-cause]')].map(row => [row.dataset.cause, +row.dataset.seconds])"
    )
    known = {cause: one for cause, one in goodput_of(made).seconds_by_cause.items() if one > 0}
    assert dict(rows) == pytest.approx(known, abs=1e-5)
    parts = shown.value("[...document.querySelector('.bar').children].map(part => part.getBoundingClientRect().width)")
    assert [one / sum(parts) for one in parts] == pytest.approx([one / goodput_of(made).wall_s for one in known.values()], abs=0.02)
    captions = "[...document.querySelectorAll('caption')].map(one => [one.clientWidth, one.parentElement.clientWidth])"
    assert all(wide > 0.9 * whole for wide, whole in shown.value(captions)), "a caption is squeezed into a column"
    text = shown.value("document.body.innerText")
    assert f"{100 * goodput_of(made).ratio:.1f} %" in text
    assert all(CAUSES[cause].name in text for cause in known), "no cause is told by its colour alone"
    low, high = (255 * 3 * share for share in (0.2, 0.9))
    light = sum(map(int, shown.value("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3)")))
    assert light < low if dark else light > high
    assert len(shown.picture()) > 20_000


@needs_browser
def test_the_timeline_zooms_without_a_script(made: ReportContent, shown: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(render(made))
    shown.open(page, width=PHONE, phone=True)
    widths = {}
    for zoom in (1, 4, 16, 64):
        shown.value(f"document.getElementById('zoom{zoom}').click()")
        widths[zoom] = shown.value("document.querySelector('.sheet').getBoundingClientRect().width")
        ticks = shown.value("[...document.querySelectorAll('.sheet .axis')].filter(one => one.clientHeight).length")
        assert ticks == 1
    assert [widths[zoom] / widths[1] for zoom in (4, 16, 64)] == pytest.approx([4, 16, 64])
    check_calm(page, shown)


@needs_browser
@pytest.mark.parametrize("width", [WIDE, PHONE])
def test_the_page_of_many_runs(made: ReportContent, shown: Browser, tmp_path: Path, width: int) -> None:
    page = tmp_path / "runs.html"
    reports = [made_report(f"gs://bucket/sweep/lr-{number}") for number in range(3)]
    broken = ReportContent(url="gs://bucket/sweep/broken", history=None, saves=(), problems=("its log is gone",))
    page.write_text(render_runs("gs://bucket/sweep", [*reports, broken]))
    shown.open(page, width=width, phone=width == PHONE)
    check_calm(page, shown)
    names = shown.value("[...document.querySelectorAll('#runs tbody b')].map(one => one.innerText)")
    assert sorted(names) == ["broken", "lr-0", "lr-1", "lr-2"]
    assert "its log is gone" in shown.value("document.body.innerText")
