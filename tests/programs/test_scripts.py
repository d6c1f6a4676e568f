"""Programs of one process, as plain scripts: killed in mid-run and started again by the same command."""

from __future__ import annotations

from typing import Any

import pytest

from tests.programs.running import check


@pytest.mark.long
def test_keras(scripts: Any) -> None:
    check(*scripts("keras_dropout", devices=1))


@pytest.mark.long
def test_ppo_that_was_one_scan(scripts: Any) -> None:
    check(*scripts("ppo", devices=1))


@pytest.mark.long
def test_diffusion_under_pmap_with_averaged_parameters(scripts: Any) -> None:
    check(*scripts("diffusion", devices=4))


@pytest.mark.long
def test_adapters_beside_a_frozen_base(scripts: Any) -> None:
    check(*scripts("lora", devices=1))
