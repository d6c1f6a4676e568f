"""raystate.Value: what lies in the program and is no iterator goes on where it was."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import raystate

STATE = {"w": np.zeros(2, np.float32)}


def test_random_numbers_the_best_so_far_and_lists_come_back(tmp_path: Path):
    best: dict[str, Any] = {"loss": float("inf"), "mask": None}
    seen: list[tuple[int, bytes]] = []

    def items() -> dict[str, Any]:
        return {
            "random": raystate.Value(lambda: np.random.get_state(legacy=False), np.random.set_state),
            "best": raystate.Value(lambda: best, best.update),
            "seen": raystate.Value(lambda: seen, lambda got: seen.__setitem__(slice(None), got)),
        }

    np.random.seed(3)
    best.update(loss=np.float32(0.25), mask=np.arange(6, dtype=np.int16).reshape(2, 3) > 2)
    seen[:] = [(1, b"a"), (2, b"b")]
    raystate.save(tmp_path / "one", STATE, items=items())
    drawn = np.random.rand(5)
    np.random.seed(4)
    best.update(loss=1, mask=None)
    seen.clear()
    raystate.load(tmp_path / "one", STATE, items=items())
    np.testing.assert_array_equal(np.random.rand(5), drawn)
    assert best["loss"] == 0.25 and type(best["loss"]) is np.float32
    np.testing.assert_array_equal(best["mask"], [[False] * 3, [True] * 3])
    assert seen == [(1, b"a"), (2, b"b")]


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4, ">f4", "M8[ns]", "U3", "S3"])
def test_dtypes_come_back(dtype: Any):
    values = np.array([0, 1, 2]).astype(dtype)
    for value in (values, values[1]):
        got: list[Any] = []
        raystate.Value(print, got.append).set_state(raystate.Value(lambda value=value: value, print).get_state())
        assert type(got[0]) is type(value) and got[0].dtype == value.dtype
        np.testing.assert_array_equal(got[0], value)


def test_torchdatas_loaders_are_pointed_to_it(tmp_path: Path):
    class Loader:
        at = 3

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    loader, again = Loader(), Loader()
    with pytest.raises(raystate.ConfigError, match=r"raystate\.Value\(x\.state_dict, x\.load_state_dict\)"):
        raystate.save(tmp_path / "one", STATE, items={"data": loader})
    raystate.save(tmp_path / "one", STATE, items={"data": raystate.Value(loader.state_dict, loader.load_state_dict)})
    again.at = 0
    raystate.load(tmp_path / "one", STATE, items={"data": raystate.Value(again.state_dict, again.load_state_dict)})
    assert again.at == 3


def test_what_it_cannot_hold_is_refused(tmp_path: Path):
    with pytest.raises(raystate.ConfigError, match="two functions"):
        raystate.Value(print, {})  # pyright: ignore[reportArgumentType]
    fields = np.zeros(2, [("a", "i4"), ("b", "f4")])
    masked = np.ma.masked_array([1, 2], [True, False])
    comes_back_as_another = (defaultdict(int), masked, fields, fields[0], np.str_(""), np.array(["a"], "T"))
    for held in (object(), np.array([None]), *comes_back_as_another):
        with pytest.raises(raystate.ConfigError, match="a Value: it can hold"):
            raystate.save(tmp_path / "one", STATE, items={"x": raystate.Value(lambda held=held: held, print)})
