"""Data iterators of scripts, whose position is saved with a step."""

from __future__ import annotations

from typing import Any


class Rows:
    """It counts, and begins again after so many rows."""

    def __init__(self, row: int = 0, *, rows: int = 8):
        self.row = row
        self.rows = rows

    def __next__(self) -> int:
        self.row = (self.row + 1) % self.rows
        return self.row

    def get_state(self) -> dict[str, int]:
        return {"row": self.row}

    def set_state(self, state: dict[str, int]) -> None:
        self.row = state["row"]


class Holds:
    """Its state is whatever it was given."""

    def __init__(self, state: Any = None):
        self.state = state

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state


class Broken(Holds):
    """Its state can't be set."""

    def set_state(self, state: Any) -> None:
        raise ValueError("no such file")
