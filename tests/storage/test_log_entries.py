"""What an entry of the log holds survives being written down."""

import pytest

from raystate.core.formats.codec import seal, unseal
from raystate.core.formats.entries import LiveStep, LogEntry

LIVE = LiveStep(step=7, save="a1k7", metrics={"loss": 0.5}, time_s=3.0, lineage="1.0.ab")


def test_the_lineage_of_a_live_step_survives():
    entry = LogEntry(seq=1, attempt=1, writer="w", kind="commit", run="lm", live=(LIVE,))
    assert LogEntry.from_json(entry.to_json()).live == (LIVE,)


def test_an_unknown_field_is_no_entry():
    document = unseal(LogEntry(seq=1, attempt=1, writer="w", kind="commit", run="lm", live=(LIVE,)).to_json())
    document["live"][0]["colour"] = "red"
    with pytest.raises(ValueError, match=r"live: unknown fields colour"):
        LogEntry.from_json(seal(document))
