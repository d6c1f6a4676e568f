"""What snapshots and restores cost on this machine's accelerator, beside Orbax; the most important figures first.

    python benchmarks/accelerator.py --out figures.json              all that the time allows
    python benchmarks/accelerator.py --quick                         small states: shows that it runs
    python benchmarks/accelerator.py --parts correct limits          some of it

Each figure is printed and in the file as soon as it is known, so an interrupted run keeps what it has. What a package is missing for
is left out. Everything but `kill` runs without Ray.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PARTS = ("correct", "limits", "states", "kill")
# (MiB, arrays, dtype), the most telling first.
STATES = [
    (2048, 16, "float32"),
    (8192, 16, "float32"),
    (8192, 500, "bfloat16"),
    (2048, 500, "float32"),
    (32768, 500, "float32"),
    (32768, 16, "bfloat16"),
]
QUICK_STATES = [(8, 16, "float32"), (8, 50, "bfloat16")]


def main() -> int:
    """Exit status 0: all that began was measured; 1: a part has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small states and short steps")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "accelerator.json", help="file of the figures")
    parser.add_argument("--limit-s", type=float, default=480.0, help="after so many seconds nothing new begins")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--step-s", type=float, default=0.5, help="of a step")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")

    from benchmarks.device.figures import Figures
    from benchmarks.device.here import described

    figures = Figures(args.out, args.limit_s)
    figures.machine(described())
    found: dict[str, float] = {}
    if "correct" in args.parts:
        from benchmarks.device.correct import correct

        figures.part("correct", lambda: correct(figures, mib=1 if args.quick else 512, steps=5 if args.quick else 100))
    if "limits" in args.parts:
        from benchmarks.device.limits import limits

        figures.part("limits", lambda: found.update(limits(figures, 16 if args.quick else 2048)))
    if "states" in args.parts:
        from benchmarks.device.staging import staging
        from benchmarks.device.work import Case

        for mib, arrays, dtype in QUICK_STATES if args.quick else STATES:
            case = Case(mib=mib, arrays=arrays, dtype=dtype)
            figures.part(
                case.name,
                functools.partial(
                    staging,
                    figures,
                    case,
                    step_s=0.02 if args.quick else args.step_s,
                    rounds=1 if args.quick else args.rounds,
                    every=3 if args.quick else 20,
                    snapshots=(1, 3) if args.quick else (1, 10, 100),
                    limits=found,
                ),
            )
    if "kill" in args.parts:
        from benchmarks.device.kill import kill

        figures.part("kill -9 of the trainer", lambda: kill(figures, quick=args.quick))
    print(f"{figures.taken_s:.0f} s; the figures are in {args.out}")
    return int(bool(figures.failed))


if __name__ == "__main__":
    sys.exit(main())
