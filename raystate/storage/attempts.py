"""Retrying what may pass by itself, and turning every other failure into a StorageError that names the operation and the path."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from typing import TypeVar

import tenacity

from raystate.core.formats.errors import StorageError
from raystate.machine.counts import FAILURES, RETRIES, counts

Result = TypeVar("Result")

logger = logging.getLogger("raystate")

# ESTALE: an NFS handle that went away under us; a fresh lookup finds the file or says that it is gone.
_PASSING_ERRNOS = frozenset({errno.EINTR, errno.EAGAIN, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.EBUSY})

_HINTS = {
    errno.ENOSPC: "the file system is full: free space or keep fewer steps",
    errno.EDQUOT: "the quota is used up: free space or keep fewer steps",
    errno.EROFS: "it is mounted read-only",
    errno.EACCES: "this user may not do that: check owner and mode",
    errno.EPERM: "this user or this file system does not allow it",
}


def is_passing(error: BaseException) -> bool:
    """Whether the same call may succeed a moment later."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _PASSING_ERRNOS
    return isinstance(error, TimeoutError | ConnectionError)


def describe(error: BaseException) -> str:
    """One line: what the system said, and what to do where that is known."""
    if isinstance(error, OSError) and error.errno is not None:
        text = f"{errno.errorcode.get(error.errno, error.errno)}: {error.strerror or error}"
        hint = _HINTS.get(error.errno)
        return f"{text} ({hint})" if hint else text
    return f"{type(error).__name__}: {error}"


def in_the_way(path: str) -> str:
    """Why nothing can be at an absolute path, whose own name isn't looked at, as a clause for an error; "" if something can."""
    while path.startswith("/") and path != "/":
        path = os.path.dirname(path)
        if os.path.lexists(path):
            what = "a file" if os.path.isfile(path) else "no folder"
            return "" if os.path.isdir(path) else f"{path} is {what}, and nothing lies below it"
    return ""


def storage_error(operation: str, path: str, error: BaseException, *, text: str = "") -> StorageError:
    """A StorageError with `operation`, `path` and, where there is one, `errno`. `text`: instead of what `describe` says."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.ENOTDIR and not text and (why := in_the_way(path)):
        text = f"ENOTDIR: {why}"
    return StorageError(f"{operation} {path} failed: {text or describe(error)}", operation=operation, path=path, errno=number)


def tell_also(error: BaseException, second: StorageError, text: str) -> None:
    """Tell of a second failure, on the way out of a first one: in its message, or in the log where that is no StorageError.

    Args:
        error: the first.
        second: the other.
        text: what has come of it.

    Raises:
        StorageError: the first, with both in its message.
    """
    text = f"{text} ({second.message})"
    if isinstance(error, StorageError):
        raise StorageError(f"{error.message}. Also, {text}", **error.details) from error
    logger.error("%s", text)


def attempt(
    operation: str, path: str, call: Callable[[], Result], *, timeout_s: float, let_through: tuple[type[Exception], ...] = ()
) -> Result:
    """Run `call`, again while it fails with a passing error and `timeout_s` has not gone by; StorageErrors pass through at once.

    Args:
        operation: verb for the error.
        path: what it was done to, for the error.
        call: the operation; it must be repeatable.
        timeout_s: no retry begins later than this after the first call.
        let_through: exceptions that the caller handles itself.

    The deadline bounds the retries; a call that the kernel or a client library never returns from is bounded by these.
    """
    start_s = time.monotonic()
    counts.request(operation)
    try:
        try:
            result = call()
        except Exception as error:
            if not is_passing(error):
                raise
            counts.failed(operation, describe(error))
            result = _again(call, error, timeout_s - (time.monotonic() - start_s))
        counts.worked(operation)
        return result
    except (StorageError, *let_through):
        raise
    except Exception as error:
        counts.add(FAILURES)
        counts.failed(operation, describe(error))
        raise storage_error(operation, path, error) from error


def _again(call: Callable[[], Result], first: BaseException, timeout_s: float) -> Result:
    """`call`, after it failed with `first` and a wait. Few calls come here: what tenacity makes for each costs more than a small read."""
    failed = [first]

    def repeat() -> Result:
        if failed:
            raise failed.pop()
        counts.add(RETRIES)
        return call()

    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_passing),
        wait=tenacity.wait_random_exponential(multiplier=0.05, max=5.0),
        stop=tenacity.stop_before_delay(timeout_s),
        reraise=True,
    )(repeat)
