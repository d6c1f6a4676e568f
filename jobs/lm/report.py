"""What the job tells a person: a line now and then, a table at the end. Only rank 0 speaks."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator


class Report:
    """Progress of one attempt.

    Args:
        steps: of the whole run.
        start: completed steps at the beginning of this attempt.
        batch_bytes: bytes (the model's tokens) of a step over all processes.
        enabled: False on all ranks but 0.
    """

    def __init__(self, *, steps: int, start: int, batch_bytes: int, enabled: bool):
        self._steps, self._batch_bytes, self._enabled = steps, batch_bytes, enabled
        self._mark_s, self._mark_step = time.perf_counter(), start

    def say(self, line: str) -> None:
        """Not with print(): Ray Train replaces it in workers with one that says everything twice where stdout is redirected."""
        if self._enabled:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    def started(self, step: int) -> None:
        """The first step of this attempt is done: compilation and start-up are not part of the speed."""
        self._mark_s, self._mark_step = time.perf_counter(), step

    def log(self, step: int, loss: float, *, durable: int | None) -> None:
        """`loss` in nats per byte."""
        now_s = time.perf_counter()
        speed = (step - self._mark_step) * self._batch_bytes / max(now_s - self._mark_s, 1e-9)
        rate = f"{speed / 1000:5.1f}k tokens/s" if step > self._mark_step else " " * 15
        self._mark_s, self._mark_step = now_s, step
        saved = "-" if durable is None else durable
        self.say(f"{self._head(step)}  loss {loss:7.4f}  {loss / math.log(2):6.3f} bits/byte  {rate}  saved {saved}")

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """The time of the block does not count as training: it is an evaluation."""
        began_s = time.perf_counter()
        yield
        self._mark_s += time.perf_counter() - began_s

    def validation(self, step: int, bits: float, *, zlib_bits: float, entropy_bits: float) -> None:
        self.say(
            f"{self._head(step)}  validation {bits:6.3f} bits/byte    zlib -9 {zlib_bits:.3f}    byte entropy {entropy_bits:.3f}"
        )

    def table(self, rows: list[tuple[str, str]]) -> None:
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            self.say(f"  {name:<{width}}  {value}")

    def _head(self, step: int) -> str:
        width = len(str(self._steps))
        return f"step {step:>{width}}/{self._steps}"
