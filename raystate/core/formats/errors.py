"""Every error that raystate raises on purpose.

They derive from `RaystateError` and pickle: Ray moves them between processes. They carry the facts
of the failure as attributes, so that no program has to parse the message.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from typing import Any

from raystate.core.formats.texts import printable


class RaystateError(Exception):
    """Base of all raystate errors.

    Args:
        message: one sentence for a person, naming the thing that is wrong.
        **details: facts by name, such as `step`, `host`, `rank`, `path`, `expected`, `got`, `waited_s`. Each becomes an attribute;
            a fact that was not given reads as None.
    """

    details: dict[str, Any]
    of_caller = False  # see `callers_code`

    def __init__(self, message: str, **details: Any):
        super().__init__(printable(message))
        self.details = details

    @property
    def message(self) -> str:
        """The sentence for a person."""
        return str(self.args[0])

    def add(self, sentence: str) -> None:
        """End the message with a sentence more: code that it passes may know what to do."""
        joint = "\n" if "\n" in self.message else "; "
        super().__init__(printable(f"{self.message}{joint}{sentence}"))

    def __getattr__(self, name: str) -> Any:
        # Only reached for names that are not real attributes.
        if name.startswith("__") or name == "details":
            raise AttributeError(name)
        return self.details.get(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.details, *getattr(self, "__notes__", ())))


@contextlib.contextmanager
def callers_code() -> Generator[None, None, None]:
    """Around the caller's own code in a restore: an item's `get_state`, `set_state` or `load`, a function in `transforms`. A RaystateError
    of it says nothing about the step that is read: `of_caller` marks it, so that the step is not set aside."""
    try:
        yield
    except RaystateError as error:
        error.of_caller = True
        raise


def _rebuild(kind: type[RaystateError], message: str, details: dict[str, Any], *notes: str) -> RaystateError:
    error = kind(message, **details)
    for note in notes:
        error.add_note(note)
    return error


class ConfigError(RaystateError):
    """A setting is unknown, ill-typed or contradicts another; `field` names it."""


class StorageError(RaystateError):
    """An operation on storage failed after its retries; names the operation and the path."""


_NAMED = 3  # steps in a note; more are counted

GCS_HINTS = {  # HTTP status -> what to do about it
    401: "the credentials are not valid (any more): log in again, or check the service account",
    403: "this account may not do that: it needs roles/storage.objectAdmin on the bucket",
    404: "there is no such bucket, or this account may not see it",
    429: "too many requests: GCS limits writes per object name and requests per bucket",
}


def lost_steps(errors: tuple[str, ...], *, durable_step: int = -1, released: bool = False) -> StorageError | None:
    """What is said of promised steps that are not durable, each with its reason; None if there are none.

    Args:
        durable_step: the newest that is; -1: not told.
        released: the run has ended: its last step is durable, and another start could not bring these back.
    """
    if not errors:
        return None
    more = {"durable_step": durable_step} if durable_step >= 0 else {}
    return StorageError("not durable: " + "; ".join(errors), errors=errors, **more, **({"released": True} if released else {}))


def although_promised(lost: Iterable[str]) -> str:
    """The same as a note on the error that ended the run, or for its log."""
    texts = [*lost]
    more = f"; and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
    return f"not durable, although save() had said True: {'; '.join(texts[:_NAMED])}{more}"


class CorruptCheckpointError(RaystateError):
    """Stored or held bytes do not match their checksum, or a piece of an array is missing."""


class StepNotFoundError(RaystateError, FileNotFoundError):
    """The requested step does not exist."""


class StepOrderError(RaystateError):
    """`save` was called with a step older than the newest one."""


class ReferenceMismatchError(RaystateError):
    """The reference and the checkpoint differ; the message lists all differences."""


class ItemTopologyError(RaystateError):
    """Per-process item states cannot be dealt out to another number of processes."""


class CapacityError(RaystateError):
    """The state does not fit the memory cap or the shared-memory mount; the message has the numbers and what would fit."""


class BarrierTimeoutError(RaystateError):
    """Not every rank (or host) arrived in time; names those that are missing, the phase and the seconds waited."""


class RunInUseError(RaystateError):
    """A live run owns this storage."""


class StaleAttemptError(RaystateError):
    """A newer attempt has claimed this run. Final: nothing re-claims after it."""


class Interrupted(RaystateError):  # noqa: N818 - the contract's name: it is an end, not an error
    """The training must end here; the step is durable and the run will be resumed."""


class RunFailedError(RaystateError):
    """`fit` gave up; the cause is the user's exception."""


class InvalidTransitionError(RaystateError):
    """A bug in raystate: a machine was given an event that its state does not allow. The message tells machine, state and event."""


ALL_ERRORS: tuple[type[RaystateError], ...] = (
    ConfigError, StorageError, CorruptCheckpointError, StepNotFoundError, StepOrderError, ReferenceMismatchError,
    ItemTopologyError, CapacityError, BarrierTimeoutError, RunInUseError, StaleAttemptError, Interrupted, RunFailedError,
)  # fmt: skip
for _kind in (RaystateError, *ALL_ERRORS):
    _kind.__module__ = "raystate"  # where users have them from: so a traceback names them, and so they pickle


def error_from_name(name: str, message: str, details: dict[str, Any]) -> RaystateError:
    """Build an error from its class name: how core's `Failure` becomes an exception in another process."""
    for kind in (RaystateError, *ALL_ERRORS):
        if kind.__name__ == name:
            return kind(message, **details)
    return RaystateError(f"{name}: {message}", **details)
