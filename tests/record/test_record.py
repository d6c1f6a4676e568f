"""What a Coordinator writes down: every message survives, it stays small, and a fresh machine decides the same on it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import os
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raystate.core.coordinator.machine import Coordinator
from raystate.core.formats.errors import InvalidTransitionError, RaystateError
from raystate.core.formats.messages import Command, Event, Failure, HostDown, HostId, HostOrder, Joined, Settings, SnapshotId, Tick
from raystate.observe.record import AttemptRecord, Record, Recorder, read_record, replay
from raystate.observe.record_codec import KINDS, UnknownMessageError, decode, encode
from raystate.storage import open_storage
from tests.patience import PATIENCE_S
from tests.processes import run_python
from tests.record.a_record import play, recorded
from tests.sim import simulate

SETTINGS = Settings(run="lm", storage="s")


def kinds(base: type[Any]) -> list[type[Any]]:
    """Of what is declared, those that nothing derives from."""
    found = [kind for kind in KINDS.values() if issubclass(kind, base)]
    return [kind for kind in found if not any(kind in other.__mro__[1:] for other in found)]


MESSAGES = [*kinds(Event), *kinds(HostOrder), *(kind for kind in typing.get_args(Command) if kind is not HostOrder)]


# ---------------------------------------------------------------- every message


def values(hint: Any) -> Iterator[Any]:
    """Values of a type, none of them a default."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        yield {"rank": 3, "steps": (1, 2)}
    elif isinstance(hint, typing.NewType):
        yield from values(hint.__supertype__)
    elif origin is typing.Literal:
        yield from arguments
    elif origin in (typing.Union, types.UnionType):
        for one in arguments:
            yield from values(one)
    elif origin is tuple and arguments[-1] is Ellipsis:
        yield tuple(values(arguments[0]))
    elif origin is tuple:
        yield tuple(next(values(one)) for one in arguments)
    elif origin is dict:
        yield {next(values(arguments[0])): one for one in values(arguments[1])}
    elif hint in KINDS.values():
        yield from every(hint)
    else:
        yield {bool: True, int: 7, float: 0.1, str: "é\n", type(None): None}[hint]


def every(kind: type[Any]) -> Iterator[Any]:
    """Values of a message: with one value in each field, and each further value in one of them."""
    hints = {name: hint for name, hint in typing.get_type_hints(kind).items() if not name.startswith("_")}
    choices = {name: list(values(hint)) for name, hint in hints.items()}
    whole = kind(**{name: found[0] for name, found in choices.items()})
    yield whole
    for name, found in choices.items():
        for one in found[1:]:
            yield whole._replace(**{name: one}) if hasattr(whole, "_replace") else dataclasses.replace(whole, **{name: one})


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_message_survives(kind: type[Any]) -> None:
    found = list(every(kind))
    assert found
    for one in found:
        assert decode(json.loads(json.dumps(encode(one)))) == one


def test_details_survive_as_they_are() -> None:
    details = {"list": [1, [2]], "tuple": (1, ()), "by rank": {0: "a", 1: None}, "set": {3}, "key": SnapshotId("1.1.x", 3)}
    failure = Failure(error="X", message="m", details=details)
    assert decode(json.loads(json.dumps(encode(failure)))) == failure
    odd = Failure(error="X", message="m", details={"odd": Path("/x")})
    assert "Path('/x')" in decode(encode(odd)).details["odd"]


def test_a_message_of_another_version_is_refused() -> None:
    with pytest.raises(UnknownMessageError, match="no message Teleported"):
        decode({"Teleported": {}})
    with pytest.raises(UnknownMessageError, match="colour"):
        decode({"HostDown": {"host": "a", "reason": "r", "colour": "red"}})


# ---------------------------------------------------------------- replay


def through_json(records: list[Record]) -> tuple[Record, ...]:
    return tuple(
        dataclasses.replace(
            one,
            event=decode(json.loads(json.dumps(encode(one.event)))),
            commands=decode(json.loads(json.dumps(encode(one.commands)))),
        )
        for one in records
    )


def assert_same(attempt: AttemptRecord, machine: Coordinator | None = None) -> None:
    played = list(replay(attempt))
    for record, commands, _ in played:
        assert commands == record.commands, f"attempt {attempt.attempt}, event {record.number}: {record.event}"
    *_, (_, _, again) = played
    assert machine is None or again.state() == machine.state()


