"""`raystate`: the command, in this process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raystate.cli import main

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def raystate(capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """Takes the arguments, and environment variables by name; gives (exit code, standard output, standard error)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        patch.setenv("TZ", "UTC")
        time.tzset()

        def run(*arguments: object, **environment: str) -> tuple[int, str, str]:
            for name, value in environment.items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", ["raystate", *map(str, arguments)])
            code: Any = 0
            try:
                main()
            except SystemExit as ended:
                code = ended.code
            said = capsys.readouterr()
            return code or 0, said.out, said.err

        yield run
    time.tzset()
