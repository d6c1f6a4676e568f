"""Goals for the figures of an H100 with half-second steps (issue 48, *With a device*)."""

from __future__ import annotations

from benchmarks.side.states import Case

GIB = 1024


def held(name: str, value: float, case: Case | None = None) -> list[str]:
    """How a figure stands to its goal; empty where it has none. CPU devices have none."""
    import jax

    if jax.devices()[0].platform == "cpu":
        return []
    at_most, at_least = _of_a_state(name, case) if case else _of_the_machine(name)
    if at_most is not None:
        return [f"{'met' if value <= at_most else 'NOT MET'}: <= {at_most:g}"]
    return [] if at_least is None else [f"{'met' if value >= at_least else 'NOT MET'}: >= {at_least:g}"]


def _of_the_machine(name: str) -> tuple[float | None, float | None]:
    """(at most, at least)."""
    if name == "registering a slot in pieces of 256 MiB":
        return 1.0, None
    if name == "longest launch of a small program, registering in pieces of 256 MiB, with pauses":
        return 60.0, None
    return (5.0, None) if name == "kill -9 -> next new step" else (None, None)


def _of_a_state(name: str, case: Case) -> tuple[float | None, float | None]:
    is_large, is_8_gib = case.mib > 8 * GIB, case.mib == 8 * GIB
    match name:
        case "blocked by the first save":
            return (0.2 if is_large else 0.1), None
        case "blocked by the first save, no room on the device":
            return (0.8 if is_large else 0.3), None
        case "blocked in save, the state computed":
            return (1.5 if case.arrays <= 16 else 6.0), None
        case "copy of a snapshot":
            return None, 50.0
        case "throughput with a snapshot of each step / without":
            return None, 0.98 if case.mib < 8 * GIB else 0.96
        case "throughput with snapshots by default / without":
            return None, 0.97
        case "restore slot -> device" if is_8_gib:
            return 0.4, None
        case "restore storage -> device" if is_8_gib:
            return 2.0, None
    return (GIB, None) if name.startswith("host memory beside the slots") else (None, None)
