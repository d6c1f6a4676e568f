"""What export and import have in common."""

from __future__ import annotations

from rich.progress import TaskID

from raystate.arena import parse_memory
from raystate.cli.bars import byte_progress
from raystate.core.formats.errors import ConfigError


def parse_size(text: str, option: str) -> int:
    """Bytes of "5GB", "500 MiB" or "1000000".

    Raises:
        ConfigError: it is no size.
    """
    try:
        return parse_memory(text, total_bytes=0)  # so that no percentage is one
    except ConfigError:
        message = f"--{option}: expected a size such as 5GB or 500MB, not {text!r}"
        raise ConfigError(message, field=option, got=text) from None


class TransferBar:
    """A bar with rate for each phase of a transfer.

    Args:
        quiet: there is none.
    """

    def __init__(self, *, quiet: bool):
        self._bar = byte_progress(quiet=quiet)
        self._task: tuple[str, TaskID] | None = None

    def __enter__(self) -> TransferBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, what: str, done: int, total: int) -> None:
        """What goes on, and how many bytes of it are done."""
        if self._task is None or self._task[0] != what:
            if self._task is not None:
                self._bar.remove_task(self._task[1])
            self._task = (what, self._bar.add_task(what, total=total))
        self._bar.update(self._task[1], completed=done, total=total)
