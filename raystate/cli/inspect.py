"""raystate inspect: what a step holds."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.markup import escape

from raystate.cli.bars import count_progress, wait_progress, watched
from raystate.cli.choosing import MOST_ROWS, AllOption, FilterOption, ItemOption, path_filter
from raystate.cli.console import (
    JsonOption,
    NewestStepArgument,
    StorageArgument,
    count,
    figure,
    out,
    print_json,
    progress_out,
    size,
    step_or_latest,
    when,
)
from raystate.core.formats.errors import ConfigError, CorruptCheckpointError
from raystate.inspection.metadata import ArrayMetadata, StepMetadata, StoredArray, bytes_of_items, look
from raystate.inspection.places import Checkpoints

_BEGINNINGS = 5  # that are named where nothing matches

Found = dict[str, dict[str, ArrayMetadata]]  # item -> name -> array


class InspectSort(StrEnum):
    as_in_tree = "tree"
    by_size = "size"


def inspect(
    storage: StorageArgument,
    step: NewestStepArgument = "latest",
    item: ItemOption = None,
    glob: FilterOption = None,
    sort: Annotated[InspectSort, typer.Option("--sort", "-s", help="largest first, or as in the tree")] = InspectSort.as_in_tree,
    everything: AllOption = False,
    as_json: JsonOption = False,
) -> None:
    """Look inside a step: its items, metrics and times, and the tree of its arrays.

    Of a large tree it shows the beginning; --filter, --sort and --all show more of it. --json has chunks, shardings, bytes in storage
    and writers, too. Exit code 1 if the step is damaged.

    \b
    Examples:
      raystate inspect gs://bucket/lm                     the newest step
      raystate inspect runs/lm 1200 -f 'params.*' -s size the largest parameters
      raystate inspect runs/lm 1200 -f params.w --json    all about one array
      raystate inspect /data/some_orbax_checkpoint --json
    """
    wanted = path_filter(glob)
    checkpoints = Checkpoints(storage)
    with count_progress(quiet=as_json) as progress:
        found, nbytes = checkpoints.read(
            step_or_latest(step),
            lambda chosen, reader: (
                look(checkpoints, chosen, watched(reader, progress)),
                bytes_of_items(checkpoints, chosen, reader),
            ),
        )
    if item is not None and item not in found.items:
        raise ConfigError(f"--item: step {found.step} has no item {item!r}; it has {list(found.items)}", field="item", got=item)
    chosen = {
        one: {name: info for name, info in arrays.items() if wanted(name)}
        for one in found.trees
        if item in (None, one)
        for arrays in [found.arrays(one)]
    }
    if not as_json and not any(chosen.values()) and glob is not None:
        raise ConfigError(f"no array of step {found.step} matches{_near(found, item, glob)}", field="filter", got=glob)
    with wait_progress("looking at how it is stored", quiet=as_json):
        stored = _stored(chosen)
    if as_json:
        print_json(_document(found, chosen, stored))
    else:
        _show_step(found, chosen, stored, nbytes, whole=glob is None and item is None)
        for one, arrays in chosen.items():
            _show_arrays(found, one, arrays, sort=sort, everything=everything)
    for problem in (one for one in stored.values() if isinstance(one, str)):
        progress_out.print(f"[red]{escape(problem)}[/]", soft_wrap=True)
        raise typer.Exit(1)


def _near(found: StepMetadata, item: str | None, glob: str) -> str:
    """What the filter may have meant, or what there is."""
    names = [name for tree in found.trees if item in (None, tree) for name in found.arrays(tree)]
    beginnings = sorted({name.partition(".")[0] for name in names})
    if close := difflib.get_close_matches(glob, [*names, *beginnings], n=1):
        return f"; did you mean {close[0]!r}?"
    return f"; their paths begin with {', '.join(beginnings[:_BEGINNINGS])}" if beginnings else ""


def _stored(chosen: Found) -> dict[str, dict[str, StoredArray] | str]:
    """How each item's arrays are stored; a sentence where that cannot be read, as when the database is damaged."""
    found: dict[str, dict[str, StoredArray] | str] = {}
    for item, arrays in chosen.items():
        try:
            found[item] = {name: array.stored() for name, array in arrays.items()}
        except CorruptCheckpointError as error:
            found[item] = error.message
    return found


# ---------------------------------------------------------------- a step


