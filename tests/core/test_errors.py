"""Errors on their way from one process to another."""

from __future__ import annotations

import pickle

from raystate.core.formats.errors import ALL_ERRORS
from raystate.core.formats.texts import counted, printable


def test_an_error_travels_with_its_facts_and_notes():
    """A driver never saw what the controller had noted on it, such as steps that are lost."""
    for kind in ALL_ERRORS:
        error = kind("it failed", step=7, path="p")
        error.add_note("not durable, although save() had said True: step 5")
        error.add("try again")
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is kind
        assert (copy.message, copy.step, copy.path, copy.__notes__) == ("it failed; try again", 7, "p", error.__notes__)
        assert not hasattr(pickle.loads(pickle.dumps(kind("it failed"))), "__notes__")


def test_no_text_of_others_commands_a_terminal() -> None:
    odd = "a\x1b[31m\u202eb\a\ud800\u2028c\td\n"
    assert printable(odd) == "a\\x1b[31m\\u202eb\\x07\\ud800\\u2028c\td\n"
    assert printable("Käse 🧀 \u0645\u0627") == "Käse 🧀 \u0645\u0627"
    for kind in ALL_ERRORS:
        error = kind(f"no leaf {odd}")
        error.add(odd)
        assert printable(str(error)) == str(error)


def test_one_thing_is_not_called_several() -> None:
    assert [counted(number, "step") for number in (0, 1, 2000)] == ["0 steps", "1 step", "2,000 steps"]
    assert [counted(number, "leaf", "leaves") for number in (1, 2)] == ["1 leaf", "2 leaves"]
