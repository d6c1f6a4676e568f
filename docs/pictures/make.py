"""Makes the bar chart and the dark form of each picture: `python docs/pictures/make.py`, after a change of a figure or a picture."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
# Light colour -> dark colour.
DARK = {
    "#ffffff": "#131416", "#f8fafc": "#1b1d21", "#f1f5f9": "#23272e", "#eef2ff": "#24264a", "#ecfdf5": "#0e3328",
    "#fff7ed": "#3b2a16", "#1f2937": "#e5e7eb", "#475569": "#b3becd", "#64748b": "#94a3b8", "#cbd5e1": "#4b5563",
    "#6366f1": "#818cf8", "#10b981": "#34d399", "#f97316": "#fb923c", "#047857": "#34d399", "#6b7280": "#9ca3af",
}  # fmt: skip
# docs/performance.md has them: seconds to the next new step and steps repeated, of raystate and of JaxTrainer with Orbax.
RECOVERIES = {
    "a small model": ((1.03, "0 to 6"), (13.7, "10")),
}
WIDTH, LEFT, PER_SECOND = 720, 24, 30


def bars() -> str:
    """The chart of the recoveries. Its letters are large: a phone shows it at half its size."""
    y, parts = 44, [_text(LEFT, 44, "Seconds from kill -9 to the next new step", 28, weight=700)]
    for model, (ours, theirs) in RECOVERIES.items():
        y += 58
        parts.append(_text(LEFT, y, model, 24, "#475569"))
        for name, (seconds, repeated), colour in (("raystate", ours, "#047857"), ("JaxTrainer + Orbax", theirs, "#6b7280")):
            y += 16
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{seconds * PER_SECOND:.0f}" height="40" rx="4" fill="{colour}"/>')
            y += 29
            inside = seconds > 10
            at = LEFT + 12 if inside else LEFT + seconds * PER_SECOND + 12
            parts.append(_text(at, y, name, 24, "#ffffff" if inside else "#1f2937", weight=600))
            after = LEFT + seconds * PER_SECOND + 12 if inside else at + 122
            parts.append(_text(after, y, f"{seconds:g} s, {repeated} redone", 24, weight=600))
            y += 11
    y += 46
    parts.append(_text(LEFT, y, "2 idle cores, CPU devices, rank 1 killed. Redone: steps trained twice.", 20, "#475569"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 24}" width="{WIDTH}" height="{y + 24}" role="img"\n'
        '     font-family="system-ui, \'DejaVu Sans\', Helvetica, Arial, sans-serif" fill="#1f2937">\n'
        "  <title>Seconds from kill -9 of a trainer to the next new step, beside JaxTrainer with Orbax</title>\n"
        f'  <rect width="{WIDTH}" height="{y + 24}" fill="#ffffff"/>\n  ' + "\n  ".join(parts) + "\n</svg>\n"
    )


def dark(picture: str) -> str:
    """The same with each colour's counterpart."""
    for light, other in DARK.items():
        picture = picture.replace(f'"{light}"', f'"<{other}>"')
    return picture.replace('"<', '"').replace('>"', '"')


def pictures() -> dict[str, str]:
    """What should lie beside this file, by name."""
    made = {"recovery.svg": bars()} | {name: (HERE / name).read_text() for name in ("processes.svg", "save.svg")}
    return made | {name.replace(".svg", "-dark.svg"): dark(text) for name, text in made.items()}


def _text(x: float, y: float, text: str, size: int, fill: str = "#1f2937", weight: int = 400) -> str:
    return f'<text x="{x:.0f}" y="{y}" font-size="{size}" font-weight="{weight}" fill="{fill}">{text}</text>'


if __name__ == "__main__":
    for name, text in pictures().items():
        (HERE / name).write_text(text)
