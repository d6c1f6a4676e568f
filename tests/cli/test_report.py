"""raystate report: a run's story on one page, of runs that a manager saved, of plain Orbax, of damage, in a directory and a bucket."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from rich.progress import Progress

import raystate
from raystate.cli import report_facts
from raystate.cli.console import span
from raystate.cli.report_facts import ReportContent, ReportedSave
from raystate.cli.report_life import Life, life_of
from raystate.cli.report_page import Axis, render
from raystate.core.formats.names import SnapshotId
from raystate.inspection.history import PastStep, RunHistory, read_history
from raystate.observe.goodput import CAUSES
from raystate.observe.ledger.lines import EVENTS, LoggedRecovery, LoggedSave, Noted, batch_name, batch_of, line_of
from raystate.observe.ledger.reader import read_ledger
from raystate.storage import open_storage
from tests.browser import browser, needs_browser
from tests.cli.transfers import raystate_command
from tests.model.world import Rank, World
from tests.storage.backends import gcs_backend

HOSTILE = "<script>alert(1)</script>\x1b[31m"
CAUSE = f"rank 1 died: {HOSTILE}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 2, 4, … 12 of a run, of which it keeps three; step 8 was the best, and 12 is damaged later."""
    world = World(1, ranks=1, nodes=1, save_every_steps=2, keep_last=3)

    def script(rank: Rank) -> None:
        manager = rank.open("first")
        state = {"w": np.arange(6, dtype=np.float32)}
        manager.restore(state)
        for step in range(1, 13):
            metrics = {"loss": abs(8 - step) + 0.25, HOSTILE: float(step), "odd": math.nan}
            manager.save(step, state, metrics=metrics)
            manager.wait_until_finished()

    try:
        rank = Rank(world, 0, script)
        world.run([rank])
        rank.kill()
        assert world.coordinator is not None
        world.coordinator.ledger.close()
        root = tmp_path_factory.mktemp("report") / "run"
        shutil.copytree(open_storage(world.config.storage).local_path(""), root)
    finally:
        world.close()
    return root


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A copy, with a recovery in its ledger."""
    shutil.copytree(saved, tmp_path / "run")
    recovery = LoggedRecovery(attempt=1, group="g", cause=CAUSE, step=6, tier="memory", seconds=2.5, steps_repeated=1)
    when_s = (history := read_history(open_storage(tmp_path / "run"))) and history.steps[3].time_s
    event = {"kind": "recovery", "time_s": when_s, **dataclasses.asdict(recovery)}
    (tmp_path / "run" / EVENTS / "000001-0001.json").write_text(json.dumps(event))
    return tmp_path / "run"


class Page(html.parser.HTMLParser):
    """What a browser makes of it: tags, attributes and text."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.rows: list[list[str]] = []
        self._cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._cell = True

    def handle_endtag(self, tag: str) -> None:
        self._cell = self._cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._cell:
            self.rows[-1][-1] += data

    def of_class(self, name: str) -> list[dict[str, str | None]]:
        return [attrs for _, attrs in self.tags if name in (attrs.get("class") or "").split()]


def report(capsys: pytest.CaptureFixture[str], storage: object, out: Path, code: int = 0) -> Page:
    found, said, complained = raystate_command(capsys, "report", storage, "--out", out)
    assert found == code, complained
    assert str(out) in said or code == 2
    return Page(out.read_text())


def steps_of(page: Page) -> dict[int, list[str]]:
    return {int(row[0]): row for row in page.rows if len(row) == 8 and row[0].isdigit() and row[6].startswith(("a", "Orbax"))}


