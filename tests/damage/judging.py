"""What reading a damaged run gives, and what is wrong with that: a restore is right or says so, and verify names what is damaged."""

from __future__ import annotations

import collections
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import raystate
from raystate.core.formats.errors import (
    CorruptCheckpointError,
    ItemTopologyError,
    RaystateError,
    ReferenceMismatchError,
    StepNotFoundError,
    StorageError,
)
from raystate.inspection.verification import verify_log, verify_step
from raystate.storage import open_storage
from raystate.storage.names import LOG, PACKAGES, split_saved, step_of
from tests.damage.a_run import STEPS, Content, Counting
from tests.damage.damages import Copy, Damage
from tests.orbax.state_example import flat

NEWEST = STEPS[-1]
SAYS = (CorruptCheckpointError, StorageError, StepNotFoundError, ReferenceMismatchError, ItemTopologyError)

Flat = Mapping[Any, Any]
Tally = collections.Counter[tuple[str, str, str]]  # (kind of damage, kind of object, outcome of restoring that step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one restore."""

    kind: Literal["right", "said", "wrong", "foreign"]
    step: int | None = None  # that was restored
    differing: tuple[Any, ...] = ()  # paths
    text: str = ""  # the error's message
    error: Exception | None = None

    def __str__(self) -> str:
        what = (
            f"{type(self.error).__name__}: {self.text}" if self.error else f"step {self.step} differs in {list(self.differing)[:8]}"
        )
        return f"{self.kind}: {what}"


def restore(root: Path, step: int | None, expected: Mapping[int, Flat]) -> Outcome:
    """Restore everything of a step (None: the newest) and compare it bit for bit with what was saved as the step that it says it is."""
    iterators = {"data": Counting(), "shuffle": Counting()}
    try:
        restored = raystate.Reader(root).restore(step=step, items={"notes": None, **iterators})
    except SAYS as error:
        return Outcome(kind="said", text=error.message, error=error)
    except Exception as error:
        return Outcome(kind="foreign", text=traceback.format_exc(), error=error)
    items = {**restored.items, **{name: iterator.state for name, iterator in iterators.items()}}
    got = flat({"state": restored.state, **items, "metrics": restored.metrics, "custom": restored.custom})
    saved = expected[restored.step]
    differing = tuple(path for path in {*got, *saved} if got.get(path) != saved.get(path))
    kind = "wrong" if differing or restored.step != (step or restored.step) else "right"
    return Outcome(kind=kind, step=restored.step, differing=differing)


def expected_of(contents: Mapping[int, Content]) -> dict[int, Flat]:
    return {step: content.flat() for step, content in contents.items()}


# ---------------------------------------------------------------- which step, which thing


def step_in(name: str) -> int | None:
    """The step that an object or folder belongs to; None for the log and whatever else belongs to the run."""
    if name.startswith(f"{PACKAGES}/"):
        found = split_saved(name.rpartition("/")[2])
        return found[0] if found else None
    return step_of(name.split("/")[0])


def thing_in(name: str) -> str:
    """What an error that comes from this object must name: the item, or the file."""
    parts = name.split("/")
    return parts[1] if len(parts) > 1 else name


def sort_of(name: str) -> str:
    """The kind of object, for the tally."""
    if name.startswith(f"{LOG}/"):
        return "log entry"
    if name.startswith(f"{PACKAGES}/"):
        return "package"
    if step_of(name.split("/")[0]) is None:
        return "of the run"
    if "/ocdbt.process_" in name:
        return "writer's manifest" if name.endswith("/manifest.ocdbt") else "writer's data"
    return "merged nodes" if "/d/" in name else "small file"


# ---------------------------------------------------------------- judging


