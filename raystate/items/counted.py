"""Counted: a position for iterators that have none of their own."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from raystate.core.formats.errors import ConfigError, ItemTopologyError, RaystateError, ReferenceMismatchError
from raystate.public_calls import public_class

logger = logging.getLogger("raystate")

T = TypeVar("T")
_ANEW = "it has to make a new iterator each time, from the beginning (lambda: iter(dataset))"


@public_class
class Counted(Generic[T]):
    """An iterator item for data that can't say where it is: Ray Data, tf.data, generators. It counts what it gives out; after a restore
    it makes a new iterator and skips that many.

        batches = raystate.Counted(lambda: dataset.iter_batches(batch_size=64))
        restored = manager.restore_or_init(init, items={"data": batches})

    This is right only if a new iterator gives the same items in the same order (a fixed seed for
    the shuffle), and if each item that is taken is *used*. Items that wait in a prefetching queue
    in front of it count as used, and are lost after a restore. So prefetch inside of
    `make_iterator`, not around the Counted. Skipping reads all that is skipped; an iterator with
    `get_state` and `set_state`, such as grain's, goes straight to its place and needs no Counted.

    A loop that has come to its end has passed an epoch; the next loop makes a new iterator. A restart goes on
    in its epoch: `for epoch in range(batches.epoch, epochs): for batch in batches: …`.

    Each process counts its own items, and its count is for the number of processes that it was saved with.

    Args:
        make_iterator: makes the iterator (or iterable) from its beginning; called at the first item of each epoch, and again after a
            restore.
        shared: each process is given the same items (not a share of its own): a count holds for any number of processes then.

    Raises:
        ConfigError: `make_iterator` is no function, or gives nothing that can be iterated.
    """

    def __init__(self, make_iterator: Callable[[], Iterable[T]], *, shared: bool = False):
        if not callable(make_iterator):
            raise ConfigError(
                f"Counted needs a function that makes the iterator anew, not a {type(make_iterator).__name__}: "
                "Counted(lambda: iter(dataset))",
                field="make_iterator",
            )
        self._make = make_iterator
        self._shared = shared
        self._items: Iterator[T] | None = None
        self._used: Iterator[T] | None = None  # that has given something out
        self._ahead: list[T] = []  # taken from it, and not given out yet
        self._count = 0
        self._before = 0  # items of the epoch before, as far as this process has seen it
        self._epoch = 0
        self._at_end = False

    @property
    def count(self) -> int:
        """Items given out so far in this epoch, before a restore too."""
        return self._count

    @property
    def epoch(self) -> int:
        """Epochs that have been passed to their end, before a restore too."""
        return self._epoch

    def __iter__(self) -> Iterator[T]:
        if self._items is not None and self._items is self._used and not self._ahead:
            # The last loop was left before it came to the end, as zip leaves all but its first: perhaps no item was left.
            with contextlib.suppress(StopIteration):
                self._ahead.append(self._next())
        self._at_end = False
        return self

    def __next__(self) -> T:
        if self._at_end:  # until the next loop
            raise StopIteration
        item = self._ahead.pop() if self._ahead else self._next()
        self._used = self._items
        self._count += 1
        return item

    def _next(self) -> T:
        if self._items is None:
            self._items = self._at(self._count)
        try:
            return next(self._items)
        except StopIteration:
            if self._count == 0 < self._before:
                raise ConfigError(
                    f"the data of epoch {self._epoch + 1} have no first item, and those of the epoch before had {self._before}: "
                    f"make_iterator goes over something that is used up; {_ANEW}",
                    field="make_iterator",
                ) from None
            self._items, self._count, self._before, self._epoch, self._at_end = None, 0, self._count, self._epoch + 1, True
            raise
        except BaseException:  # a generator that has raised gives nothing more: the next item comes from a new iterator
            self._items = None
            raise

    def get_state(self) -> dict[str, int]:
        """The epoch, the count in it, and the number of processes that it holds for (0: any)."""
        return {"epoch": self._epoch, "count": self._count, "processes": 0 if self._shared else _processes()}

    def set_state(self, state: Mapping[str, object]) -> None:
        """Go on after the items that were given out. The next item skips those before it.

        Raises:
            ReferenceMismatchError: another kind of iterator saved that state.
            ItemTopologyError: it was saved with another number of processes.
        """
        numbers: Any = (state.get("count"), state.get("epoch", 0)) if isinstance(state, Mapping) else (None,)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ReferenceMismatchError(f"the saved state is no count of a raystate.Counted: {state!r}; another iterator saved it")
        (count, epoch), before, now = numbers, state.get("processes", 0), _processes()
        if not self._shared and before not in (0, now):
            raise ItemTopologyError(
                f"a count of {count} items, of {before} processes that each had a share of the data, says nothing about {now}: restore "
                f"with {before} processes, or leave this item out and begin where you see fit; if each process is given the same "
                "items: Counted(…, shared=True)",
                saved_processes=before, processes=now,
            )  # fmt: skip
        self._items, self._count, self._before, self._epoch, self._at_end = None, count, 0, epoch, False
        self._ahead = []

    def _at(self, count: int) -> Iterator[T]:
        made: Any = self._make()
        if not isinstance(made, Iterable):
            raise ConfigError(f"make_iterator gave a {type(made).__name__}, which can't be iterated", field="make_iterator")
        items: Iterator[T] = iter(made)
        if items is self._used:
            raise ConfigError(
                f"make_iterator gave the iterator that it had given before, which is used up: {_ANEW}", field="make_iterator"
            )
        if count:
            logger.info("skipping %d items of epoch %d, to where the restored step was", count, self._epoch + 1)
        for skipped in range(count):
            try:
                next(items)
            except StopIteration:
                raise RaystateError(
                    f"the data ended after {skipped} items, but {count} were given out before the restored step: make_iterator gives "
                    "fewer than it did, or it was wrapped in something that counts otherwise"
                ) from None
        return items


def _processes() -> int:
    import jax

    return jax.process_count()
