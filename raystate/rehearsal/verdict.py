"""What the plays of a rehearsal have recorded, compared: which leaf, item or iterator would fail or differ at a restart."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raystate.core.formats.errors import ConfigError
from raystate.core.formats.texts import counted

STEPS = 2  # before the restart, and after it
PLAYS = {"first": STEPS, "again": STEPS, "undisturbed": 2 * STEPS}
_SHOWN_PATHS = 5
_TAIL_LINES = 15

Entries = Mapping[str, Sequence[str]]

_NO_RESTORE = (
    "Call restore_or_init(), or restore(), at each start, and begin the loop at restored.step. "
    "Storage and run name have to be the same at each start"
)

_WAYS_OUT = {
    "incompatible devices": (
        "Arrays of the restart are bound to other devices than those of the first start: give restore_or_init() shardings, "
        "and place what the training step takes with them"
    ),
    "StepOrderError": _NO_RESTORE,
    "set_state": "The state of that iterator means something in its own process only: see its get_state()",
}
_NOT_KEPT = (
    "The restored values are the saved ones. The training also uses something that it doesn't save: "
    "a data iterator (save(…, items={'data': iterator})), a random generator, or a variable of the script. "
    "Or it has taken more than it saves: a batch that is fetched before the step's save() is in no step, so take it at the loop's top"
)
_CHANGED = "Give the restore a reference of the dtypes and values that are saved"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that would go wrong at a restart.

    Attributes:
        text: what, and where.
        paths: the leaves, items or iterators that it is about: "state/params/kernel", "data".
        way_out: what to do; "" where the text says it.
    """

    text: str
    paths: tuple[str, ...] = ()
    way_out: str = ""

    def __str__(self) -> str:
        return self.text + (f"\n{self.way_out}." if self.way_out else "")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Rehearsal:
    """How a rehearsal went.

    Attributes:
        findings: what would go wrong at a restart.
        notes: what could not be judged.
        summary: one line.
    """

    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    summary: str

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def __repr__(self) -> str:
        """For people, as a notebook shows it."""
        found = (str(finding).replace("\n", "\n    ") for finding in self.findings)
        return "\n".join([self.summary, *(f"  - {text}" for text in found), *(f"  note: {note}" for note in self.notes)])


@dataclass(frozen=True, kw_only=True)
class Played:
    """One play as it went.

    Attributes:
        records: of all its processes.
        problem: how its process ended, if not by itself; "": it was content.
        output: what it printed.
    """

    records: Sequence[Mapping[str, Any]]
    problem: str = ""
    output: str = ""

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        return [record for record in self.records if record["kind"] == kind]

    def saved(self) -> dict[tuple[str, int], dict[int, Entries]]:
        """(run, rank) -> step -> what was saved."""
        found: dict[tuple[str, int], dict[int, Entries]] = {}
        for record in self.of("saved"):
            found.setdefault((record["run"], record["rank"]), {})[record["step"]] = record["entries"]
        return found

    def reached(self, saves: int) -> bool:
        """Whether it came to its end, with nothing left open."""
        steps = max((len(steps) for steps in self.saved().values()), default=0)
        return steps >= saves and len(self.of("closed")) >= 1

    def failure(self, when: str) -> Finding:
        """Why it did not reach its end."""
        failed = self.of("failed")
        if failed:
            first = min(failed, key=lambda record: ("Error: " not in record["error"], record["rank"]))
            text, where = first["error"], f" ({first['where']})" if first["where"] else ""
            way_out = next((way for mark, way in _WAYS_OUT.items() if mark in text), "")
            return Finding(text=f"{when}, rank {first['rank']}{where}: {text}", way_out=way_out)
        lines = [line for line in self.output.splitlines() if line.strip()][-_TAIL_LINES:]
        tail = "".join(f"\n{line}" for line in lines)
        return Finding(text=f"{when}: {self.problem or 'it ended early'}{'; its output ends with' + tail if tail else ''}")


