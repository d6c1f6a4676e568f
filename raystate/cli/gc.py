"""raystate gc: remove what crashed attempts left."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer
from rich.markup import escape

from raystate.cli.bars import byte_progress, count_progress
from raystate.cli.console import JsonOption, StorageArgument, count, out, print_json, size
from raystate.core.formats.errors import StepNotFoundError
from raystate.storage import assume_dead, find_garbage, is_missing, open_storage, remove_garbage, why_empty
from raystate.storage.names import STATE


def gc(
    storage: StorageArgument,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only list what would be removed")] = False,
    dead: Annotated[
        list[int] | None,
        typer.Option(
            "--assume-dead",
            metavar="ATTEMPT",
            help="treat this older attempt as dead, and close what it left unfinished; repeatable",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Remove unfinished saves of crashed attempts, and what is left of retired steps.

    It never touches live steps, steps that were set aside, or saves that the newest attempt may still be writing. It is safe beside
    a training.

    \b
    Examples:
      raystate gc gs://bucket/lm --dry-run          what would go?
      raystate gc runs/lm                           remove it
      raystate gc runs/lm --assume-dead 3           attempt 3 is dead
    """
    run = open_storage(storage)
    if is_missing(run) or not run.list(STATE, recursive=False):
        why = why_empty(run) or f"there is no {STATE}/ in it, which every run has"
        raise StepNotFoundError(f"{run.url} is no run: {why}", path=run.url)
    for attempt in dead or []:
        if not dry_run:
            assume_dead(run, attempt)
    with count_progress(quiet=as_json) as progress:
        looking = progress.add_task("looking for what can go", total=None)
        found = find_garbage(run, on_found=lambda count: progress.update(looking, completed=count))
    total = sum(one.nbytes for one in found)
    if not as_json:
        for one in found:
            out.print(f"{size(one.nbytes):>10}  {escape(one.name)}  ({escape(one.why)})")
    if not dry_run:
        with byte_progress(quiet=as_json) as progress:
            removing = progress.add_task("removing", total=total)
            remove_garbage(run, found, on_bytes=lambda done: progress.update(removing, completed=done))
    if as_json:
        print_json(
            {
                "storage": run.url,
                "removed": not dry_run,
                "nbytes": total,
                "garbage": [dataclasses.asdict(one) for one in found],
            }
        )
        return
    verb, where = "would be removed" if dry_run else "removed", escape(run.url)
    out.print(f"{count(len(found), 'thing')}, {size(total)} {verb} from {where}" if found else f"nothing to remove in {where}")
