"""The form of raystate's lines, who prints them, and what Ray makes of them."""

from __future__ import annotations

import logging
import os
import re

import pytest

from raystate import log_lines
from raystate.log_lines import OURS, SWITCH
from tests.processes import run_python

SLOW = "<time> raystate: WARNING: too slow\n"
NEWS = "<time> raystate: joined\n"
ON_ITS_OWN = "logging.getLogger('raystate').handlers.clear(); logging.getLogger('raystate').propagate = True"


def said(program: str, **environment: str) -> str:
    """By a process, with each time of day as <time>."""
    env = {name: value for name, value in os.environ.items() if name not in (SWITCH, "RAY_DEDUP_LOGS_ALLOW_REGEX")} | environment
    return re.sub(r"(?m)^\d\d:\d\d:\d\d ", "<time> ", run_python("-c", program, env=env).stderr)


@pytest.mark.parametrize(
    ("sets_up", "told"),
    [
        ("import raystate", NEWS + SLOW),
        ("import raystate; logging.basicConfig()", NEWS + SLOW),
        ("logging.basicConfig(); import raystate", NEWS + SLOW),
        ("import absl.logging, raystate", NEWS + SLOW),
        ("logging.getLogger('raystate').setLevel('WARNING'); import raystate", SLOW),
        ("import raystate; logging.getLogger('raystate').setLevel('ERROR')", ""),
        ("import raystate; logging.getLogger('raystate').addHandler(logging.StreamHandler())", "joined\ntoo slow\n"),
        ("logging.getLogger('raystate').addHandler(logging.StreamHandler()); import raystate", "joined\ntoo slow\n"),
        (f"import raystate; {ON_ITS_OWN}; logging.basicConfig()", "INFO:raystate.x:joined\nWARNING:raystate.x:too slow\n"),
    ],
)
def test_each_line_is_said_once_in_raystates_form_unless_the_script_has_its_own(sets_up: str, told: str) -> None:
    log = "logging.getLogger('raystate.x')"
    assert said(f"import logging\n{sets_up}\n{log}.debug('x')\n{log}.info('joined')\n{log}.warning('too %s', 'slow')") == told


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("debug", "<time> raystate: all of it\n" + NEWS),
        ("warning", ""),
        ("loud", "<time> raystate: WARNING: RAYSTATE_LOG=loud is none of debug, info, warning, error: info is taken\n" + NEWS),
    ],
)
def test_the_environment_says_how_much(asked: str, told: str) -> None:
    program = "import logging, raystate\nlog = logging.getLogger('raystate')\nlog.debug('all of it')\nlog.info('joined')"
    assert said(program, **{SWITCH: asked}) == told


def test_a_line_names_the_run_that_its_process_works_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lines, "_runs", [])
    lines = log_lines._Lines()

    def line(**extra: object) -> str:
        record = logging.makeLogRecord({"msg": "leaf a\x1b[31m\u202e", "levelno": logging.INFO, **extra})
        text = lines.format(record)
        assert re.match(OURS, text)
        return text.partition(" ")[2]

    told = "leaf a\\x1b[31m\\u202e"
    assert line() == f"raystate: {told}"
    with log_lines.naming("lr-0.003"):
        assert line() == f"raystate lr-0.003: {told}"
        with log_lines.naming("lr-0.003"):  # its `fit` and its manager
            assert line() == f"raystate lr-0.003: {told}"
        with log_lines.naming("lr-0.01"):  # nothing says whose line it is
            assert line() == f"raystate: {told}"
        assert line(run="lm") == f"raystate lm: {told}"
        assert line() == f"raystate lr-0.003: {told}"
    assert line() == f"raystate: {told}"


@pytest.mark.parametrize("imports", ["import ray._private.worker as ray, raystate", "import raystate, ray._private.worker as ray"])
def test_ray_does_not_fold_the_lines_of_several_runs(imports: str) -> None:
    """Those of a user's it does."""
    program = f"""{imports}
lines = ["12:00:00 raystate lr-0.003: step 20 is durable", "a user's line"]
for pid in range(3):
    for batch in ray.stderr_deduplicator.deduplicate(dict(pid=pid, ip="here", lines=lines)):
        assert batch["lines"] == lines[:1 if pid else 2], batch
"""
    assert said(program) == ""


def test_lines_that_come_with_each_save_crowd_no_news_out() -> None:
    program = (
        "import logging, raystate\nfrom raystate.log_lines import newest\nlog = logging.getLogger('raystate.x')\nlog.warning('slow')\n"
        "for _ in range(20): log.info('saved', extra={'is_routine': True})\nprint(len(newest()), newest()[0][-4:])"
    )
    assert run_python("-c", program).stdout == "1 slow\n"
