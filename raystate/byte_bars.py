"""What a bar of bytes shows, of commands and of `fit`."""

from __future__ import annotations

from rich.progress import BarColumn, DownloadColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from raystate.arena import format_bytes


class _ByteRate(ProgressColumn):
    """Bytes a second in the units of rich's `DownloadColumn(binary_units=True)`; rich's own column has others."""

    def render(self, task: Task) -> Text:
        """Nothing as long as nobody knows."""
        speed = task.finished_speed or task.speed
        return Text(f"{format_bytes(speed)}/s" if speed else "", style="progress.data.speed")


def byte_columns() -> tuple[ProgressColumn, ...]:
    """For rich's `Progress`: how many of how many, at which rate, and how long it still takes."""
    return (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        DownloadColumn(binary_units=True),
        _ByteRate(),
        TimeRemainingColumn(compact=True),
    )