@pytest.mark.parametrize("seed", range(8))
def test_a_simulated_run_is_decided_again_in_the_same_way(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: dict[int, tuple[Coordinator, list[Record]]] = {}
    handle = Coordinator.handle

    def listen(machine: Coordinator, event: Event, now_s: float, *, more: bool = False) -> list[Command]:
        commands = handle(machine, event, now_s, more=more)
        _, records = heard.setdefault(id(machine), (machine, []))
        said = {"now_s": now_s, "event": event, "commands": tuple(commands), "more": more}
        records.append(Record(attempt=0, number=len(records), time_s=0.0, **said))
        return commands

    with monkeypatch.context() as patch:
        patch.setattr(Coordinator, "handle", listen)
        assert simulate(seed).ok
    assert sum(len(records) for _, records in heard.values()) > 30
    for machine, records in heard.values():
        assert_same(AttemptRecord(attempt=0, settings=machine.settings, records=through_json(records)), machine)


def test_another_process_decides_the_same(tmp_path: Path) -> None:
    play(tmp_path / "run", tmp_path / "record")
    code = (
        "import sys; from pathlib import Path; from raystate.observe.record import read_record, replay; "
        "print(sum(record.commands == again for one in read_record(Path(sys.argv[1])) for record, again, _ in replay(one)))"
    )
    count = sum(len(one.records) for one in read_record(tmp_path / "record"))
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        assert int(run_python("-c", code, tmp_path / "record", env=environment).stdout) == count


def test_a_machine_prints_its_state(tmp_path: Path) -> None:
    first, _ = play(tmp_path / "run", tmp_path / "record")
    assert repr(first.machine).startswith("<Coordinator: attempt 1; ")
    state = first.machine.state()
    assert json.loads(json.dumps(state)) == state
    assert state["journal"]["published"] == [20, 30]
    assert state["snapshots"]["stable"] == 30
    assert "journal" not in state["saves"], "each part is told once"


# ---------------------------------------------------------------- files


def record_ticks(recorder: Recorder, count: int) -> None:
    recorder.begin(1, SETTINGS)
    for number in range(count):
        recorder.record(Tick(), (), float(number))
    recorder.close(PATIENCE_S)


def test_it_stays_small_and_keeps_the_newest(tmp_path: Path) -> None:
    seconds = itertools.count(1_700_000_000)  # how well the parts compress must not depend on how busy the machine is
    recorder = Recorder(tmp_path, part_bytes=20_000, total_bytes=30_000, wall_clock=lambda: next(seconds))
    record_ticks(recorder, 15_000)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sum(sizes.values()) <= 30_000
    assert sum(name.endswith(".gz") for name in sizes) > 3
    (attempt,) = read_record(tmp_path)
    numbers = [one.number for one in attempt.records]
    assert numbers == list(range(numbers[0], 15_000))
    assert 1_000 < len(numbers) < 15_000
    with pytest.raises(RaystateError, match="event 0 of attempt 1 is not in the record any more"):
        list(replay(attempt))


def test_a_writer_that_died_leaves_what_it_had_written(tmp_path: Path) -> None:
    record_ticks(Recorder(tmp_path), 100)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-20])
    (tmp_path / "000002-000000.jsonl").touch()  # died at once
    (attempt,) = read_record(tmp_path)
    assert len(attempt.records) == 99


def test_a_run_that_begins_anew_forgets_the_attempts_of_the_old_one(tmp_path: Path) -> None:
    for attempt in (1, 2, 3):
        recorder = Recorder(tmp_path)
        recorder.begin(attempt, SETTINGS)
        recorder.close()
    record_ticks(Recorder(tmp_path), 5)
    assert [one.attempt for one in read_record(tmp_path)] == [1]


def _garbage(path: Path) -> None:
    path.write_bytes(b"\x00\xff\n")


def _other_format(path: Path) -> None:
    path.write_text('{"format": 99}\n')


def _not_packed(path: Path) -> None:
    path.rename(f"{path}.gz")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [(_garbage, "is not the record of a run"), (_other_format, "its format is 99"), (_not_packed, "is not the record of a run")],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, spoil: Callable[[Path], None], said: str) -> None:
    record_ticks(Recorder(tmp_path), 5)
    (path,) = tmp_path.iterdir()
    spoil(path)
    with pytest.raises(RaystateError, match=said) as caught:
        read_record(tmp_path)
    assert path.name in caught.value.message


def test_a_folder_that_cannot_be_written_costs_only_the_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    recorder = Recorder(tmp_path / "file" / "record")
    with caplog.at_level(logging.WARNING):
        record_ticks(recorder, 5)
        recorder.record(Tick(), (), 9.0)
    assert "ends here" in caplog.text


def test_an_event_that_the_machine_cannot_take_is_in_the_record(tmp_path: Path) -> None:
    def refuse(event: HostDown) -> None:
        raise KeyError(event.host)

    with recorded(open_storage(tmp_path / "run"), tmp_path / "record", "p") as process:
        process.claim()
        process.join()
        process.machine._handlers[HostDown] = refuse
        process.loop.post(HostDown(host=HostId("a"), reason="gone"))
        with pytest.raises(InvalidTransitionError):
            process.settle()
    (attempt,) = read_record(tmp_path / "record")
    assert attempt.records[-1].event == HostDown(host=HostId("a"), reason="gone")
    assert attempt.records[-1].commands == ()
    assert any(isinstance(one.event, Joined) for one in attempt.records)
