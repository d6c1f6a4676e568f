"""Batches: windows of the training text in a shuffled order, through grain.

Every process's iterator counts *global* batches, so its state is the same number on all processes and a run that goes on with another
number of processes reads exactly the batches it would have read.
"""

from __future__ import annotations

import functools

import grain
import numpy as np


def num_windows(text_bytes: int, seq_len: int) -> int:
    """Windows of seq_len inputs, each with the byte that follows, side by side."""
    return (text_bytes - 1) // seq_len


def batches(
    text: np.ndarray, *, seq_len: int, batch_size: int, rows: tuple[int, int], seed: int, read_threads: int = 0
) -> grain.DatasetIterator:
    """An endless iterator over this process's rows of each global batch.

    Args:
        text: uint8 [bytes].
        seq_len: bytes of context.
        batch_size: windows per global batch.
        rows: this process's half-open range of rows of the global batch.
        seed: of the order; every epoch has its own order.
        read_threads: grain's prefetching threads; 0 reads on the caller's thread (a batch costs far less than a step).

    Returns:
        An iterator of uint8 [rows, seq_len + 1] with `get_state` and `set_state`.

    Raises:
        ValueError: the text has no window.
    """
    windows = num_windows(text.size, seq_len)
    if windows < 1:
        raise ValueError(f"{text.size} bytes have no window of seq_len={seq_len}")
    order = grain.MapDataset.range(windows).seed(seed).shuffle().repeat().batch(batch_size)
    dataset = order.map(functools.partial(_take, text, seq_len, rows))
    options = grain.ReadOptions(num_threads=read_threads, prefetch_buffer_size=4 * read_threads)
    return iter(dataset.to_iter_dataset(options))


def _take(text: np.ndarray, seq_len: int, rows: tuple[int, int], windows: np.ndarray) -> np.ndarray:
    starts = windows[rows[0] : rows[1], None] * seq_len
    return text[starts + np.arange(seq_len + 1)]


def eval_windows(text: np.ndarray, *, seq_len: int, batch_size: int, max_bytes: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Windows that predict each byte of the beginning of `text` once, but its first.

    Returns:
        uint8 [batches, batch_size, seq_len + 1]; float32 weights [batches, batch_size], 0 for the rows that fill the last batch;
        and the number of bytes of `text` that they cover.
    """
    windows = max(1, num_windows(min(text.size, max_bytes), seq_len))
    starts = np.arange(windows)[:, None] * seq_len
    taken = text[starts + np.arange(seq_len + 1)]
    count = -(-windows // batch_size)
    padded = np.zeros((count * batch_size, seq_len + 1), np.uint8)
    padded[:windows] = taken
    weights = (np.arange(count * batch_size) < windows).astype(np.float32)
    return padded.reshape(count, batch_size, seq_len + 1), weights.reshape(count, batch_size), windows * seq_len + 1
