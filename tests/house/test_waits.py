"""Time-outs have one place, and a name has one value."""

from __future__ import annotations

import re

from raystate import waits
from tests.house.figures import REPO, sources, time_outs

WAITS = REPO / "raystate" / "waits.py"


def test_each_time_out_of_a_module_is_in_the_table():
    in_table = {name for name in vars(waits) if name.endswith("_S")}
    assert len(in_table) > 20
    assert sorted(name for name, _ in time_outs()) == sorted(in_table), "a name of seconds outside of raystate/waits.py"


def test_each_time_out_waits_for_something():
    texts = [text for path, text, _ in sources(REPO / "raystate") if path != WAITS]
    assert not [name for name in vars(waits) if name.endswith("_S") and not any(name in text for text in texts)]


def test_each_time_out_says_what_waits_and_what_happens_then():
    said = {name: above for above, name in re.findall(r"((?:# [^-].*\n)+)(\w+_S) = ", WAITS.read_text())}
    assert not [name for name in vars(waits) if name.endswith("_S") and "\n# Then" not in said.get(name, "")]
