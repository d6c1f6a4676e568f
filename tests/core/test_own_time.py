"""What a process stood still itself counts against no other."""

from __future__ import annotations

import pytest

from raystate.machine import own_time as own_time_module
from raystate.machine.own_time import OwnTime
from raystate.waits import HOST_SILENT_S, LOOK_EVERY_S


class Raw:
    """What the kernel says."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def passes(self, own: OwnTime, looks: int) -> float:
        """The process runs, and reads its clock as often as it does."""
        began_s = own()
        for _ in range(looks):
            self.now_s += LOOK_EVERY_S
            own()
        return own() - began_s


def test_while_it_runs_it_is_the_kernels():
    raw = Raw()
    own = OwnTime(raw)
    assert raw.passes(own, 500) == 500 * LOOK_EVERY_S
    assert own() == raw.now_s


def test_a_gap_counts_nothing_nor_does_the_moment_in_which_others_are_heard_again():
    raw = Raw()
    own = OwnTime(raw)
    before_s = own()
    raw.now_s += 130.0
    assert own() == before_s
    heard_again = int(HOST_SILENT_S / LOOK_EVERY_S)
    assert raw.passes(own, heard_again - 1) == 0.0
    assert raw.passes(own, 100) == 100 * LOOK_EVERY_S


def test_a_process_that_is_only_slow_counts_all():
    """Else a deadline would not come on a busy machine."""
    raw = Raw()
    own = OwnTime(raw)
    before_s = own()
    for _ in range(100):
        raw.now_s += HOST_SILENT_S * 0.9
        own()
    assert own() - before_s == raw.now_s - 1000.0


def test_what_lies_before_the_first_reading_is_no_gap(monkeypatch: pytest.MonkeyPatch):
    """Imports of JAX, and minutes in a process that waits, were taken for a stand-still: for 3 s then, this clock stood."""
    raw = Raw()
    monkeypatch.setattr(own_time_module, "OwnTime", lambda _: OwnTime(raw))
    monkeypatch.setattr(own_time_module, "_clock", own_time_module._clock.__wrapped__)
    raw.now_s += 60.0
    first = own_time_module.own_time()
    assert first == raw.now_s