@dataclass
class Verdict:
    """Collects findings play by play, so that a rehearsal ends where nothing more can be learned.

    Args:
        name: of what is rehearsed.
    """

    name: str
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def of_first(self, first: Played) -> bool:
        """Whether there is something to go on from.

        Raises:
            ConfigError: what was given can't be rehearsed.
        """
        if not first.of("opened") and not first.problem:
            raise ConfigError(f"{self.name} has ended without a StateManager: there is nothing to rehearse", field="script")
        if not first.problem and not first.reached(STEPS):
            self._too_short(first)
        self._told(first)
        if not first.reached(STEPS):
            self.findings.append(first.failure("it fails before any restart"))
            return False
        return True

    def _too_short(self, played: Played, before: int = 0) -> None:
        count = before + max((len(steps) for steps in played.saved().values()), default=0)
        times = "once" if count == 1 else f"{count} times"
        text = f"{self.name} has ended after it had called save() {times}: a rehearsal needs {2 * STEPS} saves. Let it train longer"
        raise ConfigError(text, field="script")

    def of_again(self, first: Played, again: Played) -> bool:
        """Whether the restart works."""
        steps = {key: max(found) for key, found in first.saved().items()}
        restored = {(record["run"], record["rank"]): record for record in again.of("restored")}
        back = [key for key in steps if key in restored and restored[key]["step"] == steps[key]]
        self._told(again)
        if not again.problem and again.saved() and not back:
            self.findings.append(Finding(text="the restart restores nothing: it begins anew", way_out=_NO_RESTORE))
            return False
        changed: dict[str, str] = {}
        for key in back:
            saved = first.saved()[key][steps[key]]
            changed |= _differences(saved, restored[key]["entries"], "saved", "restored", only_common=True)
        if changed:
            text = f"step {max(steps.values())} is not restored as it was saved: {_listed(changed)}"
            self.findings.append(Finding(text=text, paths=tuple(changed), way_out=_CHANGED))
        if again.reached(STEPS):
            return True
        if not again.problem and back:
            self._too_short(again, STEPS)
        failure = again.failure("the restart fails")
        known = [finding.text for finding in self.findings]
        head, _, body = failure.text.partition("\n")
        if body and any(body.splitlines()[0] in text for text in known):
            failure = dataclasses.replace(failure, text=head)  # the list was shown above
        self.findings.append(failure)
        return False

    def of_undisturbed(self, first: Played, again: Played, undisturbed: Played) -> None:
        """Compare bit by bit."""
        if not undisturbed.reached(2 * STEPS):
            if not undisturbed.problem:
                self._too_short(undisturbed)
            self.findings.append(undisturbed.failure("it fails without any restart"))
            return
        known = {path for finding in self.findings for path in finding.paths}
        unsettled: dict[str, str] = {}
        differing: dict[int, dict[str, str]] = {}
        for key, steps in undisturbed.saved().items():
            before, after = first.saved().get(key, {}), again.saved().get(key, {})
            for step in before.keys() & steps.keys():
                unsettled |= _differences(steps[step], before[step], "", "")
            if not after.keys() <= steps.keys():
                text = f"the restart saves steps {sorted(after)}; without it these are {sorted(steps)[STEPS:]}"
                self.findings.append(Finding(text=text, way_out="Begin the loop at restored.step"))
                return
            for step in sorted(after):
                found = _differences(steps[step], after[step], "undisturbed", "after the restart")
                found = {path: what for path, what in found.items() if path not in known and path not in unsettled}
                if found:
                    differing.setdefault(step, {}).update(found)
        if differing:
            step = min(differing)
            paths = differing[step]
            text = f"step {step} differs after a restart, in {_entries(len(paths))}: {_listed(paths)}"
            self.findings.append(Finding(text=text, paths=tuple(paths), way_out=_NOT_KEPT))
        if names := [path for path in unsettled if path != "custom"]:
            self.notes.append(
                f"{_entries(len(names))} could not be compared, since two starts without any restart differ in them: "
                f"{', '.join(names[:_SHOWN_PATHS])}{', …' if len(names) > _SHOWN_PATHS else ''}"
            )

    def _told(self, played: Played) -> None:
        texts = {finding.text for finding in self.findings}
        for record in played.of("told"):
            text = record["text"]
            if text not in texts and not any("leaves out" in text and "leaves out" in known for known in texts):
                texts.add(text)
                self.findings.append(Finding(text=text))

    def result(self, undisturbed: Played | None) -> Rehearsal:
        """All of it."""
        if self.findings:
            summary = f"rehearsal of {self.name}: {counted(len(self.findings), 'problem')} at a restart"
        else:
            saved = undisturbed.saved() if undisturbed is not None else {}
            steps = sorted({step for found in saved.values() for step in found})[STEPS:]
            count = len({path for found in saved.values() for entries in found.values() for path in entries})
            same = "computes the same" if self.notes else "computes the same, bit by bit"
            summary = f"rehearsal of {self.name}: a restart works and {same} (steps {steps[0]} to {steps[-1]}, {_entries(count)})"
        return Rehearsal(findings=tuple(self.findings), notes=tuple(self.notes), summary=summary)


def _differences(one: Entries, other: Entries, of_one: str, of_other: str, *, only_common: bool = False) -> dict[str, str]:
    """path -> how the two differ there."""
    found: dict[str, str] = {}
    for path in [*one, *(path for path in other if path not in one)]:
        a, b = one.get(path), other.get(path)
        if a is None or b is None:
            if not only_common:
                found[path] = f"{path} (only {of_one if b is None else of_other})"
        elif list(a) != list(b) and not _is_same_number(a, b):
            one_is, other_is = _shown(a, b), _shown(b, a)
            found[path] = f"{path} ({one_is if one_is == other_is else f'{one_is} {of_one}, {other_is} {of_other}'})"
    return found


def _is_same_number(a: Sequence[str], b: Sequence[str]) -> bool:
    """A Python number and an array of shape () may stand for each other."""
    return a[0] != b[0] and bool(a[2]) and a[2] == b[2]


def _shown(one: Sequence[str], other: Sequence[str]) -> str:
    kind, _, value = one
    if kind != other[0]:
        return f"{kind} {value}".strip()
    return value or kind


def _listed(paths: Mapping[str, str]) -> str:
    more = len(paths) - _SHOWN_PATHS
    return "; ".join(list(paths.values())[:_SHOWN_PATHS]) + (f"; and {more:,} more" if more > 0 else "")


def _entries(count: int) -> str:
    return counted(count, "entry", "entries")
