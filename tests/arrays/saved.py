"""A tree as it lies in one slot of an arena."""

import mmap

import numpy as np
import pytest

from raystate.arrays.holdings import Holding
from raystate.arrays.memory import MemorySource
from raystate.arrays.stage import copy, hold
from raystate.arrays.tree import describe
from raystate.core.formats.errors import ReferenceMismatchError
from raystate.restored import ReadOptions, StepContent


class Recorder:
    """A MemorySource that notes what is read."""

    def __init__(self, source):
        self.requests = []
        self._source = source

    lends = True

    def read(self, requests):
        self.requests.extend(requests)
        return self._source.read(requests)


class Saved:
    """A tree as it lies in one slot."""

    def __init__(self, tree):
        described = describe({"state": tree})
        # Mapped, hence aligned, like a slot: only aligned memory is in danger of being adopted by XLA.
        self.data = np.frombuffer(mmap.mmap(-1, max(1, described.layout.data_bytes)), np.uint8)
        crc32c = copy(hold(described), self.data)
        self.spec = described.layout.trees[0].with_values(described.values[0])
        self.source = Recorder(MemorySource([Holding(layout=described.layout, data=self.data, crc32c=crc32c)], "state"))

    def restore(self, reference, **options):
        return self.content().tree("state", reference, ReadOptions(**options))

    def content(self):
        """As a step of the memory tier gives it."""
        return StepContent(
            step=7,
            tier="memory",
            trees={"state": self.spec},
            source=lambda item: self.source,
            iterator_states=lambda item: ({}, 1),
            iterators=(),
            json_items={},
            metrics={},
            custom=None,
            used_tier=lambda: "memory",
            bytes_from=lambda: {"memory": self.bytes_read},
        )

    @property
    def bytes_read(self):
        """Of all boxes that were asked for so far."""
        leaves = self.spec.leaves
        return sum(int(np.prod(r.shape)) * np.dtype(leaves[r.leaf].array.dtype).itemsize for r in self.source.requests)

    def differences(self, reference, **options):
        with pytest.raises(ReferenceMismatchError) as caught:
            self.restore(reference, **options)
        assert all(path in str(caught.value) for path, _ in caught.value.differences)
        return dict(caught.value.differences)
