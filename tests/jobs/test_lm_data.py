"""Batches: the same for the same position, whoever reads them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jobs.lm.data import batches, eval_windows, num_windows

TEXT = np.random.default_rng(0).integers(0, 256, 16 * 100 + 1, dtype=np.uint8)  # 100 windows


def _iterator(rows: tuple[int, int] = (0, 8), seed: int = 0, read_threads: int = 0):
    return batches(TEXT, seq_len=16, batch_size=8, rows=rows, seed=seed, read_threads=read_threads)


@pytest.mark.parametrize("read_threads", [0, 1])
def test_a_restored_iterator_gives_the_same_batches(read_threads: int) -> None:
    iterator = _iterator(read_threads=read_threads)
    for _ in range(17):  # into the second epoch
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    expected = [next(iterator) for _ in range(20)]
    other = _iterator(read_threads=read_threads)
    next(other)
    other.set_state(state)
    for batch in expected:
        np.testing.assert_array_equal(next(other), batch)


def test_processes_see_parts_of_one_global_batch_and_have_equal_states() -> None:
    whole, halves = _iterator(), [_iterator((0, 4)), _iterator((4, 8))]
    for _ in range(30):
        np.testing.assert_array_equal(next(whole), np.concatenate([next(half) for half in halves]))
    assert whole.get_state() == halves[0].get_state() == halves[1].get_state()


def test_an_epoch_reads_every_window_once_in_an_order_of_its_own() -> None:
    windows = {TEXT[i * 16 : i * 16 + 17].tobytes() for i in range(num_windows(TEXT.size, 16))}
    assert len(windows) == 100
    iterator = _iterator()
    rows = [row.tobytes() for _ in range(25) for row in next(iterator)]  # two epochs of 100
    assert set(rows[:100]) == set(rows[100:]) == windows
    assert rows[:100] != rows[100:]
    assert [row.tobytes() for row in next(_iterator(seed=1))] != rows[:8]


def test_no_window_is_an_error() -> None:
    with pytest.raises(ValueError, match="no window"):
        batches(TEXT[:16], seq_len=16, batch_size=8, rows=(0, 8), seed=0)


def test_evaluation_predicts_every_byte_once() -> None:
    windows, weights, covered = eval_windows(TEXT, seq_len=16, batch_size=8, max_bytes=500)
    assert covered == 31 * 16 + 1
    assert windows.shape == (4, 8, 17)
    assert weights.sum() == 31
    used = windows.reshape(-1, 17)[weights.reshape(-1) > 0]
    np.testing.assert_array_equal(used[:, 1:].reshape(-1), TEXT[1:covered])
    np.testing.assert_array_equal(used[:, 0], TEXT[: covered - 1 : 16])
