"""For authors of a storage back end, or of code on top of one: storages that fail on purpose, and
the tests that every back end passes.

    from raystate.testing.storage import StorageContract

    class TestMyStorage(StorageContract):
        @pytest.fixture
        def storage(self, tmp_path):
            return MyStorage(…)             # an empty one, each time

`StorageContract` needs pytest, `StorageModel` (random sequences of operations beside a dict) hypothesis, too:
`pip install 'raystate[testing]'`. The wrappers need neither.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from raystate.testing.storage.faults import DiedError, DyingAt, Failing, LosingAnswers, Recording

if TYPE_CHECKING:
    from raystate.testing.storage.contract import StorageContract
    from raystate.testing.storage.model import StorageModel

__all__ = ["DiedError", "DyingAt", "Failing", "LosingAnswers", "Recording", "StorageContract", "StorageModel"]

_MODULES = {"StorageContract": "contract", "StorageModel": "model"}


if "pytest" in sys.modules:  # then a failed assert of theirs shows its values, as it does in one's own tests
    sys.modules["pytest"].register_assert_rewrite(f"{__name__}.contract", f"{__name__}.model")


def __getattr__(name: str) -> Any:
    """The suites are loaded when they are used, because they import what only tests have."""
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
