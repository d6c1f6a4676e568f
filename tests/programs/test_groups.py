"""Programs of several processes: one of them is killed in mid-run, and the group starts again by itself."""

from __future__ import annotations

from typing import Any

from tests.programs.running import check, fit, fit_with_callback


def test_quickstart_of_ray_with_equal_values(groups: Any) -> None:
    check(*groups(fit, "quickstart", ranks=2, devices=1, config={"seed": "same", "where": "state"}))


def test_gpt2_of_ray_with_a_dataset(groups: Any) -> None:
    from tests.programs.gpt2 import dataset

    check(*groups(fit_with_callback, "gpt2", ranks=2, devices=1, datasets={"train": dataset()}))


def test_gemma_on_fsdp_x_tensor(groups: Any) -> None:
    check(*groups(fit, "gemma", ranks=2, devices=2))
