"""The chart: for each figure raystate and the peers, as multiples of the faster Orbax, with the goal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.side.machine import said
from benchmarks.side.rows import Row

COLOURS = {"raystate": "#1f6f54", "Orbax v0": "#d08a2e", "Orbax v0, uncompressed": "#e7bf86", "Orbax v1": "#8f6fae"}
OTHER = "#999999"


def draw(rows: list[Row], machine: dict[str, Any], folder: Path) -> list[Path]:
    """Write bench.png and bench.svg into a folder. Raises ImportError without matplotlib (`pip install 'raystate[bench]'`)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in rows if row.peers and row.unit == "ms" and row.ours["median"] > 0]
    figure, axes = pyplot.subplots(figsize=(11, 1.6 + 0.62 * max(1, len(shown))))
    height = 0.8 / 4
    for number, row in enumerate(shown):
        base = min(peer["median"] for peer in row.peers.values())
        bars = [("raystate", row.ours), *row.peers.items()]
        for place, (name, value) in enumerate(bars):
            low, high = (value["median"] - value["low"]) / base, (value["high"] - value["median"]) / base
            axes.barh(
                number + (place - 1.5) * height, value["median"] / base, height, xerr=[[low], [high]],
                color=COLOURS.get(name, OTHER), label=name if not number else None, error_kw={"lw": 0.8, "alpha": 0.6},
            )  # fmt: skip
            axes.annotate(
                f"{value['median']:,.0f} ms" if value["median"] >= 10 else f"{value['median']:.1f} ms",
                (value["high"] / base, number + (place - 1.5) * height), xytext=(3, 0), textcoords="offset points",
                va="center", fontsize=6,
            )  # fmt: skip
        for goal in row.goals:
            if reached := row.base(goal):
                axes.plot([goal.times * reached / base] * 2, [number - 0.42, number + 0.42], color="black", lw=1, ls=":")
    axes.set_yticks(range(len(shown)), [f"{row.figure}\n{row.case}" for row in shown], fontsize=7)
    axes.set_xscale("log")
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xlabel("multiples of the fastest peer's median (smaller is better); bars: lowest to highest; dotted: goal", fontsize=8)
    axes.set_title(said(machine), fontsize=7, loc="left")
    if shown:
        axes.legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    paths = [folder / "bench.png", folder / "bench.svg"]
    for path in paths:
        figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return paths
