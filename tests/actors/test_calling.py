"""What becomes of an actor's answer, without an actor."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, OwnerDiedError, RayTaskError

from raystate.actors.calling import future_of
from raystate.core.formats.errors import StorageError
from raystate.runtime.link import Unreachable


class Answer:
    """Of a call that an actor carries out."""

    def __init__(self) -> None:
        self.call: Future[Any] = Future()

    def future(self) -> Future[Any]:
        return self.call


def test_an_answer_is_passed_on() -> None:
    answer = Answer()
    told = future_of(answer)
    assert not told.done()
    answer.call.set_result("part")
    assert told.result(0) == "part"


@pytest.mark.parametrize("error", [ActorDiedError(), OwnerDiedError("", None, "")])
def test_who_is_gone_is_unreachable(error: Exception) -> None:
    answer = Answer()
    told = future_of(answer)
    answer.call.set_exception(error)
    with pytest.raises(Unreachable, match=type(error).__name__):
        told.result(0)


def test_what_the_actor_has_raised_is_its_own() -> None:
    answer = Answer()
    told = future_of(answer)
    answer.call.set_exception(RayTaskError("write", "disk full", StorageError("disk full")).as_instanceof_cause())
    with pytest.raises(StorageError, match="disk full"):
        told.result(0)
