"""A slot that is damaged before it is written: the save fails and says so, whenever that happens."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from raystate.arrays.stage import copy, views
from raystate.arrays.tree import describe
from raystate.core.formats.errors import CorruptCheckpointError
from raystate.core.formats.messages import HostId, SaveId, Write
from raystate.core.formats.tree import SlotTable
from raystate.runtime.host import writing
from raystate.runtime.parts import HostPart
from raystate.storage import open_storage


@pytest.fixture
def staged():
    """(described, the bytes in the slot, its table)"""
    described = describe({"state": {"w": np.arange(4096, dtype=np.float32), "b": np.ones(3, np.int8)}})
    data = np.zeros(described.layout.data_bytes, np.uint8)
    table = SlotTable(layout_ref="L", crc32c=copy(views(described), data), values=described.values)
    return described, data, table.to_bytes()


def written(path, described, data, table) -> HostPart:
    slot = cast(Any, SimpleNamespace(read=lambda: SimpleNamespace(table=table, data=data)))
    order = Write(host=HostId("a" * 12), step=1, save=SaveId("a1k1"), lineage="l", ranks=(0,))
    return writing.write_slots(open_storage(str(path)), order.host, order, {0: slot}, lambda _: described.layout_bytes)


def test_an_intact_slot_is_written(tmp_path, staged):
    assert set(written(tmp_path, *staged).objects) == {"state"}


@pytest.mark.parametrize("when", ["before", "as it is written"])
def test_a_flipped_bit_is_found(tmp_path, staged, when, monkeypatch):
    described, data, table = staged
    write_share = writing.write_share

    def damaged_then_written(*given):
        data[-1] ^= 1
        return write_share(*given)

    if when == "before":
        data[-1] ^= 1
    else:
        monkeypatch.setattr(writing, "write_share", damaged_then_written)
    with pytest.raises(CorruptCheckpointError, match="'w' of rank 0 was damaged in the memory of host"):
        written(tmp_path, described, data, table)


def test_a_slot_that_is_too_short_is_damage(tmp_path, staged):
    described, data, table = staged
    for nbytes in (0, 1, 4, 60, 1000, data.nbytes - 1):
        with pytest.raises(CorruptCheckpointError, match="was damaged in the memory of host"):
            written(tmp_path, described, data[:nbytes], table)
