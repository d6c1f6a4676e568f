from __future__ import annotations

import google_crc32c
import numpy as np
import pytest

from raystate.machine import checksum
from raystate.machine.checksum import Bytes, copy, crc32c


def copy_with_crc(target: Bytes, source: Bytes) -> int:
    copy(target, source)
    return crc32c(target)


@pytest.fixture(params=["c", "python"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(checksum, "_extend", None)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 262_144, 262_145, 1_000_003])
def test_equals_the_reference_and_copies_every_byte(size: int):
    source = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    target = np.zeros(size, np.uint8)
    expected = google_crc32c.value(source.tobytes())
    assert crc32c(source) == crc32c(source.tobytes()) == copy_with_crc(target, source) == expected
    assert np.array_equal(source, target)
    assert crc32c(source[size // 2 :], crc32c(source[: size // 2])) == expected


@pytest.mark.usefixtures("implementation")
def test_many_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checksum, "_LOCKED_BYTES", 1000)
    monkeypatch.setattr(checksum, "_SMALL_BYTES", 100)
    source = np.arange(10_007, dtype=np.uint8).reshape(1, -1)
    assert crc32c(source) == google_crc32c.value(source.tobytes())


def test_the_lock_is_let_go_once_for_what_is_big_and_never_for_what_is_small(monkeypatch: pytest.MonkeyPatch):
    """Each time costs up to 5 ms beside a thread that runs Python code."""
    real, sizes = checksum._extend, []
    if real is None:
        pytest.skip("this build of google_crc32c exports no C function")

    def counted(crc: int, address: int, size: int) -> int:
        sizes.append(size)
        return real(crc, address, size)

    monkeypatch.setattr(checksum, "_extend", counted)
    monkeypatch.setattr(np, "copyto", lambda *_: pytest.fail("numpy lets go of the lock"))
    small = np.arange(256 * 1024).astype(np.uint8)
    assert copy_with_crc(np.zeros_like(small), small) == google_crc32c.value(small.tobytes())
    assert sizes == []
    monkeypatch.undo()
    monkeypatch.setattr(checksum, "_extend", counted)
    big = np.arange(20_000_001).astype(np.uint8)
    assert copy_with_crc(np.zeros_like(big), big) == google_crc32c.value(big.tobytes())
    assert sizes == [big.size]


def test_read_only_and_shaped_sources_are_fine_others_are_refused():
    source = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    source.flags.writeable = False
    target = np.zeros(24, np.uint8)
    assert copy_with_crc(target, source) == crc32c(target)
    for wrong in (source[:, :, ::2], source.view(np.uint16)):
        with pytest.raises(ValueError, match="contiguous uint8"):
            crc32c(wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="24 bytes into 23"):
        copy_with_crc(target[:23], source)
