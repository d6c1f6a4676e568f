"""raystate status: what the runs of a cluster are doing now."""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from raystate.cli.bars import wait_progress
from raystate.cli.console import JsonOption, count, out, print_json, size
from raystate.core.coordinator.context import step_text
from raystate.core.formats.errors import ConfigError, StepNotFoundError
from raystate.observe.metrics import samples
from raystate.observe.status import HostStatus
from raystate.storage.url import canonical_url

if TYPE_CHECKING:  # it loads Ray
    from raystate.actors.reporting import RunReport


def status(
    which: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="only the run on this storage, or of this name", show_default=False)
    ] = None,
    run: Annotated[str | None, typer.Option("--run", metavar="NAME", help="only runs of this name")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what the runs of a Ray cluster are doing: their newest steps, saves under way, and what each host holds.

    It asks the cluster of RAY_ADDRESS, or the one that runs on this machine, and changes nothing. raystate ls shows what lies in
    storage, also when no run is alive.

    \b
    Examples:
      raystate status                        all runs of the cluster
      raystate status gs://bucket/lm         one of them, by its storage
      raystate status lm                     or by its name
      RAY_ADDRESS=head:6379 raystate status --json
    """
    where = canonical_url(which) if which is not None else None
    with wait_progress("asking the Ray cluster", quiet=as_json):
        address = join_ray()
        from raystate.actors.reporting import run_reports

        reports = run_reports()
    chosen = [one for one in reports if (where in (None, one.storage) or which == one.run) and run in (None, one.run)]
    if as_json:
        print_json({"cluster": address, "runs": [_values(one) for one in chosen]})
        return
    if not chosen and (where is not None or run is not None):
        there = ", ".join(f"{one.run!r} on {one.storage}" for one in reports) or "none"
        what = " ".join(filter(None, [f"{run!r}" if run else "", f"named {which!r} or on {where}" if where else ""]))
        raise StepNotFoundError(f"there is no run {what} on the Ray cluster at {address}; its runs: {there}", path=where)
    if not chosen:
        out.print(f"no run on the Ray cluster at {address}")
    for number, report in enumerate(chosen):
        if number:
            out.print()
        if report.problem:
            out.print(f"[yellow]{escape(report.problem)}[/]")
            continue
        out.print(f"[bold]{escape(report.run)}[/]  {escape(report.storage)}")
        if report.status is None:
            out.print("waits: another run uses its storage")
        else:
            _show(report)


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


def _show(report: RunReport) -> None:
    run, owner = report.status, report.owner
    assert run is not None
    far = {(one.what, one.step): f"; {text}" for one in report.going if (text := one.text())}
    if run.end != "open":
        out.print(f"ends: {run.end}")
    elif run.recovery != "idle":
        restoring = "".join(text for (what, _), text in far.items() if what == "restoring")
        out.print(f"restores: {run.recovery}{restoring}")
    elif run.training:
        whose = f": Ray job {owner.job_id}, pid {owner.pid} on node {owner.node[:8]}" if owner is not None else ""
        out.print(f"trains on {count(run.world or 0, 'rank')}{whose}")
    else:
        out.print("no trainer is there; the run goes on from the newest step that is in memory or durable when a trainer joins")
    every = {0: "only of steps that become durable", 1: "every step"}.get(run.snapshot_every, f"every {run.snapshot_every} steps")
    out.print(
        f"newest steps: {step_text(run.newest_step)} trained, {step_text(run.memory_step)} in memory, {step_text(run.durable_step)} durable"
    )
    costs = ""
    if run.step_s and run.snapshot_s is not None:
        costs = f": it costs {run.snapshot_s * 1e3:.3g} ms, and a step takes {run.step_s * 1e3:.3g} ms"
    out.print(f"a snapshot {every}{costs}")
    for save in run.saves:
        tries = f", try {save.tries}" if save.tries > 1 else ""
        out.print(f"saving step {save.step}: {save.phase} for {save.since_s:.1f} s{tries}{far.get(('saving', save.step), '')}")
    table = Table(box=None, pad_edge=False, show_edge=False)
    for name in ("host", "ranks", "steps in memory", "", "heard of"):
        table.add_column(name, justify="left")
    for host in run.hosts:
        table.add_row(host.host[:8], _numbers(host.ranks), _numbers(host.steps), size(host.nbytes), _heard(host))
    if run.hosts:
        out.print(table)


def _numbers(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers)) or "-"


def _heard(host: HostStatus) -> str:
    return f"{host.silent_s:.1f} s ago" if host.up else f"[red]{escape(host.why_down)}[/]"
