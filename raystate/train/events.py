"""Events that `fit` tells its caller while the run goes on: durable steps, restarts, notices. Nothing waits for the listener."""

from __future__ import annotations

import contextlib
import inspect
import logging
import pkgutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from raystate.config.state_config import StateConfig
from raystate.core.formats.errors import ConfigError, RaystateError
from raystate.observe.ledger.lines import LoggedRecovery, LoggedSave, Noted, Noticed
from raystate.observe.ledger.reader import read_ledger
from raystate.storage import open_storage
from raystate.train.onlookers import answer_of, looking_on
from raystate.waits import ENDS_S, LOOK_EVERY_S

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """Something that has become of a run.

    Attributes:
        kind: "durable": a step is in storage. "recovery": the training goes on after a restart. "notice": a host is to go away, or the
            training is to stop.
        time_s: when, in seconds since 1970.
        step: "durable": that step; "recovery": the one it went on from; "notice": None.
        seconds: "durable": from the first order to write it; "recovery": from the end of the group before to the first new step;
            "notice": until the host goes, None if that isn't said.
        cause: of a restart or notice, one line; "" for a step.
        tier: of a restart: "memory", "peer", "storage", …; else "".
        steps_repeated: of a restart: completed steps that are computed again; else 0.
    """

    kind: Literal["durable", "recovery", "notice"]
    time_s: float
    step: int | None = None
    seconds: float | None = None
    cause: str = ""
    tier: str = ""
    steps_repeated: int = 0


OnEvent: TypeAlias = Callable[[RunEvent], object]


def event_of(noted: Noted) -> RunEvent | None:
    """None: no listener is told of it."""
    match noted.what:
        case LoggedSave(step=step, seconds=seconds):
            return RunEvent(kind="durable", time_s=noted.t, step=step, seconds=seconds)
        case LoggedRecovery(back=True) as one:
            return RunEvent(
                kind="recovery", time_s=noted.t, step=one.step, seconds=one.seconds, cause=one.cause, tier=one.tier,
                steps_repeated=one.steps_repeated,
            )  # fmt: skip
        case Noticed(reason=reason, within_s=within_s):
            return RunEvent(kind="notice", time_s=noted.t, seconds=within_s if within_s >= 0 else None, cause=reason)
        case _:
            return None


def listener(on_event: Any) -> OnEvent | None:
    """The `on_event` of `fit`, as a callable. Raises ConfigError."""
    if isinstance(on_event, str):
        try:
            on_event = pkgutil.resolve_name(on_event)
        except (ImportError, AttributeError, ValueError) as error:
            text = f'on_event: {on_event!r} can\'t be found ({error}): give a callable, or "module:function"'
            raise ConfigError(text, field="on_event", got=on_event) from error
    if on_event is not None and not callable(on_event):
        text = f'on_event must be a callable or "module:function", not a {type(on_event).__name__}'
        raise ConfigError(text, field="on_event")
    kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    if on_event is not None and any(kind(one) for kind in kinds for one in (on_event, type(on_event).__call__)):
        raise ConfigError("on_event must be a function that runs when it is called, without `async` or `yield`", field="on_event")
    return on_event


class Telling:
    """Tells a listener each event once, in their order as far as they come so. An exception of it is one warning.

    Args:
        on_event: it.
        since_s: what was before, in seconds since 1970, is no news.
    """

    def __init__(self, on_event: OnEvent, since_s: float):
        self._on_event = on_event
        self._since_s = since_s
        self._told: set[tuple[int, int]] = set()
        self._has_warned = False
        self.newest = (-1, -1)  # (attempt, number) of what was told last

    def tell(self, noted: Iterable[Noted]) -> None:
        """Those of them that are news."""
        for one in noted:
            place, event = (one.attempt, one.n), event_of(one)
            if event is None or one.t < self._since_s or place in self._told:
                continue
            self._told.add(place)
            self.newest = max(self.newest, place)
            try:
                self._on_event(event)
            except BaseException:  # sys.exit(), too: it would end the thread, and no event more was told
                if not self._has_warned:
                    self._has_warned = True
                    logger.warning("on_event has failed; more of its failures are not told", exc_info=True)


@contextlib.contextmanager
def telling(on_event: OnEvent | None, config: StateConfig) -> Iterator[None]:
    """While this lasts, and once at its end, the listener is told of the run, on a thread."""
    if on_event is None:
        yield
        return
    told = Telling(on_event, time.time())
    late = f"on_event has not returned within {ENDS_S:g} s: it is not waited for"
    with looking_on("raystate-events", lambda ended: _watch(told, config, ended), late=late):
        yield


def _watch(told: Telling, config: StateConfig, ended: threading.Event) -> None:
    while not ended.wait(LOOK_EVERY_S):
        told.tell(_from_coordinator(config, told.newest))
    try:  # what its Coordinators did not live to tell
        content = read_ledger(open_storage(config.storage), kinds=("save", "recovery", "notice"))
        told.tell(content.lines)
    except RaystateError as error:
        logger.warning("on_event may lack the last events: %s", error)


def _from_coordinator(config: StateConfig, after: tuple[int, int]) -> tuple[Noted, ...]:
    """The events that it has noted since; nothing if it can't be asked now."""
    return answer_of(config, lambda coordinator: coordinator.news.remote(after)) or ()
