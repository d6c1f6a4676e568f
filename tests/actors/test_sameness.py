"""Which policies are the same: those of one script, which each process has made for itself. Pure: without Ray."""

from __future__ import annotations

import functools
import json
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle

from raystate.runtime.sameness import alike, same


def travelled(value: Any) -> Any:
    """As another process gets it."""
    return pickle.loads(cloudpickle.dumps(value))  # pyright: ignore[reportPrivateImportUsage]


class Shared:
    """A part of a policy that can be imported."""

    def __init__(self, *parts: Any):
        self.parts = parts


def calls_super(number: int) -> Any:
    class Base:
        def __init__(self, keep: int):
            self.keep = keep

        def should_preserve(self, *_: Any) -> Any:
            return number

    class Mine(Base):
        def __init__(self, keep: int):
            super().__init__(keep)

        def should_preserve(self, *_: Any) -> Any:
            return super().should_preserve()

    return Mine(3)


def reaches_itself(number: int) -> Any:
    class Local:
        def should_preserve(self, *_: Any) -> Any:
            return [number] if isinstance(self, Local) else []

    return Local()


def refer_to_each_other(number: int) -> Any:
    class First:
        def other(self) -> Any:
            return Second, number

    class Second:
        def other(self) -> Any:
            return First

    return First()


def calls_itself(number: int) -> Any:
    def count(left: int) -> int:
        return number if left == 0 else count(left - 1)

    return Shared(count)


def holds_itself(number: int) -> Any:
    class Mine:
        def __init__(self) -> None:
            self.decide = self.should_preserve
            self.listed: list[Any] = [number]
            self.listed.append(self.listed)

        def should_preserve(self, *_: Any) -> Any:
            return []

    return Mine()


def reads_a_module(number: int) -> Any:
    import math

    return Shared(lambda: math.sqrt(number))


def has_an_empty_cell(number: int) -> Any:
    def decide() -> Any:
        return later, number

    if number < 0:
        later = 1
    return Shared(decide)


def has_many_that_meet(number: int) -> Any:
    """Followed along each way through them, they would be a million million."""
    made: Any = calls_super(number)
    for _ in range(40):
        made = (made, made)
    return Shared(made)


MAKERS = (
    calls_super,
    reaches_itself,
    refer_to_each_other,
    calls_itself,
    holds_itself,
    reads_a_module,
    has_an_empty_cell,
    has_many_that_meet,
)


@pytest.mark.parametrize("make", MAKERS)
def test_what_leads_back_to_itself_is_compared_by_what_it_does(make: Any) -> None:
    """A policy that calls super() was refused as another one, named by two addresses, in a script of one process."""
    assert alike(travelled(make(1)), travelled(make(1)))
    assert alike(make(1), travelled(make(1)))
    assert not alike(travelled(make(1)), travelled(make(2)))


def test_another_method_or_another_attribute_is_another_policy() -> None:
    class Base:
        def name(self) -> str:
            return "base"

    def made(*, edited: bool, keep: int = 1) -> Any:
        class Mine(Base):
            if edited:

                def name(self) -> str:
                    return super().name() + "!"
            else:

                def name(self) -> str:
                    return super().name() + "?"

        mine: Any = Mine()
        mine.keep = keep
        return travelled(mine)

    assert alike(made(edited=True), made(edited=True))
    assert not alike(made(edited=True), made(edited=False))
    assert not alike(made(edited=True), made(edited=True, keep=2))


def test_whether_parts_are_one_object_says_nothing() -> None:
    one, other = calls_super(1), calls_super(1)
    assert alike(Shared(one, one), Shared(one, other))
    assert not alike(Shared(one, one), Shared(one, calls_super(2)))
    words = "".join(["ac", "c"])
    assert alike(Shared("acc", "acc"), Shared("acc", words))


def test_what_cannot_be_written_counts_by_its_class_and_attributes() -> None:
    class Locked:
        def __init__(self, keep: int):
            self.keep = keep
            self.lock = threading.Lock()

        def decide(self) -> Any:
            return super().__repr__()

    assert alike(Locked(1), Locked(1)), "only the lock can't be compared"
    assert not alike(Locked(1), Locked(2))
    assert not same(Locked(1), Locked(1)), "of another launch a doubt is a difference"


def test_what_nests_too_deep_is_given_the_benefit_of_the_doubt() -> None:
    def nested() -> Any:
        return functools.reduce(lambda inner, _: Shared(inner), range(5000), Shared())

    assert alike(nested(), nested())


SCRIPT = """
import sys
class Base:
    def __init__(self, names):
        self.names = set(names)
class Mine(Base):
    def __init__(self):
        super().__init__(["loss", "acc", "f1", "recall", "precision"])
    def should_preserve(self, checkpoints, *, context):
        return [one in {"a", "b", "c", "d"} for one in self.names]
from ray import cloudpickle
sys.stdout.buffer.write(cloudpickle.dumps(Mine()))
"""


def test_two_processes_make_the_same_of_one_source(tmp_path: Path) -> None:
    script = tmp_path / "train.py"

    def made(seed: int) -> Any:
        environment = {"PYTHONHASHSEED": str(seed), "PATH": "/usr/bin:/bin"}
        command = [sys.executable, str(script)]
        return pickle.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, timeout=120).stdout)

    script.write_text(SCRIPT)
    first, second = made(1), made(2)
    assert alike(first, second)
    script.write_text(SCRIPT.replace('"loss"', json.dumps("lost")))
    assert not alike(first, made(3))
