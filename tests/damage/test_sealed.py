"""Log entries and packages that somebody made up, with a checksum that fits: an answer or an error of ours, within bounded memory."""

from __future__ import annotations

import json
import os
import random
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest

from raystate.core.formats.codec import seal, unseal
from raystate.core.formats.entries import Intent, LiveStep, LogEntry
from raystate.core.formats.errors import RaystateError
from raystate.storage import RunLog, StepFolder, Storage, open_storage
from raystate.storage.names import log_name, package_name
from tests.damage.test_said import mutated
from tests.storage.backends import a_package

SEED = int(os.environ["RAYSTATE_SEED"])
ROUNDS = int(os.environ.get("RAYSTATE_ROUNDS", "60"))
MOST_BYTES = 64 << 20  # that reading one may take


def entry() -> bytes:
    live = tuple(LiveStep(step=step, save=f"a1k{step}", metrics={"loss": 0.5}, time_s=3.0, lineage="1.0.ab") for step in (3, 7))
    intents = (Intent(kind="commit", step=7, save="a1k7", attempt=1, seq=1),)
    return LogEntry(seq=1, attempt=1, writer="w", kind="commit", run="lm", live=live, intents=intents).to_json()


def package() -> bytes:
    return a_package(5, "a1k1")[0].to_bytes()


def read_entry(storage: Storage, data: bytes) -> object:
    storage.create(log_name(1), data)
    return RunLog(storage).read(1)


def read_package(storage: Storage, data: bytes) -> object:
    storage.create(package_name(5, "a1k1"), data)
    return StepFolder(storage, 5, "a1k1").read_package()


KINDS = {"entry": (entry, read_entry), "package": (package, read_package)}


def sealed(document: bytes) -> bytes:
    """As `seal`, of JSON that Python itself would not write."""
    return document[:-1] + b',"crc32":"%08x"}' % zlib.crc32(document[:-1])


HOSTILE = {
    "nothing": b"",
    "pickle": b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x02id\x94\x85\x94R\x94.",
    "deep": sealed(b'{"live":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "deep objects": sealed(b'{"files":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}"),
    "very many digits": sealed(b'{"seq":' + b"9" * 100_000 + b"}"),
    "empty": sealed(b"{}"),
    "a base elsewhere": seal({**unseal(entry()), "base": "../../../etc/passwd"}),
}


def outcome(kind: str, data: bytes, folder: Path) -> Any:
    """What reading gives, or the error of ours. Raises any other exception."""
    try:
        return KINDS[kind][1](open_storage(folder), data)
    except RaystateError as error:
        return error


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_written_is_read(kind: str, tmp_path: Path):
    assert not isinstance(outcome(kind, KINDS[kind][0](), tmp_path), RaystateError)


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("kind", KINDS)
def test_a_made_up_file_is_refused(kind: str, name: str, tmp_path: Path):
    tracemalloc.start()
    try:
        assert isinstance(outcome(kind, HOSTILE[name], tmp_path), RaystateError)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_it_says_is_an_answer_or_an_error_of_ours(kind: str, tmp_path: Path):
    """One or two values of it are others; the checksum is made anew."""
    chance = random.Random(SEED)
    told = 0
    for number in range(ROUNDS):
        document = unseal(KINDS[kind][0]())
        for _ in range(chance.randrange(1, 3)):
            document = mutated(chance, document)
        try:
            data = seal(document)
        except (ValueError, TypeError, UnicodeEncodeError):
            continue  # no text can say that
        try:
            told += isinstance(outcome(kind, data, tmp_path / str(number)), RaystateError)
        except Exception as error:
            raise AssertionError(f"{error!r} of {json.dumps(document)[:2000]}") from error
    assert told > ROUNDS // 20
