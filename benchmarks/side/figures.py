"""The figures of one run: each is printed and in the file as soon as it is known, so an interrupted run keeps what it has."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WIDTH = 58  # of a figure's name on the terminal
OURS = "raystate"
OFF = "device -> pinned memory"  # the limit of a snapshot's copy


Values = float | Sequence[float]


def _several(values: Values) -> Sequence[float]:
    return [values] if isinstance(values, int | float) else values


class Teller:
    """A part's own process tells with it what it finds, a line of JSON for each.

    Args:
        limit_s: the part is killed after so many seconds.
    """

    def __init__(self, limit_s: float):
        self._end_s = time.monotonic() + limit_s

    def add(
        self,
        name: str,
        value: Values,
        unit: str,
        *,
        of: str = "",
        beside: Mapping[str, Values] | None = None,
        goals: Sequence[str] = (),
    ) -> None:
        """Tell a figure. Of several values the median, with the lowest and the highest.

        Args:
            name: what was measured.
            unit: of `value` and of all in `beside`.
            of: the state that it was measured with.
            beside: what others took for the same in the same run, by name.
            goals: how it stands to each.
        """
        given = {OURS: value, **(beside or {})}
        middle = {who: statistics.median(_several(values)) for who, values in given.items()}
        spreads = {who: (min(found), max(found)) for who, values in given.items() if len(found := _several(values)) > 1}
        more = {**({"spreads": spreads} if spreads else {}), **({"goals": list(goals)} if goals else {})}
        self.tell(name=name, of=of, value=middle.pop(OURS), unit=unit, beside=middle, **more)

    def note(self, text: str) -> None:
        """Something that the reader of the figures must know."""
        self.tell(note=text)

    def tell(self, **line: Any) -> None:
        print(json.dumps(line), flush=True)

    @property
    def left_s(self) -> float:
        return self._end_s - time.monotonic()


class Figures:
    """What was measured, in a JSON file that is whole at any time.

    Args:
        path: of the file.
        limit_s: for the whole run.
    """

    def __init__(self, path: Path, limit_s: float):
        self._path = path
        self._begin_s = time.monotonic()
        self._limit_s = limit_s
        self.content: dict[str, Any] = {"finished": False, "machine": {}, "figures": [], "notes": [], "failed": []}
        self._write()

    def part(
        self, name: str, command: list[str], *, least_s: float, most_s: float, environment: Mapping[str, str] | None = None
    ) -> bool:
        """Run a part in a process of its own: one that hangs or dies is told, and the next one begins with a free device.

        Args:
            command: gets two more arguments: how long it may take, in seconds, and a folder that is removed after it.
            least_s: a part that is not begun with less than that left.
            most_s: it is killed after so many.
            environment: more variables for it.

        Returns:
            Whether it has succeeded.
        """
        left_s = self._limit_s - self.taken_s
        if left_s < least_s:
            self._failed(name, f"not begun: it needs {least_s:.0f} s, {max(0.0, left_s):.0f} are left")
            return False
        print(f"== {name} ({self.taken_s:.0f} s)", flush=True)
        limit_s = min(most_s, left_s)
        late = threading.Event()
        with tempfile.TemporaryDirectory(prefix="raystate-bench-", ignore_cleanup_errors=True) as folder:
            given = {**os.environ, **(environment or {})}
            asked = [*command, f"{limit_s:.0f}", folder]
            running = subprocess.Popen(asked, stdout=subprocess.PIPE, text=True, process_group=0, env=given)

            def end() -> None:
                late.set()
                os.killpg(running.pid, signal.SIGKILL)

            timer = threading.Timer(limit_s, end)
            timer.start()
            try:
                assert running.stdout is not None
                succeeded = self._read(running.stdout)
            finally:
                timer.cancel()
                if running.poll() is None:
                    os.killpg(running.pid, signal.SIGKILL)
                running.wait()
        if not succeeded:
            self._failed(
                name, f"killed after {limit_s:.0f} s" if late.is_set() else f"ended early, exit status {running.returncode}"
            )
        return succeeded

    def finish(self) -> None:
        """All parts were begun, or told to be left out."""
        self.content["finished"] = True
        self._write()

    def of(self, name: str) -> float | None:
        """The newest figure of that name."""
        return next((row["value"] for row in reversed(self.content["figures"]) if row["name"] == name), None)

    @property
    def taken_s(self) -> float:
        return time.monotonic() - self._begin_s

    def _read(self, lines: Any) -> bool:
        """What a part tells; whether it came to its end. Lines that are no JSON are shown."""
        for line in lines:
            try:
                told = json.loads(line)
            except ValueError:
                print(line, end="", flush=True)
                continue
            match told:
                case {"done": True}:
                    return True
                case {"machine": facts}:
                    self.content["machine"] = facts
                    text = "\n".join(f"  {name}: {value}" for name, value in facts.items())
                case {"note": note}:
                    self.content["notes"].append(note)
                    text = f"  {note}"
                case row:
                    self.content["figures"].append({**row, "at_s": round(self.taken_s, 1)})
                    others = "".join(f"; {other} {_told(row, other)}" for other in row["beside"])
                    goals = "".join(f"\n    {goal}" for goal in row.get("goals", ()))
                    text = f"  {row['name']:{WIDTH}} {_told(row, OURS):>10} {row['unit']}{others}{goals}"
            self._write()
            print(text, flush=True)
        return False

    def _failed(self, name: str, why: str) -> None:
        print(f"{name}: {why}", flush=True)
        self.content["failed"].append({"part": name, "why": why})
        self._write()

    def _write(self) -> None:
        temporary = self._path.with_name(self._path.name + ".new")
        temporary.write_text(json.dumps(self.content, indent=1))
        os.replace(temporary, self._path)


def shown(value: float) -> str:
    """Four digits, without a power of ten."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _told(row: Mapping[str, Any], who: str) -> str:
    """A contestant's value, with its lowest and highest where there were several."""
    text = shown(row["value"] if who == OURS else row["beside"][who])
    low, high = row.get("spreads", {}).get(who, (None, None))
    return text if low is None else f"{text} ({shown(low)} to {shown(high)})"


def table(content: Mapping[str, Any]) -> str:
    """The figures as a page of documentation has them."""
    lines = [f"- {name}: {value}" for name, value in content["machine"].items()]
    lines += ["", "| state | figure | value | beside | goals |", "|---|---|---|---|---|"]
    for row in content["figures"]:
        others = ", ".join(f"{name} {_told(row, name)}" for name in row["beside"])
        lines.append(
            f"| {row['of']} | {row['name']} | {_told(row, OURS)} {row['unit']} | {others} | {'; '.join(row.get('goals', ()))} |"
        )
    lines += ["", *(f"- {note}" for note in content["notes"])]
    lines += [f"- {one['part']}: {one['why']}" for one in content["failed"]]
    return "\n".join(lines)
