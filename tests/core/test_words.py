"""Control words as bytes: small ones come back as they were, and whatever stands in one, it fits."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from raystate.core.formats.errors import CapacityError
from raystate.core.formats.messages import Failure, HostWord, Proposal, TrainerWord
from raystate.core.formats.words import (
    MAX_SLOTS,
    MAX_WORD_BYTES,
    cut,
    host_word_from_json,
    host_word_to_json,
    trainer_word_from_json,
    trainer_word_to_json,
)

NUMBER = st.integers(-1, 2**63)
NUMBERS = st.lists(NUMBER, max_size=MAX_SLOTS).map(tuple) | st.just((2**63,) * MAX_SLOTS)
SECONDS = st.floats(0, 1e9)
NAME = st.text(max_size=60)
SPENT = st.lists(st.tuples(NAME, SECONDS), max_size=20).map(tuple)  # sixteen sections, and what has a name of ours
UGLY = "\U0001f980\ud800é\0"  # 12 + 6 + 6 + 6 bytes as JSON
SMALL = st.text(max_size=200)
LARGE = st.builds(lambda text, times: text * times, st.text(max_size=30) | st.just(UGLY), st.integers(0, 20_000))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


class _Odd:
    def __str__(self) -> str:
        raise RuntimeError("no text of me")


_RING: list[Any] = []
_RING.append(_RING)
ODD = st.sampled_from([_Odd(), object(), _RING, 10**5000, {(1, 2): 3}, b"bytes", {1}, float("nan"), ["x" * 50_000], (1, (2, 3))])


def trainer_words(text: st.SearchStrategy[str]) -> st.SearchStrategy[TrainerWord]:
    # Fields that are not named here are drawn by their type: one that can't be cut is found by the tests below.
    return st.builds(
        TrainerWord,
        **{**_typed(TrainerWord, text), "lineage": NAME, "section": NAME, "spent": SPENT},
    )


def host_words(text: st.SearchStrategy[str], details: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[HostWord]:
    proposal = st.builds(Proposal, **{**_typed(Proposal, text), "state": st.sampled_from(["proposed", "withdrawn"])})
    failure = st.builds(Failure, error=NAME, message=text, details=details)
    return st.builds(
        HostWord,
        **_typed(HostWord, text),
        proposal=st.none() | proposal,
        failure=st.none() | failure,
        save_errors=st.lists(text, max_size=20).map(tuple),
    )


def _typed(kind: type, text: st.SearchStrategy[str]) -> dict[str, st.SearchStrategy[Any]]:
    """Numbers of any size for the numbers of `kind`, and `text` for its texts."""
    reached = st.lists(st.tuples(NUMBER, SECONDS), max_size=4).map(tuple)
    known = {"int": NUMBER, "tuple[int, ...]": NUMBERS, "str": text, "float": SECONDS, "tuple[tuple[int, float], ...]": reached}
    return {field.name: known[str(field.type)] for field in dataclasses.fields(kind) if str(field.type) in known}


SMALL_HOST = host_words(st.text(max_size=60), st.dictionaries(st.text(max_size=20), JSON, max_size=4))
LARGE_HOST = host_words(LARGE, st.dictionaries(LARGE, JSON | LARGE | ODD, max_size=20))


@given(trainer_words(SMALL))
def test_a_small_trainer_word_comes_back_as_it_was(word: TrainerWord):
    assert trainer_word_from_json(trainer_word_to_json(word)) == word


@given(SMALL_HOST)
def test_a_small_host_word_comes_back_as_it_was(word: HostWord):
    data = host_word_to_json(word)
    assert len(data) <= MAX_WORD_BYTES
    assert host_word_from_json(data) == word


@given(trainer_words(LARGE))
@example(
    TrainerWord(
        lineage="1.1.a",
        rank=0,
        world=1,
        error=UGLY * 100_000,
        done=(2**63,) * MAX_SLOTS,
        spent=(("section:" + "\U0001f980" * 60, 123456789.123456),) * 20,
        section="\U0001f980" * 60,
    )
)
def test_any_trainer_word_fits_and_only_its_text_is_cut(word: TrainerWord):
    data = trainer_word_to_json(word)
    assert len(data) <= MAX_WORD_BYTES
    found = trainer_word_from_json(data)
    assert dataclasses.replace(found, error="") == dataclasses.replace(word, error="")
    assert found.error == word.error or _is_cut_of(found.error, word.error)


@given(LARGE_HOST)
@example(HostWord(failure=Failure(error="BarrierTimeoutError", message="x" * 10**6, details={"ranks": [*range(4096)] * 9, "n": 1})))
@example(HostWord(failure=Failure(error="E", message="m", details={f"detail {i}": i for i in range(10_000)})))
@example(HostWord(failure=Failure(error="E", message=UGLY * 9999, details={"a" * 99_999: 1, "b": UGLY * 9999})))
def test_any_host_word_fits_and_what_matters_is_in_it(word: HostWord):
    data = host_word_to_json(word)
    assert len(data) <= MAX_WORD_BYTES
    found = host_word_from_json(data)
    assert (found.grants, found.interval, found.durable_step) == (word.grants, word.interval, word.durable_step)
    assert (found.proposal is None, found.failure is None) == (word.proposal is None, word.failure is None)
    if found.proposal and word.proposal:
        assert dataclasses.replace(found.proposal, reason="") == dataclasses.replace(word.proposal, reason="")
    if found.failure and word.failure:
        assert found.failure.error == word.failure.error
        assert found.failure.message == word.failure.message or _is_cut_of(found.failure.message, word.failure.message)
    kept = len(found.save_errors)
    assert bool(kept) == bool(word.save_errors)
    for got, full in zip(found.save_errors, word.save_errors[len(word.save_errors) - kept :], strict=True):
        assert got == full or _is_cut_of(got, full)


def _is_cut_of(short: str, full: str) -> bool:
    head, _, note = short.rpartition("… (")
    return full.startswith(head) and note == f"{len(full) - len(head)} more characters)"


def test_long_details_are_left_out_and_named_and_short_ones_stay():
    details = {"waited_s": 2.5, "ranks": [*range(20_000)], "path": "p" * 40_000, "host": "h1"}
    found = host_word_from_json(host_word_to_json(HostWord(failure=Failure(error="StorageError", message="m", details=details))))
    assert found.failure is not None
    kept = found.failure.details
    assert (kept["waited_s"], kept["host"], kept["left_out"]) == (2.5, "h1", "ranks")
    assert kept["path"] == cut("p" * 40_000, 4000) == "p" * 4000 + "… (36000 more characters)"


def test_a_row_of_31_lagging_ranks_and_a_long_error_fit_whole():
    names = ", ".join(f"rank {rank} on host {'0a1b2c3d' * 7} (last seen at step {rank})" for rank in range(31))
    word = HostWord(grants=(3, 4, 5), save_errors=(names,), failure=Failure(error="BarrierTimeoutError", message=names * 2))
    assert len(names) * 3 > 4000
    assert host_word_from_json(host_word_to_json(word)) == word


def test_numbers_alone_that_do_not_fit_are_an_error_with_numbers():
    with pytest.raises(CapacityError, match=r"HostWord has .* bytes when its texts are cut; 32000 fit") as caught:
        host_word_to_json(HostWord(grants=(2**63,) * 2000))
    assert caught.value.needed_bytes > caught.value.available_bytes == MAX_WORD_BYTES


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\x00",
        b"null",
        b"[]",
        b"7",
        b"{}",
        b'{"grants":7}',
        b'{"grants":[1,"2"]}',
        b'{"grants":[true]}',
        b'{"unknown":1}',
        b'{"failure":{}}',
        b'{"failure":{"error":1,"message":"m"}}',
        b'{"proposal":{"id":1,"kind":"dance","step":1,"state":"proposed"}}',
        b'{"save_errors":"text"}',
        b"[" * 100_000,
    ],
)
def test_anything_else_is_a_value_error_and_nothing_worse(data: bytes):
    if data != b"{}":  # a HostWord has a default for everything
        with pytest.raises(ValueError):
            host_word_from_json(data)
    with pytest.raises(ValueError):
        trainer_word_from_json(data)


@given(st.sampled_from(["trainer", "host"]), st.data())
def test_a_word_with_one_field_of_another_type_is_a_value_error(which: str, data: st.DataObject):
    known: TrainerWord | HostWord
    known, read = (
        (TrainerWord(lineage="l", rank=0, world=1), trainer_word_from_json)
        if which == "trainer"
        else (HostWord(), host_word_from_json)
    )
    raw = dataclasses.asdict(known)
    raw[data.draw(st.sampled_from(sorted(raw)))] = data.draw(JSON)
    try:
        assert isinstance(read(json.dumps(raw).encode()), type(known))
    except ValueError:
        pass
