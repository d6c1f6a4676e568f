"""Many calls of actors at once, with bounds on how many are under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from raystate.core.formats.errors import RaystateError
from raystate.core.formats.messages import HostId
from raystate.machine.own_time import own_time
from raystate.runtime.link import HostCall, Unreachable

AT_ONCE = 8  # calls under way
OF_ONE_HOST = 2  # of these: other processes ask it, too


def call_all(calls: Sequence[HostCall], find: Callable[[HostId], Any | None], timeout_s: float) -> Iterator[tuple[int, Any]]:
    """Call each once; gives (index, answer) as they come.

    Args:
        find: the handle of a host's actor, or None.
        timeout_s: for each call.

    Returns:
        Of each call its answer, the RaystateError that the actor raised, or Unreachable.
    """
    queues: dict[HostId, deque[int]] = {}
    for index, call in enumerate(calls):
        queues.setdefault(call.host, deque()).append(index)
    actors = {host: find(host) for host in queues}
    under_way: dict[Any, tuple[int, float]] = {}  # its answer -> (index, deadline)
    busy = dict.fromkeys(queues, 0)
    while queues or under_way:
        for host, queue in list(queues.items()):
            if actors[host] is None:
                del queues[host]
                for index in queue:
                    yield index, Unreachable(f"no HostActor on node {host[:8]}")
                continue
            while queue and busy[host] < OF_ONE_HOST and len(under_way) < AT_ONCE:
                index = queue.popleft()
                answer = getattr(actors[host], calls[index].method).remote(**calls[index].kwargs)
                under_way[answer] = (index, own_time() + timeout_s)
                busy[host] += 1
            if not queue:
                del queues[host]
        if not under_way:
            continue
        next_s = min(deadline_s for _, deadline_s in under_way.values()) - own_time()
        ready, _ = ray.wait(list(under_way), num_returns=1, timeout=max(0.0, next_s))
        late = [answer for answer, (_, deadline_s) in under_way.items() if answer not in ready and deadline_s <= own_time()]
        for answer in [*ready, *late]:
            index, _ = under_way.pop(answer)
            busy[calls[index].host] -= 1
            yield index, _answer(answer) if answer in ready else Unreachable(f"no answer within {timeout_s:g} s")


def answer_of(answer: Any, timeout_s: float | None = None) -> Any:
    """What an actor has answered. Raises Unreachable if it is gone or late, or the RaystateError that it raised."""
    try:
        return ray.get(answer, timeout=timeout_s)
    except (RayActorError, GetTimeoutError) as error:
        raise Unreachable(type(error).__name__) from None
    except RayTaskError as error:
        raise own_error(error) or error from None


def own_error(error: BaseException) -> RaystateError | None:
    """The RaystateError that an actor has raised, out of Ray's; None: the call failed in another way."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, RaystateError) else None


def future_of(answer: Any) -> Future[Any]:
    """Of what an actor will have answered. Its exception: the actor's own, or Unreachable if that is gone."""
    told: Future[Any] = Future()

    def tell(call: Future[Any]) -> None:
        error = call.exception()
        if error is None:
            told.set_result(call.result())
        else:
            told.set_exception(Unreachable(type(error).__name__) if _is_gone(error) else error)

    answer.future().add_done_callback(tell)
    return told


def _answer(answer: Any) -> Any:
    try:
        return answer_of(answer)
    except (RaystateError, Unreachable) as error:
        return error
    except RayError as error:
        if not _is_gone(error):
            raise
        return Unreachable(type(error).__name__)


def _is_gone(error: BaseException) -> bool:
    """Whether no answer can come: the actor has died, or its answer is gone with its node."""
    return isinstance(error, RayError) and not isinstance(error, RayTaskError)
