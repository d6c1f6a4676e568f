"""Ctrl-C, or a signal handler that raises, at any moment of a call."""

from __future__ import annotations

import dis
import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest

# After these CPython looks whether a signal has come, and only then runs its handler (ceval.c): where a function begins, a loop turns
# back, and a call of C has returned.
LOOKS = ("RESUME", "JUMP_BACKWARD", "POP_JUMP_BACKWARD", "CALL", "CALL_FUNCTION_EX", "CALL_KW")

needs_instructions = pytest.mark.skipif(
    sys.version_info >= (3, 13), reason="CPython 3.13 traces no instruction of a function that is entered for the first time"
)


def interrupted(call: Callable[[], Any], at: int, inside: tuple[str, ...], *, elsewhere: tuple[str, ...] = ()) -> bool:
    """Whether `call` was still running when KeyboardInterrupt was raised: the `at`th time that CPython looks for a signal.

    Args:
        call: of this thread.
        at: from 0.
        inside: paths of modules or packages; other code is not interrupted.
        elsewhere: of modules that are another process's; neither they nor what they call is interrupted.
    """
    looks = itertools.count()
    calls_of_python: set[int] = set()  # frames whose call was one: CPython looks as that begins, and not as it returns

    def entered(frame: Any, _event: str, _: Any) -> Any:
        if frame.f_back is not None and frame.f_code.co_name != "__init__":  # a class is called by C
            calls_of_python.add(id(frame.f_back))
        # What is raised in a __del__ is only printed.
        if not frame.f_code.co_filename.startswith(inside) or frame.f_code.co_name == "__del__" or is_elsewhere(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        moments = moments_of(frame.f_code)
        last = frame.f_lasti

        def before(frame: Any, event: str, _: Any) -> Any:
            nonlocal last
            if event == "opcode":
                done, last = last, frame.f_lasti
                is_python = id(frame) in calls_of_python
                calls_of_python.discard(id(frame))
                if not is_python and (done, last) in moments and next(looks) >= at:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return before

        return before

    def is_elsewhere(frame: Any) -> bool:
        while elsewhere and frame is not None:
            if frame.f_code.co_filename.startswith(elsewhere):
                return True
            frame = frame.f_back
        return False

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 asks only at settrace whether any has set it
    sys.settrace(entered)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


class Moments:
    """Between which two instructions of a function a signal's handler may raise.

    It raises at the first of the two, this test at the second: so not where another handler of exceptions begins or ends there.
    """

    def __init__(self, code: Any):
        bytecode = dis.Bytecode(code)
        self._names = {one.offset: one.opname for one in bytecode}
        self._ranges: list[Any] = list(getattr(bytecode, "exception_entries", ()))

    def __contains__(self, pair: tuple[int, int]) -> bool:
        first, second = pair
        return self._names.get(first, "").startswith(LOOKS) and self._handler(first) == self._handler(second)

    def _handler(self, offset: int) -> int | None:
        return next((one.target for one in self._ranges if one.start <= offset < one.end), None)


moments_of = functools.cache(Moments)
