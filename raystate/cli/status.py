"""raystate status: what the runs of a cluster are doing now."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape

from raystate.cli.bars import wait_progress
from raystate.cli.console import JsonOption, out, print_json, progress_out
from raystate.cli.status_stored import StoredRun, stored_block, stored_run
from raystate.cli.status_view import run_block
from raystate.core.formats.errors import ConfigError, RaystateError, StepNotFoundError
from raystate.observe.metrics import samples
from raystate.observe.status import RunReport
from raystate.storage.url import canonical_url
from raystate.waits import LOOK_EVERY_S


def status(
    which: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="only the run on this storage, or of this name", show_default=False)
    ] = None,
    run: Annotated[str | None, typer.Option("--run", metavar="NAME", help="only runs of this name")] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="show it again and again, until Ctrl-C")] = False,
    every: Annotated[
        float, typer.Option("--every", metavar="SECONDS", min=0.2, max=3600, help="with --watch: seconds between two refreshes")
    ] = LOOK_EVERY_S,
    as_json: JsonOption = False,
) -> None:
    """Show what the runs of a Ray cluster are doing: whether they are safe now, their newest steps, saves under way, and each host.

    It asks the cluster of RAY_ADDRESS, or the one that runs on this machine, and changes nothing. Without a cluster, or for a run
    that is not on it, it says what the run's storage knows.

    \b
    Examples:
      raystate status                        all runs of the cluster
      raystate status gs://bucket/lm         one of them, by its storage
      raystate status lm --watch             or by its name, again and again
      RAY_ADDRESS=head:6379 raystate status --json
    """
    where = canonical_url(which) if which is not None else None

    def chosen(reports: Sequence[RunReport]) -> list[RunReport]:
        return [one for one in reports if (where in (None, one.storage) or which == one.run) and run in (None, one.run)]

    if watch:
        _watch(which, chosen, every, as_json=as_json)
        return
    try:
        with wait_progress("asking the Ray cluster", quiet=as_json):
            address = join_ray()
            from raystate.actors.reporting import run_reports

            reports = run_reports()
    except ConfigError as error:
        if which is None or run is not None or (found := _look_for(which)) is None:
            raise
        _show_stored(found, error.message, as_json=as_json)
        return
    found_here = chosen(reports)
    if not found_here and which is not None and run is None and (found := _look_for(which)) is not None:
        _show_stored(found, f"no run on the Ray cluster at {address} uses it", as_json=as_json, cluster=address)
        return
    if as_json:
        print_json({"cluster": address, "runs": [_values(one) for one in found_here]})
        return
    if not found_here and (where is not None or run is not None):
        there = ", ".join(f"{one.run!r} on {one.storage}" for one in reports) or "none"
        what = " ".join(filter(None, [f"{run!r}" if run else "", f"named {which!r} or on {where}" if where else ""]))
        raise StepNotFoundError(f"there is no run {what} on the Ray cluster at {address}; its runs: {there}", path=where)
    if not found_here:
        out.print(f"no run on the Ray cluster at {address}")
    for number, report in enumerate(found_here):
        if number:
            out.print()
        out.print(run_block(report, full=True))


def _watch(which: str | None, chosen: Callable[[Sequence[RunReport]], list[RunReport]], every_s: float, *, as_json: bool) -> None:
    from raystate.cli.watching import Screen, watch

    if as_json:
        raise ConfigError("--watch shows a screen: a script asks raystate status --json again and again", field="watch", got=True)
    watch(Screen(which, chosen, every_s), every_s)


def _look_for(which: str) -> StoredRun | None:
    """The run as storage knows it; None: not at all, or it can't be read, which is said: that there is no Ray is another matter."""
    try:
        return stored_run(which)
    except RaystateError as error:
        progress_out.print(f"raystate: {escape(error.message)}", soft_wrap=True)
        return None


def _show_stored(found: StoredRun, why: str, *, as_json: bool, cluster: str | None = None) -> None:
    """Exit code 1 if something of it is damaged."""
    if as_json:
        print_json({"cluster": cluster, "runs": [], "stored": dataclasses.asdict(found)})
    else:
        out.print(stored_block(found, why))
    if found.damaged:
        raise typer.Exit(1)


def join_ray() -> str:
    """The address of the cluster that there is."""
    import ray

    from raystate.actors.local_ray import check_address, why_not_joined
    from raystate.actors.ray_discovery import strangers_ray

    address = os.environ.get("RAY_ADDRESS")
    if not address and (stranger := strangers_ray()) is not None:
        text = (
            f"the Ray at {stranger.address} is of user {stranger.user}. Set RAY_ADDRESS={stranger.address} to ask it all the same"
        )
        raise ConfigError(text, field="RAY_ADDRESS", got=address)
    try:
        check_address()
        ray.init(address or "auto", logging_level=logging.ERROR, log_to_driver=False)
    except Exception as error:  # Ray has no class for it
        text = why_not_joined(error, "no Ray cluster runs on this machine, and RAY_ADDRESS=host:port names none")
        raise ConfigError(text, field="RAY_ADDRESS", got=address) from None
    return str(ray.get_runtime_context().gcs_address)


def _values(report: RunReport) -> dict[str, Any]:
    metrics = samples(report.status) if report.status is not None else ()
    return {**dataclasses.asdict(report), "metrics": [dataclasses.asdict(one) for one in metrics]}
