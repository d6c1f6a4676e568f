"""Programs as scripts: killed twice in mid-run, ended by SIGTERM once, and started again by the same command."""

from __future__ import annotations

from typing import Any

import pytest

from tests.programs.running import check


@pytest.mark.long
def test_keras(scripts: Any) -> None:
    check(*scripts("keras_dropout", devices=1), stopped=True)


@pytest.mark.long
def test_ppo_that_was_one_scan(scripts: Any) -> None:
    check(*scripts("ppo", devices=1), stopped=True)


@pytest.mark.long
def test_diffusion_under_pmap_with_averaged_parameters(scripts: Any) -> None:
    check(*scripts("diffusion", devices=4), stopped=True)


@pytest.mark.long
def test_adapters_beside_a_frozen_base(scripts: Any) -> None:
    check(*scripts("lora", devices=1), stopped=True)


@pytest.mark.long
def test_fsdp_with_grain_and_accumulated_gradients(scripts: Any) -> None:
    check(*scripts("fsdp_accumulated", devices=4), stopped=True)


@pytest.mark.long
def test_haiku_whose_data_python_s_random_shuffles(scripts: Any) -> None:
    check(*scripts("haiku_shuffled", devices=1), stopped=True)


@pytest.mark.long
def test_a_replay_buffer_that_grows(scripts: Any) -> None:
    check(*scripts("replayed", devices=1), stopped=True)


@pytest.mark.long
def test_two_workers_with_sharding_rules(scripts: Any) -> None:
    check(*scripts("ruled", devices=2, ranks=2), stopped=True)