def test_a_run_is_told_on_one_page(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = report(capsys, run, tmp_path / "page.html")
    steps = steps_of(page)
    assert sorted(steps) == [2, 4, 6, 8, 10, 12]
    assert [step for step, row in steps.items() if row[7] == "kept"] == [12, 10, 8]
    assert all("removed: " in steps[step][7] and steps[step][4] == "-" for step in (2, 4, 6))
    on_disk = sum(path.stat().st_size for path in (run / "12").rglob("*") if path.is_file())
    assert steps[12][4] == f"{on_disk / 1024:.1f} KiB"
    ledger = read_ledger(open_storage(run))
    assert sorted(save.step for save in ledger.saves.values()) == [2, 4, 6, 8, 10, 12]
    assert all(re.fullmatch(r"[\d.]+ (ms|s)", row[2]) for row in steps.values()), "what the ledger says that each save took"
    written_s = {save.step: save.writing_s for save in ledger.saves.values()}
    assert {step: row[3] for step, row in steps.items()} == {step: span(one) if one else "-" for step, one in written_s.items()}
    code, out, _ = raystate_command(capsys, "report", run, "--json")
    assert code == 0 and {save["step"]: save["writing_s"] or 0.0 for save in json.loads(out)["saves"]} == written_s
    (recovery,) = [row for row in page.rows if "memory" in row]
    assert recovery[1:5] == ["2.5 s", "6", "memory", "1"]
    assert len(page.of_class("band")) == 2 and len(page.of_class("retired")) == 6, "drawn for a wide page and for a phone"
    assert "smallest 0.25 at step 8, largest 6.25 at step 2" in page.text
    assert "odd" not in page.text, "NaN is drawn nowhere"
    assert page.text.count("model") >= 2 and "1attempt\n" in page.text


def test_a_restart_that_failed_is_told_as_one(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    when_s = (history := read_history(open_storage(run))) and history.steps[3].time_s
    failed = LoggedRecovery(attempt=1, group="f", cause="lost", step=-1, tier="", seconds=1.5, steps_repeated=0, back=False)
    event = {"kind": "recovery", "time_s": (when_s or 0.0) - 2.5, **dataclasses.asdict(failed)}
    (run / EVENTS / "000001-0000.json").write_text(json.dumps(event))
    page = report(capsys, run, tmp_path / "page.html")
    (row,) = [row for row in page.rows if row[-1].startswith("lost")]
    assert row[1:] == ["1.5 s", "-", "-", "0", "lost; it ended again before a new step"]
    assert len(page.of_class("band")) == 4


def test_it_is_one_file_without_network_or_scripts_whatever_the_names(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = report(capsys, run, tmp_path / "page.html")
    tags = {tag for tag, _ in page.tags}
    assert tags.isdisjoint({"script", "link", "img", "iframe", "object", "base", "use", "image"})
    assert not [attrs for _, attrs in page.tags if any(name in ("src", "href") or name.startswith("on") for name in attrs)]
    shown = HOSTILE.replace("\x1b", r"\x1b")
    assert shown in page.text and f"rank 1 died: {shown}" in page.text
    raw = (tmp_path / "page.html").read_text()
    assert "<script" not in raw and "\x1b" not in raw and "http" not in raw.replace("http-equiv", "")


def test_every_point_lies_in_its_drawing(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = report(capsys, run, tmp_path / "page.html")
    drawn = 0
    width = height = 0.0
    for tag, attrs in page.tags:
        if "viewbox" in attrs:
            width, height = map(float, str(attrs["viewbox"]).split()[2:])
        for x, y in re.findall(r"([\d.]+),([\d.]+)", attrs.get("points") or ""):
            assert 0 <= float(x) <= width and 0 <= float(y) <= height
            drawn += 1
        if tag == "circle":
            assert 0 <= float(str(attrs["cx"])) <= (width or 940) and 0 <= float(str(attrs["cy"])) <= (height or 300)
    life = life_of(read_ledger(open_storage(run)).lines)
    trained = sum(map(len, life.trained_by))
    assert trained > 1
    assert drawn == 2 * trained + 6 * 3 + len(life.requested), "steps twice, two metrics, what was written, and requests for it"


@needs_browser
def test_the_page_has_the_numbers_of_the_accounting(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said, _ = raystate_command(capsys, "report", run, "--out", tmp_path / "page.html", "--json")
    facts = json.loads(said)
    assert code == 0 and sum(facts["seconds_by_cause"].values()) == pytest.approx(facts["wall_s"]) and facts["wall_s"] > 0
    with browser(tmp_path / "profile") as shown:
        shown.open(tmp_path / "page.html", width=1100)
        told = shown.value(
            "[...document.querySelectorAll('#causes tr[data-cause]')].map(row => [row.dataset.cause, +row.dataset.seconds])"
        )
        assert dict(told) == pytest.approx({cause: one for cause, one in facts["seconds_by_cause"].items() if one > 0}, abs=1e-5)
        assert f"{100 * facts['goodput']:.1f} %" in shown.value("document.body.innerText")
        assert (shown.requests, shown.complaints) == ([(tmp_path / "page.html").as_uri()], [])


def test_a_folder_of_runs_has_a_page_of_all(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "sweep"
    for name in ("a", "b"):
        shutil.copytree(run, folder / name)
    page = report(capsys, folder, tmp_path / "page.html")
    assert [row[0] for row in page.rows[1:]] in (["a", "b"], ["b", "a"]) and page.rows[1][1] == "12"
    code, said, _ = raystate_command(capsys, "report", folder, "--json")
    assert code == 0 and len(json.loads(said)["runs"]) == 2
    (folder / "b" / ".raystate/log/000000000003.json").write_text("{")
    assert "damaged" not in report(capsys, folder / "a", tmp_path / "page.html").text
    report(capsys, folder, tmp_path / "page.html", code=1)
    code, _, complaint = raystate_command(capsys, "report", folder, "--png", tmp_path / "slide.png")
    assert code == 2 and "--png shows one run" in complaint


def test_a_damaged_log_and_ledger_are_said(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = sorted((run / ".raystate/log").iterdir())
    entries[3].write_bytes(b"{")
    entries[5].unlink()
    (run / EVENTS / "000001-0002.json").write_text('{"kind": "recovery"')
    (run / EVENTS / "000001-0003.json").write_text('{"kind": "recovery", "attempt": "x"}')
    (run / "12/_CHECKPOINT_METADATA").write_text("{")
    page = report(capsys, run, tmp_path / "page.html", code=1)
    newer = batch_of(1, [b"{}"]).replace(b'"raystate_ledger":1', b'"raystate_ledger":2')
    (run / batch_name(1, 1000)).write_bytes(newer)
    (run / batch_name(1, 1001)).write_bytes(batch_of(1, [b'{"kind":"left"}', b'{"kind":"save","n":']))
    page = report(capsys, run, tmp_path / "page.html", code=1)
    told = "2 objects and 2 lines of the ledger can't be read", "1 object of the ledger was written by a newer raystate"
    for name in (entries[3].name, f"{entries[5].name}: is missing", "000001-0002.json", "000001-0003.json", "step 12: ", *told):
        assert name in page.text
    code, out, _ = raystate_command(capsys, "report", run, "--json")
    assert code == 1
    assert json.loads(out)["left_out"] == {"damaged_objects": 2, "damaged_lines": 2, "newer_objects": 1, "newer_lines": 0}
    assert sorted(steps_of(page)) == [2, 4, 6, 8, 10, 12], "what one entry told, others know too"


def test_a_set_aside_step_is_told_with_its_reason(tmp_path: Path) -> None:
    from raystate.core.formats.log import claim_entry, next_entry
    from raystate.core.formats.messages import LiveStep
    from raystate.storage import RunLog

    storage = open_storage(tmp_path / "run")
    log = RunLog(storage)
    entry = log.claim(lambda tail: claim_entry(tail, "w", "lm"))
    for step in (1, 2):
        live = LiveStep(step=step, save=f"a1k{step}", time_s=1000.0 + step)
        entry = next_entry(entry, attempt=1, writer="w", carried=(), dead=(), commit=live, reason="due")
        assert log.append(entry).outcome == "ok"
    entry = next_entry(entry, attempt=1, writer="w", carried=(), dead=(), retires=[(2, True, "a flipped bit")], reason="set aside")
    assert log.append(entry).outcome == "ok"
    history = read_history(storage)
    assert history is not None
    assert [(one.step, one.fate, one.why) for one in history.steps] == [(1, "live", ""), (2, "set aside", "a flipped bit")]


def test_what_orbax_alone_wrote_is_told_as_far_as_it_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ocp.CheckpointManager(tmp_path / "old") as manager:
        for step in (3, 7):
            manager.save(step, args=ocp.args.StandardSave({"w": np.ones(3)}), metrics={"loss": 1 / step})
    page = report(capsys, tmp_path / "old", tmp_path / "page.html")
    assert sorted(steps_of(page)) == [3, 7] and "There is no log of raystate here" in page.text
    assert "Goodput" not in page.text and "Recoveries" not in page.text


def test_one_checkpoint_has_a_page_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raystate.save(tmp_path / "one", {"w": np.ones(3)}, metrics={"loss": 0.5})
    assert "Fewer than two durable steps" in report(capsys, tmp_path / "one", tmp_path / "page.html").text


@pytest.mark.parametrize(
    ("storage", "out", "said"),
    [
        ("nowhere", "page.html", "nowhere"),
        ("notes", "page.html", "has no step"),
        ("run", "no/page.html", "--out"),
        ("run", ".", "--out"),
    ],
)
def test_what_cannot_be_told_is_a_sentence(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], storage: str, out: str, said: str
) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/notes.txt").touch()
    before = sorted(path.name for path in tmp_path.iterdir())
    code, _, complaint = raystate_command(capsys, "report", tmp_path / storage, "--out", tmp_path / out)
    assert code == 2 and said in complaint
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    code, _, complaint = raystate_command(capsys, "report", tmp_path / "run")
    assert code == 2 and "--out" in complaint


@pytest.mark.parametrize(
    ("out", "sentence"),
    [
        ("run/12/_CHECKPOINT_METADATA", "is the storage of a run"),
        ("run/page.html", "is the storage of a run"),
        ("run/.raystate/page.html", "is part of the storage of a run"),
        ("link/page.html", "is the storage of a run"),
        ("one/state/page.html", "one is a checkpoint"),
        ("checkpoint_6", "is there, and no HTML page: name another file"),
    ],
)
def test_a_page_takes_nobodys_place(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str, sentence: str) -> None:
    raystate.save(tmp_path / "one", {"w": np.ones(1)})
    (tmp_path / "link").symlink_to(run / "12/state")
    (tmp_path / "checkpoint_6").write_bytes(b"\x81\xa1a\x01")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    code, _, complaint = raystate_command(capsys, "report", run, "--out", tmp_path / out)
    assert code == 2 and "raystate: --out: " in complaint and sentence in complaint
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_a_page_replaces_the_one_before_and_an_empty_file(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "page.html").touch()
    for _ in range(2):
        report(capsys, run, tmp_path / "page.html")


def test_of_a_bucket(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with gcs_backend(tmp_path) as bucket:
        source = open_storage(run)
        for info in sorted(source.list(), key=lambda info: info.name.endswith("commit_success.txt")):
            if "/work/" not in info.name:
                bucket.create(info.name, source.read(info.name))
        there, here = report(capsys, bucket.url, tmp_path / "there.html"), report(capsys, run, tmp_path / "here.html")
    assert steps_of(there) == steps_of(here) and bucket.url in there.text


# ---------------------------------------------------------------- numbers


def past(step: int, time_s: float, attempt: int = 1, lineage: str = "1.1.x") -> PastStep:
    return PastStep(step=step, save=f"a{attempt}k{step}", attempt=attempt, time_s=time_s, lineage=lineage)


def recovery(back_s: float, seconds: float, repeated: int, attempt: int = 1) -> tuple[float, LoggedRecovery]:
    told: dict[str, Any] = {"group": "g", "cause": "killed", "step": 0, "tier": "memory"}
    return back_s, LoggedRecovery(attempt=attempt, seconds=seconds, steps_repeated=repeated, **told)


def test_the_numbers_of_the_page_are_there_for_scripts(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = raystate_command(capsys, "report", run, "--json", "--out", tmp_path / "page.html")
    told = json.loads(out)
    assert code == 0 and set(told["seconds_by_cause"]) == set(CAUSES)
    assert sum(told["seconds_by_cause"].values()) == pytest.approx(told["wall_s"]) and told["wall_s"] > 0
    assert told["goodput"] == pytest.approx(told["seconds_by_cause"]["steps"] / told["wall_s"])
    assert [one["step"] for one in told["saves"]] == [2, 4, 6, 8, 10, 12] and told["recoveries"][0]["cause"] == CAUSE
    page = Page((tmp_path / "page.html").read_text())
    assert f"{100 * told['goodput']:.1f} %goodput" in page.text.replace("\n", "")
    means = {one.means for one in CAUSES.values()}
    shown = {row[0]: float(row[2].removesuffix(" %")) for row in page.rows if len(row) == 4 and row[3].split(": ")[0] in means}
    assert sum(shown.values()) == pytest.approx(100.0, abs=0.05 * len(shown) + 0.01)
    shutil.rmtree(run / EVENTS)
    code, out, _ = raystate_command(capsys, "report", run, "--json")
    assert code == 0 and json.loads(out)["seconds_by_cause"] is None


def test_the_line_goes_up_to_a_death_and_on_from_where_the_run_came_back() -> None:
    """It stopped at the save before, and a save alone after a restart was a lone dot."""
    steps = (past(10, 100.0), past(20, 120.0), past(30, 160.0, lineage="1.2.x"))
    back_s, back = recovery(150.0, 25.0, 2)
    report = ReportContent(
        url="x",
        history=RunHistory(run="lm", entries=5, attempts={1: "why"}, steps=steps, damaged=()),
        saves=tuple(ReportedSave(past=one) for one in steps),
        life=life_of([Noted(1, 1, back_s, dataclasses.replace(back, step=21))]),
    )
    page = Page(render(report))
    wide, narrow = [[str(one["points"]).split() for one in page.of_class("curve")][i : i + 2] for i in (0, 2)]
    x, y = Axis(low=100.0, high=160.0, begin=70, end=914), Axis(low=10, high=30, begin=266, end=14)
    assert wide == [
        [f"{x.at(time_s)},{y.at(step)}" for time_s, step in line]
        for line in ([(100, 10), (120, 20), (125, 23)], [(150, 21), (160, 30)])
    ]
    assert [len(line) for line in narrow] == [3, 2]
    assert (
        "step 30 is the newest durable step, and nothing is lost. "
        "1 restart took 25.0 s and repeated 2 steps, the last from step 21 (memory)." in page.text
    )
    calm = Page(render(dataclasses.replace(report, life=Life())))
    assert "Step 30 is the newest durable step. No restart was needed." in calm.text
    bare = Page(render(dataclasses.replace(report, history=None, problems=("a", "b"))))
    assert "Step 30 is the newest durable step. 2 things that lie there are damaged." in bare.text


def test_a_phone_shows_each_row_with_the_names_of_its_columns(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = report(capsys, run, tmp_path / "page.html")
    assert all(attrs.get("data-is") for tag, attrs in page.tags if tag == "td")
    raw = (tmp_path / "page.html").read_text()
    assert "@media screen and (max-width: 700px)" in raw and "@media screen and (prefers-color-scheme: dark)" in raw
    colours = raw[raw.index("* { box-sizing") : raw.index("</style>")]
    assert not re.search(r"#[0-9a-f]{3,6}\b", colours), "each colour has a dark form"


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (3.0, 3.0), (-5.0, 1e9), (1e-12, 2e-12), (0.0, 86400.0 * 400)])
def test_axes_have_a_few_round_ticks(low: float, high: float) -> None:
    axis = Axis(low=low, high=high, begin=70.0, end=900.0)
    assert 1 <= len(axis.ticks()) <= 8
    assert all(70.0 <= axis.at(tick) <= 900.0 for tick in axis.ticks())


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 5e-324), (0.0, 2e-323), (-1.7e308, 1.7e308), (1e16, 1e16 + 2), (math.nan, math.nan), (0.0, math.inf)]
)
def test_axes_of_values_that_no_chart_is_made_for(low: float, high: float) -> None:
    axis = Axis(low=low, high=high, begin=70.0, end=900.0)
    assert len(axis.ticks()) <= 8


@pytest.mark.parametrize("value", ["1" + "0" * 400, "-" + "9" * 4000, "NaN", "Infinity", '"much"', "[1]"])
def test_metrics_that_are_no_numbers_to_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str) -> None:
    for step in (1, 2):
        raystate.save(tmp_path / "run" / str(step), {"w": np.ones(2)}, metrics={"loss": 1.0, "fine": step})
        (tmp_path / "run" / str(step) / "metrics" / "metrics").write_text(f'{{"loss": {value}, "fine": {step}}}')
    page = report(capsys, tmp_path / "run", tmp_path / "page.html")
    assert "fine" in page.text and "loss" not in page.text


EVENT = {"kind": "recovery", "time_s": 5.0, "attempt": 1, "group": "g", "cause": "c", "step": 1, "tier": "memory", "back": True}


@pytest.mark.parametrize(
    "more",
    [
        '"seconds": NaN, "steps_repeated": 0',
        '"seconds": Infinity, "steps_repeated": 0',
        f'"seconds": 1{"0" * 400}, "steps_repeated": 0',
        f'"seconds": 1, "steps_repeated": 0, "time_s": 1{"0" * 400}',
        '"seconds": 1, "steps_repeated": 0, "time_s": NaN',
        '"seconds": 1e308, "steps_repeated": 0',
        '"seconds": 1, "steps_repeated": 0, "time_s": null',
    ],
)
def test_a_ledger_of_impossible_numbers_is_damaged(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str
) -> None:
    (run / EVENTS / "000001-0002.json").write_text(f"{json.dumps(EVENT)[:-1]}, {more}}}")
    page = report(capsys, run, tmp_path / "page.html", code=1)
    assert "1 object of the ledger can't be read, left out here: 000001-0002.json" in page.text and len(page.of_class("band")) == 2


def test_bytes_below_nothing_are_not_drawn(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saves = (LoggedSave(attempt=1, step=step, save=f"a1k{step}0", seconds=1.0, nbytes=-(1 << 62)) for step in (2, 4))
    lines = [line_of(Noted(1, number, 1.0, save)) for number, save in enumerate(saves, 1_000)]
    (run / batch_name(1, 999_999)).write_bytes(batch_of(1, lines))
    assert "written by durable saves" not in report(capsys, run, tmp_path / "page.html").text


def test_page_and_picture_need_a_file_each(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, complaint = raystate_command(capsys, "report", run, "--out", tmp_path / "one", "--png", f"{tmp_path}/./one")
    assert code == 2 and "name another file" in complaint and not (tmp_path / "one").exists()


def test_steps_are_where_the_ledger_has_them_whatever_clock_their_commits_had(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine's clock was set back by a day: the drawings had spanned it."""

    def set_back(*given: Any, **more: Any) -> RunHistory | None:
        history = read_history(*given, **more)
        assert history is not None
        steps = [dataclasses.replace(one, time_s=(one.time_s or 0.0) - 86_400.0 * (one.step > 6)) for one in history.steps]
        return dataclasses.replace(history, steps=tuple(steps))

    monkeypatch.setattr(report_facts, "read_history", set_back)
    times_s = [one.past.time_s or 0.0 for one in report_facts.gather(str(run), Progress(disable=True)).saves]
    assert times_s == sorted(times_s) and times_s[-1] - times_s[0] < 3600.0


def test_a_stray_number_in_the_log_is_one_problem(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = sorted((run / ".raystate/log").iterdir())
    shutil.copy(entries[0], entries[0].with_name("999999999999.json"))
    page = report(capsys, run, tmp_path / "page.html", code=1)
    assert sorted(steps_of(page)) == [2, 4, 6, 8, 10, 12]
    assert "000999999999998" not in page.text and "999999999999.json" in page.text
    assert len([one for one in page.text.splitlines() if "is missing" in one or "are missing" in one]) == 1


def test_of_very_many_attempts_the_newest_are_shown() -> None:
    steps = tuple(past(number, float(number), attempt=number) for number in range(1, 401))
    history = RunHistory(run="lm", entries=800, attempts=dict.fromkeys(range(1, 401), "why"), steps=steps, damaged=())
    page = Page(render(ReportContent(url="x", history=history, saves=tuple(ReportedSave(past=one) for one in steps))))
    assert [row[0] for row in page.rows if len(row) == 2] == ["attempt", *map(str, range(400, 100, -1))]
    assert page.text.count("100 earlier ones are not shown") == 2, "attempts and durable steps"


def test_steps_that_were_given_up_are_told_in_words(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = {SnapshotId(lineage="1.1.x", step=step): f"step {step}: storage fails" for step in (9, 7)}
    monkeypatch.setattr(report_facts, "given_up", lambda _storage: lost)
    (note,) = (one for one in report_facts.gather(str(run), Progress(disable=True)).notes if "promised" in one)
    assert "not durable: 7, 9, and all of them are older than step 12, which is durable. The newest reason: step 7" in note
    lost[SnapshotId(lineage="1.1.x", step=13)] = "step 13: storage fails"
    (note,) = (one for one in report_facts.gather(str(run), Progress(disable=True)).notes if "promised" in one)
    assert "not durable: 7, 9, 13. The newest reason: step 13" in note
