"""Cost of `with manager.section("data")` in a loop: microseconds, the best of many rounds, since others use the cores, too.

python benchmarks/sections.py [--rounds N]
"""

from __future__ import annotations

import argparse
import sys
import time
import timeit
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from raystate import StateManager  # noqa: E402
from raystate.manager.spent import Spent  # noqa: E402

CALLS = 200  # in a round
GOAL_US = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3000)
    rounds = parser.parse_args().rounds
    manager = StateManager.__new__(StateManager)  # in no run: a section without a time-out asks no other process
    vars(manager)["_session"] = SimpleNamespace(spent=Spent(time.monotonic))
    vars(manager)["_pipeline"] = None

    def one() -> None:
        with manager.section("data"):
            pass

    def nested() -> None:
        with manager.section("data"), manager.section("tokens"):
            pass

    for what, call in (("a section", one), ("a section in a section, both", nested)):
        print(f"{what}: {min(timeit.repeat(call, number=CALLS, repeat=rounds)) / CALLS * 1e6:.2f} us")
    print(f"the goal is less than {GOAL_US:g} us for each")


if __name__ == "__main__":
    main()
