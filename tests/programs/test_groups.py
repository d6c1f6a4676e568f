"""Programs of several processes: one of them is killed in mid-run, and the group starts again by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import raystate
from tests.programs.running import Place, check, fit, fit_with_callback


def test_quickstart_of_ray_with_equal_values(groups: Any) -> None:
    check(*groups(fit, "quickstart", ranks=2, devices=1, config={"seed": "same"}))


OWN_VALUES = (
    r"6 leaves that each process holds for itself differ between ranks: .*state/params/b \(rank 0 \| rank 1\).*"
    r"Make it a global array .*, equal on all ranks, or an item with get_state and set_state"
)


def test_quickstart_of_ray_as_it_stands_is_refused(ray_address: str, place: Callable[[str], Place]) -> None:
    """At the first step that is to be durable, and at once: another attempt would end there, too."""
    there = place("refused")
    with pytest.raises(raystate.ConfigError, match=OWN_VALUES) as caught:
        fit(there, there.given("quickstart", {"steps": 10**6, "seed": "rank"}, None), ranks=2, devices=1)
    assert caught.value.step is not None
    assert there.begun(2) == [[0], [0]]


def test_a_rank_gets_no_other_ranks_value(ray_address: str, place: Callable[[str], Place]) -> None:
    """Nothing is due before the end, so a kill comes first: from memory each rank goes on with what was its own."""
    ends = []
    for name, dies in (("undisturbed", None), ("killed", 1)):
        there = place(name)
        with pytest.raises(raystate.ConfigError, match=OWN_VALUES):
            fit(there, there.given("quickstart", {"seed": "rank"}, dies), ranks=2, devices=1, save_every_steps=1000)
        ends.append(there.end(2))
    check(*ends)
    assert ends[0].digests[0] != ends[0].digests[1]


def test_gpt2_of_ray_with_a_dataset(groups: Any) -> None:
    from tests.programs.gpt2 import dataset

    check(*groups(fit_with_callback, "gpt2", ranks=2, devices=1, datasets={"train": dataset()}))


def test_gemma_on_fsdp_x_tensor(groups: Any) -> None:
    check(*groups(fit, "gemma", ranks=2, devices=2))
