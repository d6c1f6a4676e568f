"""Break a training again and again, and see that it comes back.

A small but real JAX training runs on a Ray cluster, two ranks with peer copies, and faults of all kinds hit it, one after the other:
killed and stopped processes, lost and drained nodes, storage that fails or hangs, clocks that jump. After each the drill waits until the
run trains again by itself and what it trains is safe again, and checks that no promise was broken. At the end the state must have the
bits of a run that nobody disturbed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from jobs.drill.outcomes import Report
from jobs.drill.plan import BY_NAME, FIXED, KINDS, PHASES, Kind, faults
from jobs.drill.table import KIND_NAMES, WIDTH, show

HELD, BROKEN, BAD_USAGE = 0, 1, 2
EXAMPLES = """
examples:
  python -m jobs.drill --faults 8
        a simulated cluster on this machine, and eight faults
  python -m jobs.drill --faults 300 --seed 7 --json drill.json
        a soak: an hour or so on two idle cores
  python -m jobs.drill --faults 20 --kinds trainer,stop-host
        only these kinds
  python -m jobs.drill --faults 12 --seed 7 --plan
        print the faults that seed 7 names, and do nothing
  python -m jobs.drill --faults 26 --elastic
        of a run that goes on with one rank when it loses a node, and grows again
  python -m jobs.drill --faults 20 --address auto --storage gs://bucket/drill
        on a cluster of one's own: kills and stops the drill's own processes there

kinds of faults:
"""
EXITS = """
exit codes: 0 all faults recovered, the end bit-equal, no violation; 1 not so; 2 bad usage
"""


class UsageError(Exception):
    """The user's mistake, in a sentence."""


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    kinds = "\n".join(f"  {kind.name:17}{kind.what}" for kind in KINDS)
    made = argparse.ArgumentParser(
        prog="python -m jobs.drill",
        description=__doc__,
        epilog=f"{EXAMPLES}{kinds}\n{EXITS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--faults", type=int, required=True, metavar="N", help="how many faults must count")
    made.add_argument("--seed", type=int, default=0, metavar="S", help="names the sequence of faults, not their exact moments (0)")
    made.add_argument("--json", metavar="FILE", help="write the results there, too")
    made.add_argument("--kinds", metavar="A,B", help="only these kinds (all)")
    made.add_argument("--elastic", action="store_true", help="the run may shrink to one rank, and grows again; see below")
    made.add_argument("--plan", action="store_true", help="print the faults and do nothing")
    made.add_argument(
        "--address", metavar="HOST:PORT", help="of a Ray cluster of one's own, or auto; kinds that need more are left out"
    )
    made.add_argument("--storage", metavar="URL", help="with --address: a fresh folder of a shared directory, or gs://…")
    made.add_argument("--patience", type=float, default=120.0, metavar="S", help="seconds until the run must be back (120)")
    made.add_argument("--step-ms", type=float, default=30.0, metavar="MS", help="a step takes at least so long (30)")
    made.add_argument("--keep", metavar="FOLDER", help="keep storage and Ray's logs in a new folder in there")
    return made


def chosen(args: argparse.Namespace) -> tuple[list[Kind], dict[str, str]]:
    """(kinds to inject, kind -> why it is left out).

    Raises:
        UsageError: the arguments can't be used.
    """
    if args.faults < 1:
        raise UsageError(f"--faults {args.faults}: at least 1")
    if args.patience <= 0 or args.step_ms < 0:
        raise UsageError("--patience must be more than 0 and --step-ms at least 0")
    if args.json and not Path(args.json).absolute().parent.is_dir():
        raise UsageError(f"--json {args.json}: there is no such folder")
    names = [name.strip() for name in args.kinds.split(",")] if args.kinds else list(BY_NAME)
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        raise UsageError(f"--kinds: {', '.join(map(repr, unknown))}: there are {', '.join(BY_NAME)}")
    if (args.address is None) != (args.storage is None):
        raise UsageError("--address and --storage go together: all nodes of that cluster must reach the storage")
    kinds = [kind for kind in (KINDS if args.elastic else FIXED) if kind.name in names]
    if args.kinds and len(kinds) < len(names):
        raise UsageError(f"--kinds: {', '.join(name for name in names if BY_NAME[name] not in kinds)}: only with --elastic")
    if args.address is None:
        return kinds, {}
    left_out = {kind.name: kind.own_machine for kind in kinds if kind.own_machine}
    kinds = [kind for kind in kinds if kind.name not in left_out]
    if not kinds:
        raise UsageError(f"--kinds: none of these can be injected on another cluster: {', '.join(left_out)}")
    return kinds, left_out


