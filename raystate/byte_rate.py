"""A column of rich's bars."""

from __future__ import annotations

from rich.filesize import pick_unit_and_suffix
from rich.progress import ProgressColumn, Task
from rich.text import Text


class ByteRateColumn(ProgressColumn):
    """Bytes a second in the units of rich's `DownloadColumn(binary_units=True)`; rich's own column has others."""

    def render(self, task: Task) -> Text:
        """Nothing as long as nobody knows."""
        speed = task.finished_speed or task.speed
        if not speed:
            return Text("")
        unit, suffix = pick_unit_and_suffix(int(speed), ["B", "KiB", "MiB", "GiB", "TiB"], 1024)
        return Text(f"{speed / unit:.1f} {suffix}/s", style="progress.data.speed")
