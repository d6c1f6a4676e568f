"""A run as storage alone knows it: for `raystate status` where there is no Ray, or none that has it."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from raystate.cli.console import ago, count, span
from raystate.cli.status_view import line
from raystate.core.formats.errors import RaystateError
from raystate.core.formats.texts import printable
from raystate.inspection.listing import given_up, summarize
from raystate.inspection.places import Checkpoints
from raystate.observe.ledger.lines import ALL_CLOSED, LoggedRecovery, RunLeft
from raystate.observe.ledger.reader import read_ledger
from raystate.storage import LogReader
from raystate.waits import COORDINATOR_STARTS_S


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """A run, or a directory that Orbax wrote, as it lies there.

    Attributes:
        storage: its URL.
        run: its name; "": it has no log.
        attempt: the newest; 0: it has no log.
        steps: how many are durable.
        durable_step: the newest; -1: none.
        durable_s: when it was committed, seconds since 1970; None: no file says it.
        ended: (when, why) its newest attempt ended; None: it has not ended, or the ledger does not say.
        restarts: how many the ledger has.
        last: (when it ended, the restart); None: there was none.
        given_up: saves that `save` had promised, a sentence each.
        damaged: what can't be read of the ledger, a sentence each.
    """

    storage: str
    run: str = ""
    attempt: int = 0
    steps: int = 0
    durable_step: int = -1
    durable_s: float | None = None
    ended: tuple[float, str] | None = None
    restarts: int = 0
    last: tuple[float, LoggedRecovery] | None = None
    given_up: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()


def stored_run(url: str) -> StoredRun | None:
    """The run or the step that lies there; None: neither a run nor a step.

    Raises:
        RaystateError: storage failed, or the log can't be read.
    """
    checkpoints = Checkpoints(url)
    storage = checkpoints.storage
    tail = LogReader(storage).tail() if checkpoints.single is None else None
    steps = checkpoints.steps()
    if tail is None:
        found = summarize(checkpoints, steps[-1]) if steps else None
        if found is None:
            return None
        durable_s = found.committed_at.timestamp() if found.committed_at is not None else None
        return StoredRun(storage=storage.url, steps=len(steps), durable_step=found.step, durable_s=durable_s)
    newest = max(steps, default=-1)  # the log closes what was published some time later
    durable_s = next((one.time_s for one in tail.live if one.step == newest), 0.0)
    ledger = read_ledger(storage)  # all of it: a line that can't be read may be of any kind
    recoveries = ledger.recoveries
    left = [(one.t, one.what.reason) for one in ledger.lines if isinstance(one.what, RunLeft) and one.attempt >= tail.attempt]
    return StoredRun(
        ended=left[-1] if left else None,
        storage=storage.url,
        run=tail.run,
        attempt=tail.attempt,
        steps=len(steps),
        durable_step=newest,
        durable_s=durable_s or None,
        restarts=len(recoveries),
        last=recoveries[-1] if recoveries else None,
        given_up=tuple((given_up(storage) or {}).values()),
        damaged=ledger.left_out,
    )


def look_for(which: str) -> StoredRun | None:
    """As `stored_run`; None also where nothing can be read: the caller has another answer."""
    try:
        return stored_run(which)
    except RaystateError:
        return None


def stored_block(found: StoredRun, why: str) -> RenderableType:
    """For a terminal. `why`: it is not asked of a living run."""
    if found.ended is not None:
        return Group(*_ended(found), *_known(found))
    return Group(
        _head(found.run or "no run", "ONLY IN STORAGE", "yellow", found.storage), line("alive?", printable(why)), *_known(found)
    )


def silent_block(run: str, storage: str, found: StoredRun | None, silent_s: float, why: str) -> RenderableType:
    """Of a run that has answered until then. Silence is no end: its Coordinator may have died alone, and another one may come.

    Args:
        run: its name.
        storage: its URL.
        found: what lies there; None: it can't be read now.
        silent_s: since when it gives no answer.
        why: as in `stored_block`.
    """
    if found is not None and found.ended is not None:
        return Group(*_ended(found), *_known(found))
    heard = f"its Coordinator does not answer for {span(silent_s)} ({why})"
    if silent_s <= COORDINATOR_STARTS_S:
        head = _head(run, "NO ANSWER", "bold yellow", storage)
        told = f"{heard}. Its trainers may train on, and another Coordinator may come: wait, and start no second run"
    else:
        head = _head(run, "MAY HAVE DIED", "bold red", storage)
        told = f"{heard}, and nothing says that it has ended. See whether its trainers live before you start it again"
    known = _known(found) if found is not None else [line("storage", "it can't be read now", "yellow")]
    return Group(head, line("alive?", printable(told)), *known)


def _head(run: str, word: str, style: str, rest: str) -> Text:
    return Text.assemble((printable(run), "bold"), (f"  {word}", style), f"  {printable(rest)}")


def _ended(found: StoredRun) -> list[RenderableType]:
    assert found.ended is not None
    ended_s, reason = found.ended
    word, style = ("FINISHED", "bold green") if reason == ALL_CLOSED else ("ENDED", "bold yellow")
    durable = f"step {found.durable_step} is durable" if found.durable_step >= 0 else "no step is durable"
    return [_head(found.run, f"{word}  {durable}", style, found.storage), line("ended", f"{ago(ended_s)}: {printable(reason)}")]


def _known(found: StoredRun) -> list[RenderableType]:
    lines: list[RenderableType] = []
    if found.durable_step < 0:
        lines.append(line("durable", "no step yet"))
    else:
        age = f" ({ago(found.durable_s)})" if found.durable_s is not None else ""
        lines.append(line("durable", f"step {found.durable_step}{age}, the newest of {count(found.steps, 'step')}"))
    if found.attempt:
        lines.append(line("attempts", f"{found.attempt} of the Coordinator: each launch, and each replacement, is one"))
        lines.append(line("restarts", _restarts(found)))
    lines += [line("given up", printable(one), "yellow") for one in found.given_up[-3:]]
    lines += [line("damaged", printable(one), "yellow") for one in found.damaged]
    return lines


def _restarts(found: StoredRun) -> str:
    if found.last is None:
        return "none is in the ledger"
    back_s, one = found.last
    end = (
        f"step {one.step} from {one.tier}, {count(one.steps_repeated, 'step')} repeated"
        if one.back
        else "it ended before a new step"
    )
    return f"{found.restarts} of the trainers, the last {ago(back_s)}: {printable(one.cause)}; {end}, {span(one.seconds)}"
