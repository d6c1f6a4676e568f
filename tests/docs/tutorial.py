"""Running a page that tells of one script: the script, diffs that change it, and commands with what they print, from top to bottom."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

from markdown_it import MarkdownIt

from tests.diffs import apply_hunk
from tests.patience import PATIENCE_S

KILLED = "Killed"  # a shell says it of a program that the reader kills: so does the test, once the line before has come
STARTS_RAY = "ray start --head"  # the test has done it


def run_tutorial(page: Path, folder: Path, environment: dict[str, str], *, diffs: bool = True) -> None:
    """Raises AssertionError with the command and all it has printed, where that lacks a line that the page shows.

    Numbers count as equal. The script's steps are shortened: the page has them so long that a reader can kill one.

    Args:
        diffs: whether the page's diffs change its script; False: they are another program's.
    """
    script = folder / "train.py"
    for fence in MarkdownIt("commonmark").parse(page.read_text()):
        match fence.info if fence.type == "fence" else "":
            case "python":
                assert not script.exists(), "a tutorial has one script"
                script.write_text(fence.content.replace("time.sleep(0.1)", "time.sleep(0.02)"))
            case "diff" if diffs:
                for hunk in fence.content.strip("\n").split("\n\n"):
                    script.write_text(apply_hunk(script.read_text(), hunk.splitlines()))
            case "console":
                for command in fence.content.removeprefix("$ ").split("\n$ "):
                    line, *shown = command.splitlines()
                    if line != STARTS_RAY:
                        _run(line, shown, folder, environment)
            case _:
                pass


def _run(command: str, shown: list[str], folder: Path, environment: dict[str, str]) -> None:
    kills = shown[-1:] == [KILLED]
    waits_for = shown[: -1 if kills else None]
    printed: list[str] = []
    process = subprocess.Popen(
        f"exec {command}" if kills else command, shell=True, cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        for line in process.stdout:
            printed.append(line)
            if waits_for and _plain(waits_for[0]) in _plain(line):
                del waits_for[0]
            if kills and not waits_for:
                process.kill()
        found = process.wait(PATIENCE_S)
    finally:
        process.kill()
    text = f"$ {command}\n{''.join(printed)}"
    assert not waits_for, f"not printed: {waits_for}\n{text}"
    expected = -signal.SIGKILL if kills else int(any("problem" in line for line in shown))
    assert found == expected, f"exit code {found}\n{text}"


def _plain(line: str) -> str:
    """With each number as N, and single blanks."""
    return " ".join(re.sub(r"\d+(\.\d+)?", "N", line).split())
