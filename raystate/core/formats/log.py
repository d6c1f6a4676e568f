"""The log of a run as pure functions: which entry may follow which, what is live, and which opposite has to wait.

An entry holds the whole state after it. Each attempt that claims finishes the intents that are open
then. The process of a superseded attempt may still wake up and carry one out once more. So an
intent stays open until it is carried out, and each other attempt that has owned it is known dead.
Meanwhile no attempt performs the opposite on that step (the hold rule).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from raystate.core.formats.entries import WHY_CHARS, Fact, Intent, IntentKey, LiveStep, LogEntry, is_made, key_of, newest_facts
from raystate.core.formats.names import told_newest

NOTHING: frozenset[IntentKey] = frozenset()


def claim_entry(
    tail: LogEntry | None,
    writer: str,
    run: str,
    adopted: Iterable[int] = (),
    reason: str = "",
    *,
    dead: Collection[int] = (),
) -> LogEntry:
    """The entry that makes its writer the owner of the run.

    Args:
        tail: newest entry of the log, None when there is none.
        writer: random id of the claiming process.
        run: the run's name.
        adopted: steps that are visible in storage; those which the log doesn't know were written by stock Orbax and become live.
        reason: for people.
        dead: attempts whose process is known to be gone.

    Returns:
        Entry tail.seq + 1 with attempt tail.attempt + 1; live steps and open intents are the tail's, which the new attempt inherits.
    """
    if tail is None:
        live: tuple[LiveStep, ...] = ()
        intents: tuple[Intent, ...] = ()
        retired: tuple[Fact, ...] = ()
        given_up: tuple[Fact, ...] = ()
        seq, attempt = 1, 1
    else:
        live, seq, attempt = tail.live, tail.seq + 1, tail.attempt + 1
        retired, given_up = tail.retired, tail.given_up
        intents = tuple(replace(one, carriers=(*carriers(one, dead), attempt)) for one in tail.intents)
    known = {step.step for step in live}
    # A step whose retirement is under way may still be visible: adopting it would bring it back.
    # (test_log.test_claim_keeps_state_and_does_not_revive_a_step_being_retired)
    known.update(intent.step for intent in intents)
    new = [LiveStep(step=step, save=None) for step in sorted(set(adopted)) if step not in known]
    if new:
        live = tuple(sorted((*live, *new), key=lambda step: step.step))
    text = reason or ("first claim" if tail is None else f"claimed after attempt {tail.attempt}")
    return LogEntry(
        seq=seq, attempt=attempt, writer=writer, kind="claim", run=run, live=live, intents=intents, retired=retired,
        given_up=given_up, reason=text,
    )  # fmt: skip


def is_closed(intent: Intent, *, attempt: int, carried: Collection[IntentKey], dead: Collection[int]) -> bool:
    """True if the next entry of `attempt` drops this intent.

    It is carried out, and no other attempt that had it can still come late with it: a late removal
    would take a step that has been saved again under its number.
    (test_simulator.test_planted_bug_is_found, "late retire deletes a step saved again")
    """
    return key_of(intent) in carried and all(one == attempt for one in carriers(intent, dead))


def carriers(intent: Intent, dead: Collection[int]) -> tuple[int, ...]:
    """The attempts whose process may still carry the intent out."""
    return tuple(one for one in intent.carriers or (intent.attempt,) if one not in dead)


def next_entry(
    tail: LogEntry,
    *,
    attempt: int,
    writer: str,
    carried: Collection[IntentKey],
    dead: Collection[int],
    commit: LiveStep | None = None,
    retires: Sequence[tuple[int, bool, str]] = (),
    given_up: Iterable[Fact] = (),
    reason: str,
) -> LogEntry:
    """The entry of `attempt` after its own tail.

    Args:
        tail: the newest entry; it must be the attempt's own.
        carried: intents that are carried out by now; those that no process can repeat are dropped.
        dead: attempts whose process is known to be gone.
        commit: step that becomes live with this entry.
        retires: (step, aside, reason) of live steps that stop being live with this entry.
        given_up: saves that never become durable, not logged yet.
    """
    seq = tail.seq + 1
    left = [one for one in tail.intents if not is_closed(one, attempt=attempt, carried=carried, dead=dead)]
    intents = [replace(one, carriers=carriers(one, dead)) for one in left]
    live = {one.step: one for one in tail.live}
    retired: list[Fact] = []
    for step, aside, why in retires:
        gone = live.pop(step)
        if not aside:  # a damaged one has to be saved again if memory still has it
            retired.append(Fact(gone.snapshot, why[:WHY_CHARS]))
        intents.append(Intent(kind="retire", step=step, save=gone.save, attempt=attempt, seq=seq, aside=aside, reason=why))
    made: list[Fact] = []
    if commit is not None:
        now = {commit.step: commit.snapshot}
        made = [Fact(one.snapshot, "") for one in tail.given_up if one.why and is_made(one.snapshot, now)]
        live[commit.step] = commit
        intents.append(Intent(kind="commit", step=commit.step, save=commit.save, attempt=attempt, seq=seq, reason=reason))
    return LogEntry(
        seq=seq,
        attempt=attempt,
        writer=writer,
        kind="commit" if commit is not None else "retire" if retires else "close",
        run=tail.run,
        live=tuple(live[step] for step in sorted(live)),
        intents=tuple(intents),
        retired=newest_facts(tail.retired, retired),
        given_up=newest_facts(tail.given_up, (*given_up, *made)),
        reason=reason,
    )


def live_steps(entry: LogEntry | None) -> tuple[int, ...]:
    """Committed steps, ascending; some may not be published yet."""
    return () if entry is None else tuple(one.step for one in entry.live)


def published_steps(entry: LogEntry | None, carried: Collection[IntentKey] = NOTHING) -> tuple[int, ...]:
    """Live steps without a commit intent that is still to be carried out, ascending: what `all_steps()` lists.

    Args:
        carried: intents known to be carried out although the log holds them open; a reader that knows none gives none.
    """
    if entry is None:
        return ()
    waiting = {one.step for one in entry.intents if one.kind == "commit" and key_of(one) not in carried}
    return tuple(one.step for one in entry.live if one.step not in waiting)


def refuse_save(
    entry: LogEntry, step: int, *, attempt: int, carried: Collection[IntentKey] = NOTHING, dead: Collection[int] = ()
) -> str | None:
    """Why a save of this step number may not be committed now, or None if it may."""
    if step in live_steps(entry):
        return f"step {step} is committed already"
    return _why_held(entry, step, "saved again", attempt=attempt, carried=carried, dead=dead)


def refuse_retire(
    entry: LogEntry, step: int, *, attempt: int, carried: Collection[IntentKey] = NOTHING, dead: Collection[int] = ()
) -> str | None:
    """Why this step may not be retired now, or None if it may."""
    there = live_steps(entry)
    if step not in there:
        return f"there is no durable step {step}" + (f"; there are {told_newest(there)}" if there else "")
    return _why_held(entry, step, "retired", attempt=attempt, carried=carried, dead=dead)


def _why_held(
    entry: LogEntry, step: int, what: str, *, attempt: int, carried: Collection[IntentKey], dead: Collection[int]
) -> str | None:
    """Why an open intent of this step forbids that it is now `what`, or None if there is none."""
    held = (one for one in entry.intents if one.step == step and not is_closed(one, attempt=attempt, carried=carried, dead=dead))
    intent = next(held, None)
    if intent is None:
        return None
    late = [one for one in carriers(intent, dead) if one != attempt]
    if not late:
        return f"step {intent.step} cannot be {what} yet: its {intent.kind} (entry {intent.seq}) is not carried out"
    attempts = f"attempt {late[0]}" if len(late) == 1 else f"attempts {', '.join(map(str, late))}"
    return (
        f"step {intent.step} cannot be {what}: a {intent.kind} of {attempts} (entry {intent.seq}) is open, and its "
        f"process may still be alive; `raystate gc STORAGE {' '.join(f'--assume-dead {one}' for one in late)}` releases it"
    )
