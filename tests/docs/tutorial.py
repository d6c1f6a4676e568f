"""Running a page that tells of one script: the script, diffs that change it, and commands with what they print, from top to bottom."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

from markdown_it import MarkdownIt

from tests.diffs import apply_hunk
from tests.docs.running import REPO
from tests.patience import PATIENCE_S

KILLED = "Killed"  # a shell says it of a program that the reader kills: so does the test, once the line before has come
STARTS_RAY = "ray start --head"  # the test has done it
BY_ITSELF = re.compile(r"\(CoordinatorActor pid=\d+\)|\braystate: joined ")
SLOW = re.compile(r"; this machine has a load of | is still being written | from now: it costs ")  # of a busy machine
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def run_tutorial(page: Path, folder: Path, environment: dict[str, str], *, script: Path | None = None) -> None:
    """Raises AssertionError with the command and all it has printed, where that lacks a line that the page shows; with a `script`
    also where it has another line.

    Numbers count as equal. The script's steps are shortened: the page has them so long that a reader can kill one.

    Args:
        script: of the repository, of which the page shows a part; the page's diffs are another program's. None: the page has its script
            whole, and its diffs change that.
    """
    whole, killed = script is None, list[str]()
    copy = folder / ("train.py" if script is None else script.relative_to(REPO))
    if script is not None:
        copy.parent.mkdir(parents=True)
        copy.write_text(_shortened(script.read_text()))
    for fence in MarkdownIt("commonmark").parse(page.read_text()):
        match fence.info if fence.type == "fence" else "":
            case "python" if whole:
                assert not copy.exists(), "a tutorial has one script"
                copy.write_text(_shortened(fence.content))
            case "diff" if whole:
                for hunk in fence.content.strip("\n").split("\n\n"):
                    copy.write_text(apply_hunk(copy.read_text(), hunk.splitlines()))
            case "console":
                for command in fence.content.removeprefix("$ ").split("\n$ "):
                    line, *shown = command.splitlines()
                    if line != STARTS_RAY:
                        killed = _run(line, shown, folder, environment, all_of_it=not whole, again=killed)
            case _:
                pass


def _shortened(script: str) -> str:
    # No shorter: a line of an actor comes late where a machine is busy, and the script is to be killed before its first durable step.
    return re.sub(r"time\.sleep\(0\.\d+\)", "time.sleep(0.05)", script)


def _run(
    command: str, shown: list[str], folder: Path, environment: dict[str, str], *, all_of_it: bool, again: list[str]
) -> list[str]:
    """What it printed, if it was killed. `again`: that of the command before; a step that is repeated prints it once more."""
    kills = shown[-1:] == [KILLED]
    waits_for = shown[: -1 if kills else None]
    news = [line for line in waits_for if all_of_it and BY_ITSELF.search(line)]  # when they come is Ray's affair
    waits_for = [line for line in waits_for if line not in news]
    printed: list[str] = []
    more: list[str] = []
    process = subprocess.Popen(
        f"exec {command}" if kills else command, shell=True, cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        for line in process.stdout:
            printed.append(line)
            if line in again:
                continue
            if all_of_it and BY_ITSELF.search(line):
                news = _without(news, line)
            elif all_of_it and not SLOW.search(line) and not (waits_for and _plain(waits_for[0]) == _plain(line)):
                more.append(line)
            if waits_for and _plain(waits_for[0]) in _plain(line):
                del waits_for[0]
            if kills and not waits_for and not news:
                process.kill()
        found = process.wait(PATIENCE_S)
    finally:
        process.kill()
    text = f"$ {command}\n{''.join(printed)}"
    assert not waits_for and not news, f"not printed: {waits_for or news}\n{text}"
    assert not more, f"not shown: {more}\n{text}"
    expected = -signal.SIGKILL if kills else int(any("problem" in line for line in shown))
    assert found == expected, f"exit code {found}\n{text}"
    return printed if kills else []


def _without(news: list[str], line: str) -> list[str]:
    """What is still waited for, after a line of an actor."""
    found = next((one for one in news if _plain(one) == _plain(line)), None)
    assert found is not None or SLOW.search(line), f"not shown: {line}"
    return [one for one in news if one is not found]


def _plain(line: str) -> str:
    """With each number as N, and single blanks."""
    return " ".join(re.sub(r"\d+(\.\d+)*|steps?\b", "N", COLOURS.sub("", line)).split())
