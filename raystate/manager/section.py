"""`StateManager.section`: what a script does between its steps, by name."""

from __future__ import annotations

import sys
from types import TracebackType

from raystate.config.errors import plain
from raystate.core.formats.errors import ConfigError
from raystate.manager.pipeline import Pipeline
from raystate.manager.session import Session
from raystate.manager.spent import Span


class LimitedSection(Span):
    """One with a time-out of its own: the trainer's word says when it begins and ends."""

    __slots__ = ("_name", "_open", "_pipeline", "_session", "_timeout_s")

    def __init__(self, session: Session, pipeline: Pipeline, name: str, timeout_s: float):
        super().__init__(session.spent, session.spent.section(name).cause)
        self._session = session
        self._pipeline = pipeline
        self._name = name
        self._timeout_s = timeout_s
        self._open = 0  # how often it has begun on the training thread, and not ended

    def __enter__(self) -> None:
        super().__enter__()
        if self._spent.is_mine:
            self._open += 1
            self._spent.limit(self._name, self._timeout_s)
            self._speak()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._open:  # on any thread: another may close the generator that holds it, and the time-out would stay
            self._open -= 1
            self._spent.unlimit(self._name, self._timeout_s)
            self._speak()
        super().__exit__(kind, error, traceback)

    def _speak(self) -> None:
        if not self._session.is_over:
            self._pipeline.speak()


def section_of(session: Session, pipeline: Pipeline, name: object, timeout_s: object) -> Span:
    """Raises ConfigError: the name is no text, or empty; the time-out is no time."""
    if timeout_s is None and type(name) is str and (known := session.spent.sections.get(name)) is not None:
        return known
    if not isinstance(name, str) or not name:
        text = f"section() needs a name, such as section('data'), not {name!r}"
        raise ConfigError(text, field="name", expected="a text that is not empty", got=plain(name))
    if timeout_s is None:
        return session.spent.section(str(name))
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s <= sys.float_info.max:
        text = f"section({name!r}, timeout_s={timeout_s!r}): the time-out is a number of seconds, above 0"
        raise ConfigError(text, field="timeout_s", expected="a number above 0", got=plain(timeout_s))
    return LimitedSection(session, pipeline, str(name), float(timeout_s))
