"""By default, how far behind a kill leaves a small training, in repeated steps: on an idle machine less than a quarter of a second.

Both what a step takes and what a snapshot costs grow where a machine is slow or busy: the steps say the same everywhere.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jobs.demo import __main__ as demo
from jobs.demo.runs import Run
from jobs.demo.view import View
from jobs.quickstart import __main__ as quickstart
from tests.processes import run_python
from tests.timed.test_beside_others import NOT_USERS, REPO

# The demo allows no more itself: fewer than lie between its durable steps. The quickstart's steps take 60 ms.
MOST_STEPS = {"demo": demo.MOST_SHORT_REPEATED, "quickstart": 4}
PAUSE = "        time.sleep(0.05)  # time to kill it\n"
RECORD = '        print(__import__("os").getpid(), step + 1, time.monotonic(), file=open("steps", "a"))\n'


def step_s(times: Sequence[float]) -> float:
    return statistics.median(b - a for a, b in itertools.pairwise(times))


def test_the_demo() -> None:
    _holds("demo")


def test_the_quickstart() -> None:
    with tempfile.TemporaryDirectory(prefix="raystate-", dir="/tmp") as folder:  # the names of Ray's sockets must be short
        _holds("quickstart", folder)


def _holds(what: str, *arguments: str) -> None:
    """Run it as users do: in a process of its own, without what the other layers' tests set."""
    users = {name: value for name, value in os.environ.items() if name not in (*NOT_USERS, "RAYSTATE_STANDBY")}
    users |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    done = run_python("-m", "tests.timed.test_behind", what, *arguments, cwd=REPO, env=users)
    for found in (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")):
        sys.stdout.write(f"{what}: {found['repeated']} steps repeated, of {1e3 * found['step_s']:.1f} ms each\n")
        assert found["repeated"] <= MOST_STEPS[what]
        return
    raise AssertionError(done.stdout)


def _told(repeated: int, times: Sequence[float]) -> None:
    sys.stdout.write(json.dumps({"repeated": repeated, "step_s": step_s(times)}) + "\n")


def _demo() -> int:
    show = demo.show

    def shown(view: View, calm: Run, rough: Run, kills: list[demo.Kill], *, full: bool) -> None:
        (kill,) = kills
        followed = demo.what_followed(rough, kill)
        assert followed is not None
        before: list[Any] = [one for one in rough.events() if one["rank"] == 0 and one["t"] <= kill.at_s]
        _told(followed[2], [one["t"] for one in before][-20:])
        show(view, calm, rough, kills, full=full)

    demo.show = shown
    sys.argv = ["demo"]
    return demo.main()


def _quickstart(folder: Path) -> int:
    from rich.console import Console

    text = quickstart.SCRIPT.read_text()
    assert PAUSE in text
    script = folder / "train.py"
    script.write_text(text.replace(PAUSE, RECORD + PAUSE))
    quickstart.SCRIPT = script
    os.environ["JAX_PLATFORMS"] = "cpu"
    console = Console(file=io.StringIO(), soft_wrap=True)
    quickstart.quickstart(console, folder)
    assert isinstance(console.file, io.StringIO)
    back = re.search(r"stands at step (\d+), from memory", console.file.getvalue())
    assert back
    rows = [line.split() for line in (folder / "killed" / "steps").read_text().splitlines()]
    before = [(int(step), float(at)) for pid, step, at in rows if pid == rows[0][0]]  # of the process that was killed
    _told(before[-1][0] - int(back[1]), [at for _, at in before[-20:]])
    return 0


if __name__ == "__main__":
    sys.exit(_demo() if sys.argv[1] == "demo" else _quickstart(Path(sys.argv[2])))
