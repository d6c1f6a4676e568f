"""Errors on their way from one process to another."""

from __future__ import annotations

import pickle

from raystate.core.errors import ALL_ERRORS


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
