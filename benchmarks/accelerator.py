"""What snapshots and restores cost on this machine's accelerator, beside Orbax; the most important figures first.

    python benchmarks/accelerator.py --out figures.json --minutes 9
    python benchmarks/accelerator.py --quick                  small states, on CPU devices too: shows that it runs
    python benchmarks/accelerator.py --parts kill "8 GiB in 16 arrays, float32"    some of it; --help names all
    python benchmarks/accelerator.py --table figures.json     the figures of an earlier run as a table

Each figure is printed and in the file as soon as it is known, so an interrupted run keeps what it has. Each part is a process of its own
with a time limit. A part that no longer fits into the minutes is left out, and so is what a missing package is needed for. Everything
but `kill` runs without Ray.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.side.figures import OFF, Figures, Teller, table  # noqa: E402
from benchmarks.side.savers import OTHERS  # noqa: E402
from benchmarks.side.states import Case  # noqa: E402


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One process. `least_s`: a part is not begun with less than that left; `most_s`: it is killed then."""

    name: str
    least_s: float
    most_s: float
    case: Case | None = None

    @property
    def names(self) -> set[str]:
        """What `--parts` chooses it by."""
        return {self.name, "states"} if self.case else {self.name}


def state(mib: int, arrays: int, dtype: str, least_s: float, most_s: float, *, others: bool = False) -> Part:
    case = Case(mib=mib, arrays=arrays, dtype=dtype, without=() if others else tuple(OTHERS))
    return Part(name=case.name, least_s=least_s, most_s=most_s, case=case)


# Figures that decide about the rest first: without the driver's part nothing is as fast. Orbax beside the larger ones would take it all.
PARTS = [
    Part(name="driver", least_s=20, most_s=90),
    Part(name="correct", least_s=20, most_s=60),
    Part(name="limits", least_s=20, most_s=30),
    state(8192, 500, "bfloat16", 40, 90),
    state(2048, 16, "float32", 40, 60),
    state(24576, 16, "float32", 60, 120),
    Part(name="kill", least_s=60, most_s=200),
    state(8192, 16, "float32", 60, 150, others=True),
    state(2048, 500, "float32", 30, 60),
]
QUICK = [
    Part(name="driver", least_s=1, most_s=600),
    Part(name="correct", least_s=1, most_s=600),
    Part(name="limits", least_s=1, most_s=600),
    state(8, 16, "float32", 1, 600, others=True),
    state(8, 50, "bfloat16", 1, 600),
    Part(name="kill", least_s=1, most_s=600),
]


def main() -> int:
    """Exit status 0: all was measured; 1: a part has failed or was left out; 2: bad usage, or no accelerator."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small states and short steps")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "accelerator.json", help="file of the figures")
    parser.add_argument("--minutes", type=float, help="for all of it; nine, with --quick an hour")
    parts = sorted({name for part in PARTS + QUICK for name in part.names})
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, metavar="PART", help=", ".join(map(repr, parts)))
    parser.add_argument("--step-s", type=float, default=0.5, help="of a step")
    parser.add_argument("--table", type=Path, metavar="FILE", help="only print the figures in FILE, as a table")
    parser.add_argument("--one", nargs=3, metavar=("PART", "S", "FOLDER"), help=argparse.SUPPRESS)  # in its own process
    parser.add_argument("--pinned-gb-s", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--gpu", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.table.read_text())))
        return 0
    return one(args) if args.one else every(args)


def every(args: argparse.Namespace) -> int:
    """All parts, one after the other."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the part's process ends, too
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figures = Figures(args.out, 60 * (args.minutes or (60 if args.quick else 9)))
    command = [sys.executable, str(Path(__file__).resolve()), "--step-s", str(args.step_s), *(["--quick"] if args.quick else [])]
    if not figures.part("machine", [*command, "--one", "machine"], least_s=0, most_s=600):
        return 1
    platform = figures.content["machine"]["platform"]
    if platform == "cpu" and not args.quick:
        print("JAX sees no accelerator here: only --quick runs on CPU devices", file=sys.stderr)
        return 2
    known = ["--gpu"] if platform == "gpu" else []
    for part in QUICK if args.quick else PARTS:
        if not part.names.isdisjoint(args.parts):
            figures.part(part.name, [*command, *known, "--one", part.name], least_s=part.least_s, most_s=part.most_s)
        if part.name == "limits" and (pinned := figures.of(OFF)):
            known += ["--pinned-gb-s", str(pinned)]
    figures.finish()
    print(f"{figures.taken_s:.0f} s; the figures are in {args.out}")
    return int(bool(figures.content["failed"]))


def one(args: argparse.Namespace) -> int:
    """One part, in this process."""
    from benchmarks.side.process import end_with_parent

    end_with_parent()
    name, limit_s, folder = args.one
    tell, quick = Teller(float(limit_s)), args.quick
    try:
        if name == "machine":
            from benchmarks.device.here import described

            tell.tell(machine=described())
        elif name == "correct":
            from benchmarks.device.correct import correct

            correct(tell, mib=1 if quick else 512, steps=5 if quick else 100)
        elif name == "driver":
            from benchmarks.device.by_driver import by_driver

            by_driver(tell, slot_mib=64 if quick else 8192, mib=16 if quick else 2048)
        elif name == "limits":
            from benchmarks.device.limits import limits

            limits(tell, 16 if quick else 2048)
        elif name == "kill":
            from benchmarks.device.kill import kill

            kill(tell, quick=quick, gpu=args.gpu)
        else:
            from benchmarks.device.staging import Staging

            case = next(part.case for part in (QUICK if quick else PARTS) if part.name == name)
            assert case is not None
            Staging(tell, case, step_s=0.02 if quick else args.step_s, quick=quick).run(Path(folder), args.pinned_gb_s)
        tell.tell(done=True)
        status = 0
    except Exception as error:
        traceback.print_exc()
        tell.note(f"{name}: {type(error).__name__}: {str(error)[:500]}")
        status = 1
    sys.stderr.flush()
    os._exit(status)  # without waiting for threads of Orbax or a device's driver


if __name__ == "__main__":
    sys.exit(main())
