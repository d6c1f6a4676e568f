"""Where bars are shown, and what a bar of bytes shows, of commands and of `fit`."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from raystate.arena import format_bytes


class _ByteRate(ProgressColumn):
    """Bytes a second in the units of rich's `DownloadColumn(binary_units=True)`; rich's own column has others."""

    def render(self, task: Task) -> Text:
        """Nothing until the first bytes have been counted."""
        speed = task.finished_speed or task.speed
        return Text(f"{format_bytes(speed)}/s" if speed else "", style="progress.data.speed")


def can_show(console: Console) -> bool:
    """Whether bars can be shown there: on a terminal that can move its cursor. FORCE_COLOR makes no terminal of a file."""
    return console.is_terminal and console.is_interactive and not console.is_dumb_terminal and console.file.isatty()


def passes_bars() -> bool:
    """Whether rich must print other output above the bars: only if standard output is a terminal, too. Rich would send what goes to a
    file or a pipe to standard error."""
    return sys.stdout is not None and not sys.stdout.closed and sys.stdout.isatty()


def byte_columns() -> tuple[ProgressColumn, ...]:
    """For rich's `Progress`: how many of how many, at which rate, and how long it still takes."""
    return (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        DownloadColumn(binary_units=True),
        _ByteRate(),
        TimeRemainingColumn(compact=True),
    )
