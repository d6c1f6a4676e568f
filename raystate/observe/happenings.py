"""What an event says, in words, and whether it is about a step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import assert_never

from raystate.core.formats.messages import (
    Appended,
    AttemptDead,
    CarriedOut,
    Claimed,
    DeleteAsked,
    Event,
    FlushAsked,
    GivenUp,
    HostDown,
    HostId,
    HostReported,
    Intent,
    Joined,
    LeaveAsked,
    Packaged,
    Progress,
    ReleaseAsked,
    RestoreAsked,
    RestoreTried,
    SnapshotId,
    StopAsked,
    Tick,
    TrainerExited,
    Written,
)


def is_about(event: Event, step: int, saves: Collection[str], seqs: Collection[int]) -> bool:
    """Whether an event is news of a step. `saves`, `seqs`: save ids and log entries that are the step's."""
    match event:
        case Written(save=save) | Packaged(save=save):
            return save in saves
        case Appended(seq=seq):
            return seq in seqs
        case Claimed(entry=entry):
            return step in {one.step for one in (*entry.live, *entry.intents)}
        case FlushAsked(promised=promised):
            return step in {one.step for one in promised}
        case LeaveAsked(last=last, promised=promised):
            return step in {one.step for one in (*promised, *(() if last is None else (last,)))}
        case CarriedOut(intent=intent):
            return intent.step == step
        case RestoreAsked(step=its) | RestoreTried(step=its) | DeleteAsked(step=its):
            return its == step
        case _:
            return False


def what_happened(event: Event) -> str:
    """One line, for people."""
    match event:
        case Claimed(entry=entry):
            live = ", ".join(str(one.step) for one in entry.live[-5:]) or "none"
            return f"attempt {entry.attempt} claims the run ({entry.reason}); newest steps in its log: {live}"
        case HostDown(host=host, reason=reason):
            return f"host {short(host)} is lost: {reason}"
        case HostReported(summary=summary):
            return f"host {short(summary.host)} reports"
        case Joined(rank=rank, world=world, host=host):
            return f"rank {rank} of {world} joins on host {short(host)}"
        case TrainerExited(rank=rank, host=host, reason=reason, clean=clean):
            return f"the trainer of rank {rank} on host {short(host)} {'leaves' if clean else 'is gone'}: {reason}"
        case RestoreAsked(rank=rank, step=step, rollback=rollback):
            what = "the newest step" if step is None else f"step {step}"
            return f"rank {rank} asks to restore {what}{', giving up newer ones' if rollback else ''}"
        case RestoreTried(rank=rank, step=step, ok=True, mistaken=True):
            return f"rank {rank} could not restore step {step}, by a mistake of its caller"
        case RestoreTried(rank=rank, step=step, ok=True, tier=tier):
            what = "nothing: the run has no step" if step < 0 else f"step {step}"
            return f"rank {rank} has restored {what}{f' from {tier}' if tier and step >= 0 else ''}"
        case RestoreTried(rank=rank, step=step, error=error):
            return f"rank {rank} could not restore step {step}: {error}"
        case FlushAsked(rank=rank, promised=promised, wait=wait):
            return f"rank {rank} {'waits until its' if wait else 'asks whether its'} saves are durable: {_steps(promised)}"
        case LeaveAsked(rank=rank, last=last, promised=promised):
            saves = f", and it waits for its saves: {_steps(promised)}" if promised else ""
            return f"rank {rank} closes; its last step is {'none' if last is None else last.step}{saves}"
        case ReleaseAsked(reason=reason):
            return f"the end of the run is asked: {reason}"
        case DeleteAsked(step=step):
            return f"somebody asks to delete step {step}"
        case StopAsked(reason=reason, within_s=within_s, host=host):
            when = "" if within_s is None else f" within {within_s:.0f} s"
            return f"a stop{when} is asked: {reason}" if host is None else f"host {short(host)} is to go away{when}: {reason}"
        case Written(host=host, save=save, error=error):
            return _outcome(
                f"host {short(host)} has written its part of save {save}", f"host {short(host)} could not write save {save}", error
            )
        case Packaged(save=save, error=error):
            return _outcome(f"save {save} is packaged", f"save {save} could not be packaged", error)
        case Appended(seq=seq, outcome="ok"):
            return f"log entry {seq} is written"
        case Appended(seq=seq, outcome="taken"):
            return f"log entry {seq} is there already"
        case Appended(seq=seq, outcome="refused", error=error):
            return f"log entry {seq} is not written: {error}"
        case Appended(seq=seq, error=error):
            return f"whether log entry {seq} is written is not known: {error}"
        case Progress(who=who, done_bytes=done, total_bytes=total):
            return f"{who} has moved {done} of {total} bytes"
        case CarriedOut(intent=Intent(kind="commit", step=step), error=error):
            return _outcome(f"step {step} is visible in storage", f"step {step} could not be made visible", error)
        case CarriedOut(intent=Intent(step=step), error=error):
            return _outcome(f"the files of step {step} are gone from its place", f"step {step} could not be removed", error)
        case GivenUp(reason=reason):
            return f"the run is given up: {reason}"
        case AttemptDead(attempt=attempt):
            return f"the process of attempt {attempt} is known to be gone"
        case Tick():
            return "time has passed"
        case _:
            assert_never(event)


def _steps(promised: Sequence[SnapshotId]) -> str:
    return ", ".join(str(one.step) for one in promised) or "none"


def _outcome(done: str, failed: str, error: str) -> str:
    return f"{failed}: {error}" if error else done


def short(host: HostId) -> str:
    """Enough of a node's id to know it by."""
    return host[:8] if len(host) > 16 else host
