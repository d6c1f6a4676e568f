"""What the job tells a person: one progress bar, one line now and then, a table at the end. Only rank 0 speaks."""

from __future__ import annotations

import math
import sys
import time
from typing import Any


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
        self._bar: Any = _bar(steps, start) if enabled else None  # tqdm's or Ray's
        self._print = _printer()
        self._mark_s, self._mark_step = time.perf_counter(), start
        self._drawn_step = start
        self._no_refresh = () if under_ray() else (False,)  # drawing belongs to update(), which limits how often

    def say(self, line: str) -> None:
        if self._enabled:
            self._print(line)

    def started(self, step: int) -> None:
        """The first step of this attempt is done: compilation and start-up are not part of the speed."""
        self._mark_s, self._mark_step = time.perf_counter(), step

    def step(self, step: int, *, durable: int | None, snapshot: int | None) -> None:
        """Move the bar; its description tells which steps are safe where."""
        if self._bar is None:
            return
        text = f"train  saved {_or_dash(durable)}  in memory {_or_dash(snapshot)}"
        self._bar.set_description(text, *self._no_refresh)
        self._bar.update(step - self._drawn_step)
        self._drawn_step = step

    def log(self, step: int, loss: float, *, durable: int | None) -> None:
        """`loss` in nats per byte."""
        now_s = time.perf_counter()
        speed = (step - self._mark_step) * self._batch_bytes / max(now_s - self._mark_s, 1e-9)
        rate = f"{_thousands(speed):>6} tokens/s" if step > self._mark_step else " " * 15
        self._mark_s, self._mark_step = now_s, step
        bits = loss / math.log(2)
        self.say(f"{self._head(step)}  loss {loss:7.4f}  {bits:6.3f} bits/byte  {rate}  saved {_or_dash(durable)}")

    def pause(self) -> Any:
        """A context whose time does not count as training (an evaluation)."""
        return _Pause(self)

    def validation(self, step: int, bits: float, *, zlib_bits: float, entropy_bits: float) -> None:
        self.say(
            f"{self._head(step)}  validation {bits:6.3f} bits/byte    zlib -9 {zlib_bits:.3f}    byte entropy {entropy_bits:.3f}"
        )

    def table(self, rows: list[tuple[str, str]]) -> None:
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            self.say(f"  {name:<{width}}  {value}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _head(self, step: int) -> str:
        width = len(str(self._steps))
        return f"step {step:>{width}}/{self._steps}"


class _Pause:
    def __init__(self, report: Report):
        self._report = report

    def __enter__(self) -> None:
        self._began_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._report._mark_s += time.perf_counter() - self._began_s


def _or_dash(step: int | None) -> str:
    return "-" if step is None else str(step)


def _thousands(value: float) -> str:
    return f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}"


def under_ray() -> bool:
    """Whether this process is connected to Ray. Doesn't import it."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def _bar(steps: int, start: int) -> Any:
    # A plain bar of a worker would reach the job's log as thousands of half lines; Ray's is drawn by the driver.
    if under_ray():
        from ray.experimental import tqdm_ray

        bar = tqdm_ray.tqdm(desc="train", total=steps, unit="step")
        if start:
            bar.update(start)
        return bar
    from tqdm import tqdm

    return tqdm(total=steps, initial=start, desc="train", unit="step", disable=None, dynamic_ncols=True)


def _printer() -> Any:
    if under_ray():
        # Not print(): Ray Train replaces it in workers with one that says everything twice where stdout is redirected.
        def write(line: str) -> None:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

        return write
    from tqdm import tqdm

    return lambda line: tqdm.write(line, file=sys.stdout)
