"""An exception on its way from a worker to the launcher, which may lack its class, or be unable to make it again."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from ray import cloudpickle

from raystate.core.formats.errors import ConfigError, Interrupted
from raystate.observe.ends import End, is_collateral, is_final, one_line

MOST_ERROR_BYTES = 1 << 20  # of a pickled exception: a larger one is told by its text


def raised(rank: int, error: BaseException, text: str | None = None) -> End:
    """What is told of a trainer's exception. `text`: its traceback, if that has another process."""
    text = "".join(traceback.format_exception(error)) if text is None else text
    reason, kind, collateral = f"rank {rank} raised {one_line(error)}", "raised", False
    if is_final(error):
        kind = "final"
    elif isinstance(error, Interrupted):
        reason, kind = str(error), "interrupted"
    elif collateral := is_collateral(error, text):
        reason = f"a collective of rank {rank} failed, as it does when another process dies ({one_line(error)})"
    return End(rank=rank, kind=kind, reason=reason, collateral=collateral, error=packed(error), traceback=text)


def pickles_anywhere(error: BaseException) -> BaseException:
    """The same exception, which from now on pickles so that it can be read everywhere: Ray makes errors of its own of others."""
    vars(error)["__reduce_ex__"] = functools.partial(_reduced, packed(error))
    return error


def _reduced(data: bytes, _protocol: int) -> tuple[Any, ...]:
    return unpacked, (data,)


def packed(error: BaseException) -> bytes:
    """An exception for `unpacked`: itself, if it survives the way, and by its type, bases and text."""
    kind, text = type(error), _text(error)
    whole = _pickled(error)
    if whole is not None and (len(whole) > MOST_ERROR_BYTES or not _is_same(cloudpickle.loads(whole), error)):
        whole = None
    # Builtins only, around what may be unreadable elsewhere.
    bases = [_pickled(base) for base in kind.__mro__ if issubclass(base, BaseException)]
    names = (kind.__module__, kind.__qualname__)
    notes = [str(note) for note in getattr(error, "__notes__", ())]
    return cloudpickle.dumps((whole, names, text[:MOST_ERROR_BYTES], notes, bases))  # pyright: ignore[reportPrivateImportUsage]


def unpacked(data: bytes) -> BaseException:
    """The exception that was packed; where it can't be made, one of the same name and text, of the nearest base that is known here."""
    whole, names, text, notes, bases = cloudpickle.loads(data)
    for error in _loaded([whole]):
        return error
    for base in _loaded(bases):
        try:
            error = _stand_in(base, names, text)
        except Exception:  # such as a group, which can't be without its members
            continue
        vars(error).update(__notes__=notes, __reduce_ex__=functools.partial(_reduced, data))
        return error
    raise AssertionError("BaseException can be made everywhere")


class _Nowhere:
    """A file that keeps nothing of what is written to it."""

    def write(self, data: bytes) -> int:
        return len(data)


def check_sendable(value: Any) -> Any:
    """What a training function has returned, if it can be sent to the launcher.

    Raises:
        ConfigError: it can't be pickled.
    """
    try:
        cloudpickle.dump(value, _Nowhere())  # pyright: ignore[reportPrivateImportUsage]
    except Exception as error:
        what = f"the {type(value).__name__} that train_fn has returned can't be sent to the driver: {one_line(error)}"
        raise ConfigError(f"{what}; return plain values or NumPy arrays", field="train_fn") from error
    return value


def _stand_in(base: type[BaseException], names: tuple[str, str], text: str) -> BaseException:
    """What `except` takes for the original, without the call of a constructor whose arguments are not known."""
    module, qualname = names
    told = {"__module__": module, "__qualname__": qualname, "__str__": lambda _self: text}
    kind = type(qualname.rpartition(".")[2], (base,), told)
    error = kind.__new__(kind)
    error.args = (text,)
    return error


def _pickled(what: object) -> bytes | None:
    """Nothing if it can't be, or can't be made again: some exceptions pickle nevertheless."""
    try:
        data = cloudpickle.dumps(what)  # pyright: ignore[reportPrivateImportUsage]
        cloudpickle.loads(data)
    except Exception:
        return None
    return data


def _loaded(pickled: Sequence[bytes | None]) -> Iterator[Any]:
    for data in pickled:
        if data is not None:
            try:
                yield cloudpickle.loads(data)
            except Exception:  # its class can't be imported here
                continue


def _is_same(copy: BaseException, error: BaseException) -> bool:
    """Some constructors take another thing than the text that they make of it."""
    return type(copy).__qualname__ == type(error).__qualname__ and _text(copy) == _text(error)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # the user's own __str__
        return ""