class Judge:
    """Looks at damaged copies of one run, and counts what became of them."""

    def __init__(self, copy: Copy, expected: Mapping[int, Flat], tally: Tally):
        self._copy = copy
        self._expected = expected
        self._log = sorted(name for name in copy.names if name.startswith(f"{LOG}/"))
        self._tally = tally

    def complaints(self, damage: Damage) -> list[str]:
        """What is wrong with what a reader and verify make of the damage; [] if nothing is."""
        with self._copy.damaged(damage) as root:
            found = self._restores(root, damage) + self._verifies(root, damage)
        return [f"{damage}: {complaint}" for complaint in found]

    def _restores(self, root: Path, damage: Damage) -> list[str]:
        touched = {step for name in damage.names if (step := step_in(name)) is not None}
        step = next(iter(sorted(touched, reverse=True)), NEWEST)
        gone = damage.kind == "delete folder" and step_of(damage.name) is not None
        found: list[str] = []
        # Of the newest step the two ways to ask for it take turns.
        asked_for = [step, None] if step != NEWEST or gone else [NEWEST if damage.seed % 2 else None]
        outcomes = [(restore(root, one, self._expected), one or NEWEST) for one in asked_for]
        for outcome, asked in outcomes:
            if outcome.kind in ("wrong", "foreign"):
                found.append(f"restore of step {asked}: {outcome}")
            elif outcome.kind == "said" and asked not in touched:
                found.append(f"step {asked} suffers from what happened elsewhere: {outcome}")
            elif outcome.kind == "said":
                found += _unnamed(outcome.error, asked, [thing_in(name) for name in damage.names], gone=gone)
        newest, asked = outcomes[-1]
        if newest.kind == "right" and newest.step != asked and not (gone and step == NEWEST):
            found.append(f"step {newest.step} was restored in place of step {asked}, and nobody said so")
        self._tally[damage.kind, sort_of(damage.name), outcomes[0][0].kind] += 1
        return found

    def _verifies(self, root: Path, damage: Damage) -> list[str]:
        storage = open_storage(root)
        damaged = {name for one in damage.names for name in self._copy.names if name == one or name.startswith(f"{one}/")}
        touched = {step_in(name) for name in damaged}
        found: list[str] = []
        also = [STEPS[damage.seed // 4 % len(STEPS)]] if damage.seed % 4 == 0 else []  # now and then one that was left alone
        for step in [*sorted(step for step in touched if step is not None), *also]:
            lost = {name for name in damaged if step_in(name) == step}
            try:
                bad = {one.name: one.problem for one in verify_step(storage, step).bad}
            except StepNotFoundError:
                if f"{step}" not in damage.names:
                    found.append(f"verify does not find step {step}")
                continue
            packages = {name for name in lost if name.startswith(f"{PACKAGES}/")}
            if packages:  # nothing says any more what the rest should be
                if not bad and damage.kind not in ("delete", "delete folder"):
                    found.append(f"verify did not report the package of step {step}")
                continue
            if unreported := lost - set(bad):
                found.append(f"verify did not report {sorted(unreported)}, only {bad}")
            if blamed := set(bad) - lost:
                found.append(f"verify blamed {sorted(blamed)}")
        bad_log = [one.name.removeprefix(f"{storage.url}/").rstrip("/") for one in verify_log(storage)]
        if self._log[-1] in damaged and not damage.kind.startswith("delete") and not bad_log:
            found.append("verify did not report the log's newest entry")
        if any(name in damage.names for name in map(str, STEPS)) and not bad_log:
            found.append("verify did not report that a committed step is gone")
        blamed = set(bad_log) - damaged - {*damage.names, *(str(step) for step in touched)}
        if blamed and not damaged & {*self._log}:  # whoever takes an older entry for the newest misses other steps
            found.append(f"verify blamed {sorted(blamed)}")
        return found


def shown(tally: Tally) -> str:
    """How many restores of the damaged step were right, and how many said that it is damaged."""
    lines = [f"{'kind':14} {'object':18} {'right':>6} {'said':>6} {'other':>6}"]
    rows = [(*key, [key]) for key in sorted({key[:2] for key in tally})] + [("all", "", sorted({key[:2] for key in tally}))]
    for kind, sort, keys in rows:
        counts = {outcome: sum(tally[(*key, outcome)] for key in keys) for outcome in ("right", "said", "wrong", "foreign")}
        lines.append(f"{kind:14} {sort:18} {counts['right']:6} {counts['said']:6} {counts['wrong'] + counts['foreign']:6}")
    return "\n".join(lines)


def _unnamed(error: Exception | None, step: int, things: list[str], *, gone: bool) -> list[str]:
    """What an error fails to name."""
    assert isinstance(error, RaystateError)
    found: list[str] = []
    if error.step != step or f"step {step}" not in error.message:
        found.append(f"the error does not name step {step}: {error.message} {error.details}")
    if not gone and not any(thing in error.message for thing in things):
        found.append(f"the error names none of {things}: {error.message}")
    if gone and not isinstance(error, StepNotFoundError):
        found.append(f"the step is gone, not damaged: {error!r}")
    return found
