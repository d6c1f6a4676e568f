"""Damage to anything under a step or under `.raystate`: what is restored is what was saved, or an error says that it is damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raystate.inspection import places, verification
from raystate.orbax import writer
from raystate.orbax.writer import array_spec
from raystate.storage import open_storage
from tests.damage.a_run import STEPS, make_run
from tests.damage.damages import FIRST, ONE_OBJECT, SEEDS, Copy, is_data
from tests.damage.judging import NEWEST, Flat, Judge, Tally, expected_of, restore, shown, step_in

CHUNK = 125
ENOUGH = 8 * CHUNK


def test_an_undamaged_run_is_right(copy: Copy, expected: dict[int, Flat]):
    for step in (*STEPS, None):
        outcome = restore(copy.root, step, expected)
        assert (outcome.kind, outcome.step) == ("right", step or NEWEST), outcome
    storage = open_storage(copy.root)
    assert [verification.verify_step(storage, step).bad for step in STEPS] == [()] * len(STEPS)
    assert verification.verify_log(storage) == ()


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    counted = Tally()
    yield counted
    print(shown(counted))  # noqa: T201


@pytest.mark.parametrize("chunk", range(SEEDS // CHUNK))
def test_a_restore_is_right_or_says_so(copy: Copy, expected: dict[int, Flat], tally: Tally, chunk: int):
    judge = Judge(copy, expected, tally)
    seeds = range(FIRST + chunk * CHUNK, FIRST + (chunk + 1) * CHUNK)
    data = [name for name in copy.names if is_data(name)]
    # Any object is as likely as any other; but most are small files, so that every fourth damage goes to the data alone.
    damages = (copy.draw(seed, among=data if seed % 4 == 3 else ()) for seed in seeds)
    complaints = [complaint for damage in damages for complaint in judge.complaints(damage)]
    print(f"seeds {seeds.start} to {seeds.stop - 1}")  # noqa: T201
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("chunk", range(SEEDS // CHUNK // 4))
def test_without_packages_no_array_is_wrong_in_silence(copy: Copy, expected: dict[int, Flat], chunk: int):
    """As of a step that was copied elsewhere alone: nothing tells what its small files should be. Arrays have checksums of their own."""
    counts = {"right": 0, "said": 0, "other than arrays": 0}
    for info in (copy.root / ".raystate/steps").iterdir():
        info.unlink()
    among = [name for name in copy.names if step_in(name) == NEWEST and not name.startswith(".raystate/")]
    arrays = {path for path, bits in expected[NEWEST].items() if isinstance(bits, tuple) and len(bits) == 3}
    assert len(arrays) > 10
    for seed in range(FIRST + chunk * CHUNK, FIRST + (chunk + 1) * CHUNK):
        damage = copy.draw(seed, kinds=ONE_OBJECT, among=among)
        with copy.damaged(damage) as root:
            outcome = restore(root, NEWEST, expected)
        assert outcome.kind != "foreign", f"{damage}: {outcome}"
        assert not arrays & {*outcome.differing}, f"{damage}: {outcome}"
        counts[outcome.kind if outcome.kind != "wrong" else "other than arrays"] += 1
    print(counts)  # noqa: T201


# ---------------------------------------------------------------- this test can see


def _without_checksums(*args: Any, **kwargs: Any) -> dict[str, Any]:
    spec = array_spec(*args, **kwargs)
    spec["metadata"]["codecs"] = [codec for codec in spec["metadata"]["codecs"] if codec["name"] != "crc32c"]
    return spec


def test_arrays_without_checksums_are_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writer, "array_spec", _without_checksums)
    expected = expected_of(make_run(tmp_path / "run"))
    assert found_out(Copy(tmp_path / "run", tmp_path / "copy"), expected, lambda name: "/ocdbt.process_" in name and "/d/" in name)


def test_small_files_that_are_not_read_from_the_package_are_found_out(
    copy: Copy, expected: dict[int, Flat], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(places, "find_package", lambda storage, step: None)
    assert found_out(copy, expected, lambda name: not is_data(name))


def found_out(copy: Copy, expected: dict[int, Flat], is_target: Callable[[str], bool]) -> bool:
    """Whether one of many damages to the newest step is restored as if nothing had happened: about one of fifteen is."""
    among = [name for name in copy.names if step_in(name) == NEWEST and not name.startswith(".raystate/") and is_target(name)]
    for seed in range(FIRST, FIRST + ENOUGH):
        with copy.damaged(copy.draw(seed, kinds=("flip", "zeros"), among=among)) as root:
            if restore(root, NEWEST, expected).kind == "wrong":
                return True
    return False
