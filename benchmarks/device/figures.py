"""The figures of one run: each is printed and in the file as soon as it is known, so an interrupted run keeps what it has."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

WIDTH = 58  # of a figure's name on the terminal


class Figures:
    """What was measured, in a JSON file.

    Args:
        path: of the file. It is whole at any time.
        limit_s: after so many seconds nothing new begins.
    """

    def __init__(self, path: Path, limit_s: float):
        self._path = path
        self._begin_s = time.monotonic()
        self._limit_s = limit_s
        self._content: dict[str, Any] = {"machine": {}, "figures": [], "failed": []}
        self.failed = 0

    def machine(self, facts: dict[str, Any]) -> None:
        """What the machine is."""
        self._content["machine"] = facts
        for name, value in facts.items():
            print(f"{name}: {value}", flush=True)
        self._write()

    def add(self, name: str, value: float, unit: str, *, of: str = "", beside: dict[str, float] | None = None) -> None:
        """Tell a figure.

        Args:
            name: what was measured.
            unit: of `value` and of all in `beside`.
            of: the state that it was measured with.
            beside: what others took for the same in the same run, by name.
        """
        row = {"name": name, "of": of, "value": value, "unit": unit, "beside": beside or {}, "at_s": round(self.taken_s, 1)}
        self._content["figures"].append(row)
        self._write()
        others = "".join(f"; {other} {number:.4g}" for other, number in row["beside"].items())
        print(f"  {name:{WIDTH}} {value:10.4g} {unit}{others}", flush=True)

    def part(self, name: str, run: Callable[[], None]) -> None:
        """One part of the benchmark. One that fails is told, and the next ones run."""
        if self.left_s <= 0:
            print(f"{name}: not begun, the {self._limit_s:.0f} s are over", flush=True)
            self._content["failed"].append({"part": name, "why": "no time left"})
            self._write()
            return
        print(f"== {name} ({self.taken_s:.0f} s)", flush=True)
        try:
            run()
        except Exception as error:
            self.failed += 1
            traceback.print_exc()
            self._content["failed"].append({"part": name, "why": f"{type(error).__name__}: {error}"})
            self._write()

    @property
    def taken_s(self) -> float:
        return time.monotonic() - self._begin_s

    @property
    def left_s(self) -> float:
        return self._limit_s - self.taken_s

    def _write(self) -> None:
        temporary = self._path.with_name(self._path.name + ".new")
        temporary.write_text(json.dumps(self._content, indent=1))
        os.replace(temporary, self._path)