def _show_step(
    found: StepMetadata,
    chosen: Found,
    stored: Mapping[str, dict[str, StoredArray] | str],
    nbytes: Mapping[str, int],
    *,
    whole: bool,
) -> None:
    out.print(f"[bold]step {found.step}[/]  {escape(found.path)}")
    who = f"by raystate, save {found.save}" if found.save is not None else "no run: saved alone, by Orbax or a copy"
    out.print(f"saved   {when(found.committed_at)}; {who}")
    writers = sorted(
        {one for by_name in stored.values() if isinstance(by_name, dict) for info in by_name.values() for one in info.writers}
    )
    if writers and whole:
        out.print(f"writers {', '.join(writers[:4])}{f' and {len(writers) - 4} more' if len(writers) > 4 else ''}")
    if found.metrics:
        out.print(f"metrics {escape(', '.join(f'{name} {figure(value)}' for name, value in found.metrics.items()))}")
    if found.custom is not None:
        out.print(f"custom  {escape(_short(json.dumps(found.custom, default=str, ensure_ascii=False)))}")
    if found.run is not None:
        out.print(f"run     {escape(_short(json.dumps(dict(found.run), default=str, ensure_ascii=False)))}")
    for item, kind in found.kinds.items():
        if kind == "arrays" and item in chosen:
            by_name = stored[item]
            values = sum(info.nbytes for info in by_name.values()) if isinstance(by_name, dict) else None
            if whole:
                in_storage = f", {size(nbytes[item])} in storage"
            else:  # what a database compresses together has no size of its own
                in_storage = f", about {size(values)} in storage" if values is not None else ""
            arrays = chosen[item].values()
            others = sum(leaf.kind in ("scalar", "string") for leaf in found.leaves[item])
            also = f", {count(others, 'other value')}" if others and whole else ""
            text = f"{count(len(arrays), 'array')}, {size(sum(one.nbytes for one in arrays))}{in_storage}{also}"
        else:
            text = {
                "json": "JSON",
                "iterator": "iterator states",
                "files": "files of an object's own",
                "other": "not raystate's to read",
                "arrays": "arrays",
            }[kind]
        if whole or item in chosen:
            out.print(f"item    {escape(item)}: {text}")


def _show_arrays(
    found: StepMetadata,
    item: str,
    arrays: Mapping[str, ArrayMetadata],
    *,
    sort: InspectSort,
    everything: bool,
) -> None:
    if not arrays and not any(leaf.value is not None for leaf in found.leaves[item]):
        return
    out.print(f"\n[bold]{escape(item)}[/]")
    shown = list(arrays.values())
    if sort is InspectSort.by_size:
        shown.sort(key=lambda one: -one.nbytes)
    cut = shown if everything else shown[:MOST_ROWS]
    width = min(34, max((len(_kind_text(one)) for one in cut), default=0))
    for one in cut:
        out.print(f"{size(one.nbytes):>10}  {escape(_kind_text(one)):<{width}}  {escape(one.name or '(the item itself)')}")
    if len(cut) < len(shown):
        out.print(f"… and {len(shown) - len(cut):,} more: --all, or fewer with --filter")
    if len(arrays) == len(found.arrays(item)):
        others = [leaf for leaf in found.leaves[item] if leaf.kind in ("scalar", "string")]
        for leaf in others if everything else others[:MOST_ROWS]:
            value = _short(json.dumps(leaf.value, default=str, ensure_ascii=False), width)
            out.print(f"{'':>10}  {escape(value):<{width}}  {escape(leaf.name)}")
        if len(others) > MOST_ROWS and not everything:
            out.print(f"… and {len(others) - MOST_ROWS:,} more scalars and strings: --all")


def _document(found: StepMetadata, chosen: Found, stored: Mapping[str, dict[str, StoredArray] | str]) -> dict[str, Any]:
    return {
        "step": found.step,
        "path": found.path,
        "save": found.save,
        "began_at": found.began_at,
        "committed_at": found.committed_at,
        "items": found.kinds,
        "metrics": found.metrics,
        "custom": found.custom,
        "run": found.run,
        "arrays": [
            _array_document(one, by_name[name] if isinstance(by_name := stored[item], dict) else None)
            for item, arrays in chosen.items()
            for name, one in arrays.items()
        ],
        "values": {
            item: {leaf.name: leaf.value for leaf in found.leaves[item] if leaf.kind in ("scalar", "string")} for item in chosen
        },
        "problems": [one for one in stored.values() if isinstance(one, str)],
    }


def _short(text: str, most: int = 60) -> str:
    most = max(most, 12)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _kind_text(one: ArrayMetadata) -> str:
    return f"{one.dtype.name}[{','.join(map(str, one.shape))}]"


def _array_document(one: ArrayMetadata, stored: StoredArray | None) -> dict[str, Any]:
    return {
        "item": one.item,
        "name": one.name,
        "path": one.path,
        "shape": one.shape,
        "dtype": one.dtype.name,
        "chunk": one.chunk,
        "sharding": one.sharding,
        "key_impl": one.key_impl,
        "kind": one.kind,
        "nbytes": one.nbytes,
        "stored_nbytes": stored.nbytes if stored is not None else None,
        "writers": stored.writers if stored is not None else None,
    }
