"""raystate rm: delete a run, or one of its steps."""

from __future__ import annotations

import os
from typing import Annotated

import typer
from rich.markup import escape

from raystate.cli.bars import wait_progress
from raystate.cli.console import StorageArgument, count, out
from raystate.cli.status import join_ray
from raystate.core.formats.errors import ConfigError
from raystate.storage import open_storage
from raystate.transfer.removing import name_of_run, remove_run, remove_step, steps_of_run


def rm(
    storage: StorageArgument,
    step: Annotated[int | None, typer.Option("--step", metavar="N", min=0, help="only this step")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="don't ask")] = False,
) -> None:
    """Delete a run with all its steps, or one of its steps.

    It refuses while the run trains on the Ray cluster of RAY_ADDRESS, or on one of this machine. If the training has ended, that
    cluster may still hold snapshots of the run. They are deleted, too; with --step raystate makes them durable first. A run that
    trains on another cluster can't save any more, and says so.

    It keeps and names files beside the steps that are not the run's. All that
    lies in the folder of a step, or in .raystate, goes with it.

    \b
    Examples:
      raystate rm runs/lm                  delete the run, to begin anew
      raystate rm gs://bucket/lm --step 1200 --yes
    """
    run = open_storage(storage)
    steps = steps_of_run(run)
    what = f"step {step}" if step is not None else f"the run with {count(len(steps), 'step')}"
    if not yes and not typer.confirm(f"Delete {what} of {run.url}?"):
        raise typer.Exit(1)
    with wait_progress("asking the Ray cluster", quiet=False):
        seen = _free_on_ray(run.url, name_of_run(run), keep=step is not None)
    left: tuple[str, ...] = ()
    if step is not None:
        remove_step(run, step)
    else:
        left = remove_run(run)
    out.print(f"{escape(run.url)}: {what} is deleted")
    if left:
        out.print(f"what is not the run's stays: {escape(', '.join(left[:5]))}{' …' if len(left) > 5 else ''}")
    if not seen:
        out.print("no Ray cluster was found from here: a run that trains elsewhere can't save any more")


def _free_on_ray(url: str, name: str | None, *, keep: bool) -> bool:
    """End what a Ray cluster that can be seen holds of the runs on a storage. False: there is no cluster.

    Args:
        name: of the run; None: it can't be read.
        keep: make it durable first.

    Raises:
        RunInUseError: one of them trains, or does not answer.
        ConfigError: RAY_ADDRESS names a cluster that can't be joined.
    """
    try:
        join_ray()
    except ConfigError:
        if os.environ.get("RAY_ADDRESS"):
            raise
        return False
    import ray

    from raystate.actors.release import free_storage

    try:
        free_storage(url, name, keep=keep)
    finally:
        ray.shutdown()
    return True
