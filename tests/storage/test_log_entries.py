"""What an entry of the log holds survives being written down, and what an older raystate wrote is read."""

import pytest

from raystate.core.formats.entries import Intent, LiveStep, LogEntry
from raystate.core.formats.sealed import seal, unseal

LIVE = LiveStep(step=7, save="a1k7", metrics={"loss": 0.5}, time_s=3.0, lineage="1.0.ab")


def test_the_lineage_of_a_live_step_survives():
    entry = LogEntry(seq=1, attempt=1, writer="w", kind="commit", run="lm", live=(LIVE,))
    assert LogEntry.from_json(entry.to_json()).live == (LIVE,)


def test_an_older_entry_has_live_steps_without_a_lineage():
    entry = LogEntry(seq=1, attempt=1, writer="w", kind="commit", run="lm", live=(LIVE,))
    document = unseal(entry.to_json())
    for field in ("lineage",):
        del document["live"][0][field]
    document["intents"] = [{"kind": "commit", "step": 7, "save": "a1k7", "attempt": 1, "seq": 1}]
    read = LogEntry.from_json(seal(document))
    assert read.live[0].lineage == ""
    assert read.live[0].metrics == {"loss": 0.5}
    assert read.intents == (Intent(kind="commit", step=7, save="a1k7", attempt=1, seq=1),)


def test_an_unknown_field_is_no_entry():
    document = unseal(LogEntry(seq=1, attempt=1, writer="w", kind="commit", run="lm", live=(LIVE,)).to_json())
    document["live"][0]["colour"] = "red"
    with pytest.raises(TypeError):
        LogEntry.from_json(seal(document))
