"""The calls that users make: an error of raystate's is raised from there, and shows none of the frames behind it.

With `RAYSTATE_LOG=debug` all frames are there.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

from raystate.core.formats.errors import ConfigError, RaystateError, RunFailedError

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

_HERE = str(Path(__file__).parent) + os.sep


def public(call: Callable[P, R]) -> Callable[P, R]:
    """A function that users call."""
    is_generator = inspect.isgeneratorfunction(call)
    signature = inspect.signature(call)
    parameters = signature.parameters
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    names = [name for name in parameters if name != "self"]
    name_of = call.__qualname__.removesuffix(".__init__")

    @functools.wraps(call)
    def function(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            if kwargs and not (takes_all or parameters.keys() >= kwargs.keys()):
                _refuse_unknown(name_of, kwargs, names)
            given = call(*args, **kwargs)
            return cast(R, _each(cast(Any, given))) if is_generator else given
        except RaystateError as error:
            raise _cut(error)  # noqa: B904 - it is this one
        except TypeError:
            _refuse_misfit(name_of, signature, args, kwargs)
            raise

    return function


def _each(given: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    try:
        return (yield from given)
    except RaystateError as error:
        raise _cut(error)  # noqa: B904 - it is this one


def public_class(kind: C) -> C:
    """A class that users make and call: all of its methods that have no underscore, and those of `with`."""
    for name, method in [*vars(kind).items()]:
        if inspect.isfunction(method) and (not name.startswith("_") or name in ("__init__", "__enter__", "__exit__")):
            setattr(kind, name, public(method))
    return kind


def _refuse_unknown(call: str, given: Mapping[str, object], names: Sequence[str]) -> NoReturn:
    """Says which name is meant, and where settings of the run belong."""
    name = next(one for one in given if one not in names)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"there is {', '.join(names)}"
    if not close and "config" in names:
        hint += f". A setting of the run belongs into its config: raystate.StateConfig({name}=…)"
    raise ConfigError(f"{call}() takes no argument {name!r}; {hint}", field=name, expected=close or names)


def _refuse_misfit(call: str, signature: inspect.Signature, args: tuple[object, ...], given: Mapping[str, object]) -> None:
    """Whether it was the call that raised, and not its function: too many arguments without names, or too few."""
    try:
        signature.bind(*args, **given)
    except TypeError as error:
        bare = [one.replace(annotation=one.empty) for name, one in signature.parameters.items() if name != "self"]
        text = f"{call}(): {error}. It takes {signature.replace(parameters=bare, return_annotation=signature.empty)}"
        raise ConfigError(text) from None


def _cut(error: RaystateError) -> RaystateError:
    """Without our frames, also where it tells of other errors. What a user's own code has raised keeps that code's."""
    if error.of_caller or logging.getLogger("raystate").isEnabledFor(logging.DEBUG):
        return error
    behind = error.__cause__ or error.__context__
    says_it_all = isinstance(behind, RaystateError) and behind.message in error.message
    if says_it_all and not isinstance(error, RunFailedError):  # whose cause a caller looks at
        error.__suppress_context__ = True
        error.__cause__ = None
    seen: set[int] = {id(error)}
    while behind is not None and id(behind) not in seen:
        seen.add(id(behind))
        behind.__traceback__ = _theirs(behind.__traceback__)
        behind = behind.__cause__ or behind.__context__
    return error.with_traceback(None)


def _theirs(traceback: TracebackType | None) -> TracebackType | None:
    frames: list[TracebackType] = []
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_filename.startswith(_HERE):
            frames.append(traceback)
        traceback = traceback.tb_next
    for one in reversed(frames):
        traceback = TracebackType(traceback, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return traceback
