"""A trainer's exception on its way to the launcher."""

from __future__ import annotations

import traceback

from ray import cloudpickle

from raystate.runtime.ends import End, is_collateral, one_line

MOST_ERROR_BYTES = 1 << 20  # of a pickled exception: a larger one is told by its text


def raised(rank: int, error: BaseException) -> End:
    """What a trainer tells of its exception, before anybody ends it."""
    text = "".join(traceback.format_exception(error))
    return End(
        rank=rank,
        kind="raised",
        reason=f"rank {rank} raised {one_line(error)}",
        collateral=is_collateral(error, text),
        error=_pickled(error),
        traceback=text,
    )


def _pickled(error: BaseException) -> bytes | None:
    try:
        data = cloudpickle.dumps(error)  # pyright: ignore[reportPrivateImportUsage]
        cloudpickle.loads(data)  # some exceptions pickle and can't be made again
    except Exception:
        return None
    return data if len(data) <= MOST_ERROR_BYTES else None


def exception_of(end: End) -> BaseException:
    """The exception that a rank has raised, or one that says the same."""
    if end.error is not None:
        try:
            return cloudpickle.loads(end.error)
        except Exception:  # its class can't be imported here
            pass
    return RuntimeError(end.reason)
