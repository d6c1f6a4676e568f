"""Programs of one process, as plain scripts: killed in mid-run and started again by the same command."""

from __future__ import annotations

from typing import Any

import pytest

from tests.programs.running import check


@pytest.mark.long
def test_linen_under_pmap_with_prefetching(scripts: Any) -> None:
    check(*scripts("pmap", devices=4))


@pytest.mark.long
def test_equinox_with_batch_norm(scripts: Any) -> None:
    check(*scripts("equinox_norm", devices=1))


@pytest.mark.long
def test_keras(scripts: Any) -> None:
    check(*scripts("keras_dropout", devices=1))


@pytest.mark.long
def test_optimizers_of_optax(scripts: Any) -> None:
    check(*scripts("optimizers", devices=1))
