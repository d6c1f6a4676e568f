"""The corpus: the same everywhere, split by file, identified by what is in it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from jobs.lm.config import DataConfig
from jobs.lm.corpus import CorpusError, entropy_bits_per_byte, load_corpus, zlib_bits_per_byte


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(60):
        path = tmp_path / f"package{number % 3}" / f"module{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"def f{number}():\n    return {number}\n" * 80)
    return tmp_path


CONFIG = DataConfig(val_fraction=0.3, max_bytes=1 << 20)


def test_reading_twice_gives_the_same(folder: Path) -> None:
    first, second = load_corpus(CONFIG, folder), load_corpus(CONFIG, folder)
    assert first.fingerprint == second.fingerprint
    np.testing.assert_array_equal(first.train, second.train)
    assert first.train.dtype == np.uint8


def test_train_and_validation_share_no_file(folder: Path) -> None:
    corpus = load_corpus(CONFIG, folder)
    assert not set(corpus.train_files) & set(corpus.val_files)
    assert 57 <= len(corpus.train_files) + len(corpus.val_files) <= 60
    assert 0.2 < corpus.val.size / (corpus.train.size + corpus.val.size) < 0.31
    train = corpus.train.tobytes()
    for name in corpus.val_files:
        assert (folder / name).read_bytes() not in train


def test_fingerprint_follows_content_names_and_split(folder: Path) -> None:
    before = load_corpus(CONFIG, folder).fingerprint
    assert load_corpus(CONFIG.model_copy(update={"val_fraction": 0.2}), folder).fingerprint != before
    changed = folder / "package1" / "module1.py"
    text = changed.read_text()
    changed.write_text(text.replace("1", "2", 1))
    assert load_corpus(CONFIG, folder).fingerprint != before
    changed.write_text(text)
    assert load_corpus(CONFIG, folder).fingerprint == before
    changed.rename(changed.with_name("renamed.py"))
    assert load_corpus(CONFIG, folder).fingerprint != before


def test_excluded_names_and_other_files_are_not_read(folder: Path) -> None:
    before = load_corpus(CONFIG, folder).fingerprint
    for name in ("test/x.py", "package1/site-packages/y.py", "_sysconfigdata_linux.py", "package1/readme.txt"):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x = 1\n")
    assert load_corpus(CONFIG, folder).fingerprint == before


def test_the_cap_holds_and_too_little_text_is_an_error(folder: Path, tmp_path: Path) -> None:
    capped = load_corpus(CONFIG.model_copy(update={"max_bytes": 70_000}), folder)
    whole = load_corpus(CONFIG, folder)
    assert capped.train.size + capped.val.size < 70_000 + len(capped.train_files + capped.val_files)
    assert capped.train.size + capped.val.size > 65_000
    assert set(capped.val_files) <= set(whole.val_files)
    with pytest.raises(CorpusError, match="too little Python text"):
        load_corpus(CONFIG, tmp_path / "absent")


def test_the_standard_library_is_there() -> None:
    corpus = load_corpus(DataConfig(max_bytes=1 << 20))
    assert 900_000 < corpus.train.size + corpus.val.size <= 1_049_600
    assert corpus.val.size > 10_000


def test_baselines() -> None:
    text = np.frombuffer(b"abcd" * 4096, np.uint8)
    assert math.isclose(entropy_bits_per_byte(text), 2.0)
    assert zlib_bits_per_byte(text) < 0.05
    noise = np.random.default_rng(0).integers(0, 256, 1 << 16, dtype=np.uint8)
    assert 7.9 < entropy_bits_per_byte(noise) < zlib_bits_per_byte(noise) < 8.1