def plan_lines(seed: int, kinds: list[Kind], number: int) -> list[str]:
    """The first faults of a seed."""
    return [
        f"{fault.number:4}  {fault.kind.name:17}{'when ' + fault.aim if fault.aim != 'any' else '':18}rank {fault.rank}"
        for fault, _ in zip(faults(seed, kinds), range(number), strict=False)
    ]


def run(args: argparse.Namespace, kinds: list[Kind], left_out: dict[str, str], console: Console) -> Report:
    """Start what is to be broken, and break it."""
    from ray import cloudpickle

    from jobs.drill import given, training
    from jobs.drill.cluster import NODES, Simulated, temporary_folder
    from jobs.drill.given import Given
    from jobs.drill.soak import Settings, Soak

    settings = Settings(
        faults=args.faults,
        seed=args.seed,
        kinds=kinds,
        left_out=left_out,
        patience_s=args.patience,
        step_s=args.step_ms / 1000,
        elastic=args.elastic,
    )

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(temporary_folder(args.keep))
        log = stack.enter_context(open(folder / "driver.log", "a"))  # Ray tells at length of each process that was killed
        stack.enter_context(contextlib.redirect_stdout(log))
        stack.enter_context(contextlib.redirect_stderr(log))
        machines: Any = Simulated(folder) if args.address is None else Given(args.address, args.storage)
        logging.getLogger("ray").setLevel(logging.ERROR)
        try:
            machines.start()
            address = machines.address
            _join(address)
            for module in (training, given):
                cloudpickle.register_pickle_by_value(module)
            where = f"a head and {NODES} nodes on this machine" if args.address is None else f"the cluster at {address}"
            say(f"Seed {args.seed}, {args.faults} faults, on {where}.")
            return Soak(machines, settings, folder, say).go()
        finally:
            if args.keep and args.address is None:
                machines.keep_logs()
            machines.close()


def _join(address: str) -> None:
    import ray

    try:
        ray.init(address=address, namespace="drill", log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray has no class for it
        raise UsageError(f"--address {address}: no Ray cluster can be joined there: {' '.join(str(error).split())}") from None


def check_fresh(storage: str) -> None:
    """Whether a run can begin there.

    Raises:
        UsageError: not there, or there are steps already.
    """
    import raystate

    try:
        steps = raystate.Reader(raystate.StateConfig(storage=storage, run="drill").storage).all_steps()
    except raystate.StepNotFoundError:  # nothing is there yet
        return
    except raystate.RaystateError as error:
        raise UsageError(f"--storage {storage}: {error}") from None
    if steps:
        raise UsageError(f"--storage {storage}: there are steps in it; a drill begins its own run in a fresh folder")


def main(argv: list[str] | None = None) -> int:
    """Parse, check, play, and say how it ended.

    Returns:
        The exit code.
    """
    args = parser().parse_args(argv)
    console = Console(file=sys.stdout)  # this one: what Ray prints goes elsewhere
    if not console.is_terminal or console.width > WIDTH:
        console.width = WIDTH
    try:
        kinds, left_out = chosen(args)
    except UsageError as error:
        print(error, file=sys.stderr)
        return BAD_USAGE
    if args.plan:
        print("\n".join(plan_lines(args.seed, kinds, args.faults)))
        return HELD
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        if args.storage is not None:
            check_fresh(args.storage)
        report = run(args, kinds, left_out, console)
    except UsageError as error:
        print(error, file=sys.stderr)
        return BAD_USAGE
    if args.json:
        Path(args.json).write_text(json.dumps(report.facts(KIND_NAMES, PHASES), indent=1) + "\n")
    show(console, report)
    return HELD if report.held else BROKEN


if __name__ == "__main__":
    sys.exit(main())
