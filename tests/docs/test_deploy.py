"""The alerts and the dashboard that are shipped for Prometheus and Grafana."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from raystate.observe.goodput import CAUSES
from raystate.observe.metrics import ALL
from tests.debian import REPO, debian_program

RULES = REPO / "deploy" / "prometheus" / "raystate-rules.yaml"
PLAYED = REPO / "deploy" / "prometheus" / "raystate-rules.test.yaml"
DASHBOARD = REPO / "deploy" / "grafana" / "raystate.json"
_NAME = re.compile(r"\bray_(raystate_\w+)")
SHOWN = {f"ray_{one.name}{end}" for one in ALL for end in (("_bucket", "_count", "_sum") if one.kind == "histogram" else ("",))}


@pytest.fixture(scope="module")
def promtool() -> str:
    return debian_program("promtool", package="prometheus")


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return group["rules"]


def queries() -> Iterator[tuple[str, str]]:
    """(panel, query) of the dashboard."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def test_each_alert_fires_in_its_test_and_stays_silent_in_the_undisturbed_one(promtool: str) -> None:
    done = subprocess.run([promtool, "test", "rules", PLAYED.name], cwd=PLAYED.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    undisturbed, *disturbed = yaml.safe_load(PLAYED.read_text())["tests"]
    names = {one["alert"] for one in alerts()}
    assert len(names) == 7
    assert {one["alertname"] for one in undisturbed["alert_rule_test"]} == names
    assert not [one for one in undisturbed["alert_rule_test"] if one.get("exp_alerts")]
    fired = {one["alertname"] for test in disturbed for one in test["alert_rule_test"] if one.get("exp_alerts")}
    assert fired == names


def test_each_alert_has_a_row_in_the_runbook() -> None:
    section = (REPO / "docs" / "runbook.md").read_text().partition("## An alert fires\n")[2].partition("\n## ")[0]
    for one in alerts():
        assert f"| `{one['alert']}` |" in section
        assert one["annotations"]["runbook"] == f"docs/runbook.md, An alert fires: {one['alert']}"
        assert one["labels"]["severity"] in ("page", "ticket")


def test_alerts_and_panels_ask_for_metrics_that_there_are() -> None:
    asked = {f"ray_{name}" for text in (RULES.read_text(), DASHBOARD.read_text()) for name in _NAME.findall(text)}
    assert len(asked) > 20
    assert asked <= SHOWN, asked - SHOWN


def test_the_dashboard_shows_each_metric() -> None:
    marks = [one["expr"] for one in json.loads(DASHBOARD.read_text())["annotations"]["list"]]
    shown = {f"ray_{name}" for query in (*(query for _, query in queries()), *marks) for name in _NAME.findall(query)}
    missing = [one.name for one in ALL if not any(name.startswith(f"ray_{one.name}") for name in shown)]
    assert not missing


def test_a_mark_on_the_dashboard_is_one_moment_and_not_all_the_time_since() -> None:
    """A mark that is true at two evaluations in a row is drawn as an area."""
    marks = {one["name"]: one for one in json.loads(DASHBOARD.read_text())["annotations"]["list"]}
    assert (
        {name for name, one in marks.items() if "offset $__interval" in one["expr"]}
        == {*marks}
        == {"Starts", "Coordinator replaced"}
    )
    assert all(one["iconColor"] != "red" and one["tagKeys"] == "run" and "{{" not in one["titleFormat"] for one in marks.values())
    assert marks["Starts"]["useValueForTime"]


def test_the_dashboard_takes_any_prometheus_and_any_run() -> None:
    board = json.loads(DASHBOARD.read_text())
    assert {one["name"]: one["type"] for one in board["templating"]["list"]} == {"datasource": "datasource", "run": "query"}
    assert all(target["datasource"]["uid"] == "${datasource}" for panel in board["panels"] for target in panel.get("targets", ()))
    assert all('run=~"$run"' in query for _, query in queries())
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_first_row_judges_the_age_of_what_is_durable_by_the_runs_own_interval() -> None:
    tiles = {panel["title"]: panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] == "stat"}
    assert "ray_raystate_storage_works" in tiles["Storage takes steps"]["targets"][0]["expr"]
    for title, interval in (("Newest durable step", "interval_seconds"), ("Steps not durable", "interval_steps")):
        judged = tiles[title]["targets"][1]
        assert f"/ (max by (run) (ray_raystate_durable_{interval}" in judged["expr"]
        (override,) = tiles[title]["fieldConfig"]["overrides"]
        assert override["matcher"] == {"id": "byFrameRefID", "options": judged["refId"]}
        colors = [one["value"]["steps"] for one in override["properties"] if one["id"] == "thresholds"]
        assert [[(one["color"], one["value"]) for one in steps] for steps in colors] == [
            [("green", None), ("orange", 2), ("red", 4)]
        ]


def test_no_panel_loses_the_first_value_of_a_counter_of_single_events() -> None:
    events = ("saves_lost", "storage_retries", "storage_failures", "read_bytes", "recoveries")
    assert not [query for _, query in queries() if any(f"rate(ray_raystate_{one}" in query for one in events)]


def test_the_causes_of_spent_time_have_the_order_and_the_names_of_the_report() -> None:
    (targets,) = (
        panel["targets"] for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["title"].startswith("Where the time")
    )
    shown = [(one["expr"].partition('cause="')[2].partition('"')[0], one["legendFormat"].partition(": ")[2]) for one in targets]
    assert shown == [(cause, one.name) for cause, one in CAUSES.items()]
