"""Programs of one process, as plain scripts: killed in mid-run and started again by the same command."""

from __future__ import annotations

from typing import Any

import pytest

from tests.programs.running import check


@pytest.mark.long
def test_keras(scripts: Any) -> None:
    check(*scripts("keras_dropout", devices=1))


@pytest.mark.long
def test_diffusion_under_pmap_with_averaged_parameters(scripts: Any) -> None:
    check(*scripts("diffusion", devices=4))
