"""Programs as scripts: killed twice in mid-run, ended by SIGTERM once, and started again by the same command."""

from __future__ import annotations

from typing import Any

import pytest

from tests.programs.running import check

PROGRAMS = [  # and the CPU devices of each
    ("keras_dropout", 1),
    ("ppo", 1),  # was one scan
    ("diffusion", 4),  # pmap, averaged parameters
    ("lora", 1),  # adapters beside a frozen base
    ("fsdp_accumulated", 4),  # grain
    ("haiku_shuffled", 1),  # Python's random shuffles the data
    ("replayed", 1),  # a buffer that grows
]


@pytest.mark.long
@pytest.mark.parametrize(("program", "devices"), PROGRAMS)
def test_it_ends_as_undisturbed(program: str, devices: int, scripts: Any) -> None:
    check(*scripts(program, devices=devices), stopped=True)


@pytest.mark.long
def test_two_workers_with_sharding_rules(scripts: Any) -> None:
    check(*scripts("ruled", devices=2, ranks=2), stopped=True)
