"""What the demo shows a person: a line at each quarter of a run, tables at the end, and a picture of it all."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, SVG_EXPORT_THEME

WIDTH = 80  # characters, of a log and of the picture

# (what was killed, after which step, the tier it came back from, at which step, seconds to the next new step, steps repeated)
Struck = tuple[str, int, str, int, float, int]


class View:
    """Lines, on the terminal or in a log, and in a picture."""

    def __init__(self) -> None:
        self.console = Console()
        if not self.console.is_terminal:
            self.console.width = WIDTH
        self._picture = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
        self._quarters: dict[str, int] = {}  # of each run, that were told

    def say(self, *what: object) -> None:
        """Print lines or tables."""
        for console in (self.console, self._picture):
            console.print(*what, highlight=False)

    def move(self, name: str, step: int, steps: int) -> None:
        """A run has come so far. The picture is spared this."""
        quarter = 4 * step // steps
        if self._quarters.get(name, 0) < quarter < 4:
            self._quarters[name] = quarter
            self.console.print(f"        {name}: step {step} of {steps}", highlight=False)

    def save_svg(self, path: Path) -> None:
        """All that was said, as it looks in a light terminal, and beside it in a dark one.

        The pictures fetch no fonts from elsewhere, as rich's own would.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        for at, theme in ((path, DEFAULT_TERMINAL_THEME), (path.with_stem(f"{path.stem}-dark"), SVG_EXPORT_THEME)):
            picture = self._picture.export_svg(title="make demo", theme=theme, clear=False)
            at.write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL))


def plain_table(title: str) -> Table:
    """Readable in a log, too."""
    return Table(title=f"\n{title}", title_justify="left", title_style="bold", box=None, padding=(0, 1))


def kills_table(struck: list[Struck]) -> Table:
    """What was killed and what followed. At most 80 characters wide, as the others."""
    table = plain_table("kill -9 in mid-run")
    for column in ("killed", "after step", "came back from", "at step", "next new step", "repeated"):
        table.add_column(column, justify="left" if column in ("killed", "came back from") else "right", no_wrap=True)
    for what, at_step, tier, start, seconds, repeated in struck:
        table.add_row(what, str(at_step), tier, str(start), f"{seconds:.1f} s", str(repeated))
    return table


def ends_table(rows: list[tuple[str, str, str]], *, full: bool) -> Table:
    """(what, undisturbed, killed) of what the two runs have come to; in words, or with the values."""
    if full:
        table = plain_table("the end of the run")
        for column in ("", "undisturbed", "killed twice", "equal"):
            table.add_column(column, no_wrap=True)
    else:
        table = plain_table("the end of both runs")
        for column in ("", "equal to the last bit"):
            table.add_column(column, no_wrap=True)
    for name, a, b in rows:
        equal = "[green]yes[/]" if a == b else "[bold red]NO[/]"
        table.add_row(name, *([a, b] if full else []), equal)
    return table
