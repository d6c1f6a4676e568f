"""Which items a checkpoint says that it has."""

from __future__ import annotations

import pytest

from raystate.storage.checkpoint_files import items_of


@pytest.mark.parametrize(
    ("metadata", "items"),
    [
        (b'{"item_handlers": {"state": "x", "metrics": "y"}}', {"metrics", "state"}),
        (b'{"item_handlers": "x"}', set()),  # a bare tree
        (b"{}", None),
        (b"[]", None),
        (b'{"item_handlers": 3}', None),
        (b"\xff", None),
        (b"[" * 100_000, None),
    ],
)
def test_a_checkpoint_names_its_items_or_does_not_say(metadata: bytes, items: set[str] | None) -> None:
    assert items_of(metadata) == items
