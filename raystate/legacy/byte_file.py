"""One object of a storage, read by ranges: a file of many gigabytes is never read whole."""

from __future__ import annotations

from raystate.core.formats.errors import CorruptCheckpointError, StorageError
from raystate.orbax import kv
from raystate.storage import Storage

WINDOW_BYTES = 256 << 10  # what one request fetches while the structure is read
READ_BYTES = 64 << 20  # what one request fetches of an array


class ByteFile:
    """The bytes of one object.

    Args:
        storage: the folder it lies in.
        name: its name there.

    Attributes:
        where: its URL, for errors.
        size: bytes.
        bytes_read: so far.
    """

    def __init__(self, storage: Storage, name: str):
        self.where = f"{storage.url}/{name}"
        found = storage.stat(name)
        self.size = found.size
        self._storage, self._generation = storage, found.generation
        self.bytes_read = 0
        self._name = name
        self._store = kv.open_store(storage.kvstore(""), kv.context(io_concurrency=4))
        self._window = b""
        self._window_start = 0

    def read(self, start: int, length: int) -> bytes:
        """Exactly these bytes.

        Raises:
            CorruptCheckpointError: the object ends before.
            StorageError: storage did not answer, or the object is another one by now.
        """
        if length == 0:
            return b""
        if start < 0 or start + length > self.size:
            raise self.truncated(start, length)
        try:
            with kv.named_errors(f"reading {self.where}", damage=True, path=self.where):
                got = kv.result(self._store.read(self._name, byte_range=slice(start, start + length)))
            if got.state != "value" or len(got.value) != length:
                raise self.truncated(start, length)
        except CorruptCheckpointError:
            self.refuse_replaced()
            raise
        self.refuse_replaced()
        self.bytes_read += length
        return got.value

    def is_replaced(self) -> bool:
        """Whether another object has its name by now."""
        return self._storage.generation(self._name) != self._generation

    def refuse_replaced(self) -> None:
        """Raises StorageError if it is."""
        if self.is_replaced():
            raise StorageError(f"{self.where} was replaced while it was read: read it again", operation="read", path=self.where)

    def peek(self, start: int, length: int) -> bytes:
        """The same for a few bytes at a time, from a window that moves with the reader."""
        begin = start - self._window_start
        if begin < 0 or begin + length > len(self._window):
            self._window = self.read(start, max(length, min(WINDOW_BYTES, self.size - start)))
            self._window_start, begin = start, 0
        return self._window[begin : begin + length]

    def truncated(self, start: int, length: int) -> CorruptCheckpointError:
        """The error for bytes that should be there and are not."""
        text = f"{self.where} is cut short: {length} bytes are announced at byte {start}, the file has {self.size}"
        return CorruptCheckpointError(text, path=self.where, expected=start + length, got=self.size)
