"""A message is declared in one place; what is stored, or called between actors, has a number that goes up with its declarations."""

from __future__ import annotations

import hashlib
import inspect
import re
from typing import Any

import pytest

from raystate.actors import coordinator, host, naming, reporting
from raystate.arena import files, meta, slot_set
from raystate.core.coordinator.machine import Coordinator
from raystate.core.formats import entries, host_messages, tree
from raystate.core.formats.declared import Event, fingerprint
from raystate.core.formats.messages import (
    Copy,
    DeleteAsked,
    HostOrder,
    HostReported,
    HostWord,
    Packaged,
    Settings,
    Staged,
    TrainerWord,
)
from raystate.core.host.machine import Host
from raystate.observe import ends
from raystate.observe.record_codec import KINDS, messages_format
from raystate.runtime import parts
from raystate.runtime.coordinator import one_storage
from tests.house.figures import REPO, messages

MOST_FILES = 5


def calls(actor: type[Any]) -> str:
    methods = {name: method for name, method in vars(actor).items() if inspect.isfunction(method) and not name.startswith("_")}
    return "\n".join(f"{name}{inspect.signature(method)}" for name, method in sorted(methods.items()))


def spoken() -> str:
    """What actors are called with, and answer, beside the messages."""
    handed = (
        parts.HostPart,
        parts.PieceBoxes,
        parts.PieceHead,
        coordinator.Welcome,
        reporting.RunReport,
        ends.Told,
        one_storage.Claim,
    )
    said = f"{calls(coordinator.CoordinatorActor)}\n{calls(host.HostActor)}\n{fingerprint(*handed)}"
    return hashlib.sha256(said.encode()).hexdigest()[:12]


LOG = (entries.WrittenEntry, entries.Base, tree.Package)
ARENA = (
    meta.ArenaMeta, slot_set.SetInfo, tree.SlotTable, tree.Layout, Staged, TrainerWord, HostWord, host_messages.Remember,
)  # fmt: skip


@pytest.mark.parametrize(
    ("number", "declared", "known"),
    [
        pytest.param(entries.FORMAT, lambda: fingerprint(*LOG), (4, "e1548f53b248"), id="the log, in core/formats/entries.py"),
        pytest.param(files.FORMAT, lambda: fingerprint(*ARENA), (14, "8ec692603d7a"), id="arenas, in arena/files.py"),
        pytest.param(naming.CALLS, spoken, (42, "d039dafbe642"), id="calls of actors, in actors/naming.py"),
    ],
)
def test_a_number_goes_up_with_what_it_stands_for(number: int, declared: Any, known: tuple[int, str]) -> None:
    assert (number, declared()) == known, "the declarations have changed: raise the number, and write both down here"


def test_a_hash_sees_what_two_versions_would_read_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    before = messages_format()
    assert re.fullmatch("[0-9a-f]{12}", before) and naming.protocol() == f"{naming.CALLS}.{before}"
    for kind, change in (
        (Staged, {"step": "float"}),  # a type, of a field of a report
        (Settings, {"another": "int"}),
        (TrainerWord, {"phase": "Literal['joined', 'running']"}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(kind, "__annotations__", kind.__annotations__ | change)
            assert fingerprint(*KINDS.values()) != before
    assert fingerprint(*KINDS.values()) == before


def test_each_event_and_each_order_has_a_handler() -> None:
    def known(machine: Any) -> set[str]:
        return {kind.__name__ for kind in machine._handlers}

    assert known(Coordinator(Settings(run="lm", storage="s"))) == messages(Event.__name__)
    assert known(Host(host_messages.HostId("a"), "i")) >= messages(HostOrder.__name__) | messages("StampedOrder")


@pytest.mark.parametrize("kind", [HostReported, Packaged, DeleteAsked, Copy])
def test_a_message_and_an_order_touch_few_files(kind: type[Any]) -> None:
    """Those that nothing treats in a way of its own. A name counts in code, not where it is a word of a docstring or comment."""
    prose, word = re.compile(r'"""(?s:.*?)"""|#[^\n]*'), re.compile(rf"\b{kind.__name__}\b")
    found = [str(path) for path in (REPO / "raystate").rglob("*.py") if word.search(prose.sub("", path.read_text()))]
    assert 3 <= len(found) <= MOST_FILES, found
