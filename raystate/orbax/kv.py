"""TensorStore key-value stores of a step: where things lie, waiting with a deadline, and errors that name the thing."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import stat
from collections.abc import Iterator
from typing import Any

import tensorstore as ts

from raystate.core.formats.errors import GCS_HINTS, CorruptCheckpointError, RaystateError, StorageError
from raystate.machine.counts import DELETE, FAILURES, LIST, READ, RETRIES, WRITE, counts
from raystate.machine.memory import MOST_READ_BYTES
from raystate.waits import LONGEST_S

# Orbax's own settings for a checkpoint: values up to 1 KiB lie in the B-tree's nodes, one manifest file.
OCDBT_CONFIG = {"manifest_kind": "single", "max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000}
_CACHE = "cache_pool#ocdbt"
_NODE_CACHE_BYTES = 100_000_000

# An outage is an error after about a minute; TensorStore's own settings take a quarter of an hour. A
# connection on which nothing moves is dropped, and its request is sent again.
_GCS_RETRIES = {"max_retries": 10, "initial_delay": "500ms", "max_delay": "8s"}
_CURL = {"TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "20", "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1"}

# The status codes by which TensorStore says that what it read is wrong or is not there. It uses the
# same codes where a server or the kernel refuses. Then it adds the number of that, and has read nothing.
_STATUS = re.compile(r"[A-Z_]+: ")
_DAMAGE = ("DATA_LOSS", "NOT_FOUND", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "OUT_OF_RANGE")
_REFUSED = re.compile(r"\[(http_response|os_error)_code='(\d+)'\]")
# These speak of a name, or of a place beyond an object's end.
_OF_A_NAME = {("http_response", "416"), *(("os_error", str(one)) for one in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG))}
_ABSENT = re.compile(
    r"NOT_FOUND: |OUT_OF_RANGE: |FAILED_PRECONDITION: .*Not enough data: .*at byte 0"
)  # the last: nothing came at all
_FOR_DEVELOPERS = re.compile(r" \[[a-z_ ]+=")  # begins what TensorStore adds to its sentence: it fills a screen
_BYTES = re.compile(r"(?:\\x[0-9a-f]{2})+[^\"\s]*")  # the rest of a key that is no text, in hexadecimal
_MOST_OF_A_SENTENCE = 500


def result(future: Any) -> Any:
    """What an operation gives, which storage has `LONGEST_S` for."""
    return future.result(timeout=LONGEST_S)


def context(*, io_concurrency: int = 32) -> ts.Context:
    """A context of our own, so that caches and thread limits end with the work they were made for."""
    for name, value in _CURL.items():
        os.environ.setdefault(name, value)  # read when TensorStore makes its first connection
    spec: dict[str, Any] = {
        "file_io_concurrency": {"limit": io_concurrency},
        "gcs_request_concurrency": {"limit": io_concurrency},
        "gcs_request_retries": _GCS_RETRIES,
        _CACHE: {"total_bytes_limit": _NODE_CACHE_BYTES},
    }
    return ts.Context(spec)


def below(base: dict[str, Any], name: str) -> dict[str, Any]:
    """The spec of a folder (`name` ends in "/") or object inside the folder `base`."""
    return {**base, "path": base.get("path", "") + name}


def url_of(base: dict[str, Any]) -> str:
    """Where a folder lies, for errors."""
    scheme = "gs" if base["driver"] == "gcs" else base["driver"]
    return f"{scheme}://{base['bucket']}/{base.get('path', '')}" if "bucket" in base else base.get("path", "")


def ocdbt(base: dict[str, Any], path: str = "", *, manifest: dict[str, Any] | None = None) -> dict[str, Any]:
    """The spec of an existing OCDBT database in the folder `base`, for reading, or as the source or target of a merge.

    Args:
        base: where its data are.
        path: what its keys begin with.
        manifest: where its manifest is, if elsewhere.
    """
    return {"driver": "ocdbt", "base": base, "manifest": manifest or base, "path": path, "cache_pool": _CACHE}


def ocdbt_for_writing(base: dict[str, Any], path: str, *, data_file_bytes: int) -> dict[str, Any]:
    """The spec of a new database. Data files need no atomic rename, for only a complete manifest refers to them."""
    data = {**base, "file_io_locking": {"mode": "non_atomic"}} if base["driver"] == "file" else base
    return {
        **ocdbt(base, path),
        "base": data,
        "config": OCDBT_CONFIG,
        "assume_config": True,
        "target_data_file_size": data_file_bytes,
    }


def array_path(name: str) -> str:
    """Where an array lies in its item; "" is the name of one that is the whole item."""
    return f"{name}/" if name else ""


# TensorStore's counts for each kind of storage, and our names for them.
_COUNTED = re.compile(r"tensorstore_kvstore_(?:file|gcs|s3)_(\w+) (\d+)")
_NAMES = {
    "bytes_written": "written_bytes", "bytes_read": "read_bytes/storage", "retries": RETRIES,
    "read": READ, "write": WRITE, "list": LIST, "delete_range": DELETE,
}  # fmt: skip


def transferred() -> dict[str, int]:
    """TensorStore's work with storage in this process, under the names of `machine.counts`.

    "written_bytes": each object counts when all of it is there. "read_bytes/storage", as it lies
    there. And requests and retries.
    """
    found = dict.fromkeys(_NAMES.values(), 0)
    # The same as objects, experimental_collect_matching_metrics, is never freed (0.1.86): 4 KB for each call.
    for line in ts.experimental_collect_prometheus_format_metrics("/tensorstore/kvstore/"):
        match = _COUNTED.fullmatch(line)
        if match is not None and (name := _NAMES.get(match[1])) is not None:
            found[name] += int(match[2])
    return found


def bytes_written() -> int:
    """How many bytes TensorStore has written to storage in this process: each object counts when all of it is there."""
    return transferred()["written_bytes"]


def open_store(spec: dict[str, Any], ctx: ts.Context | None = None) -> ts.KvStore:
    return result(ts.KvStore.open(spec, context=ctx))


def list_keys(store: ts.KvStore) -> list[str]:
    """All keys, in order."""
    return sorted(key.decode() for key in result(store.list()))


def read_key(store: ts.KvStore, key: str) -> bytes | None:
    """The value, or None if there is none."""
    got = result(store.read(key))
    return got.value if got.state == "value" else None


def refuse_special(base: dict[str, Any], what: str, key: str = "", **details: Any) -> None:
    """Refuse what is neither a file nor a folder in the folder of a local file system: a pipe is waited for without end.

    Args:
        base: of the folder.
        what: the error's beginning.
        key: of one file, which is to be read whole; "": all that lies in the folder.
        **details: the error's facts.

    Raises:
        CorruptCheckpointError: names the first one; or the file, or the database's manifest, is too large to be read whole.
    """
    if base["driver"] != "file":
        return
    if (path := _special(base["path"] + key)) is not None:
        raise CorruptCheckpointError(f"{what}: {path} is no regular file", **details)
    whole = base["path"] + (key or "manifest.ocdbt")
    if (size := _size(whole)) > MOST_READ_BYTES:
        raise CorruptCheckpointError(f"{what}: {whole} has {size:,} bytes, at most {MOST_READ_BYTES:,} are read", **details)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except (OSError, ValueError):  # not there, or not for us: the read itself says so
        return 0


def _special(path: str) -> str | None:
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISDIR(mode):
            return None if stat.S_ISREG(mode) else path
        if not path.endswith("/"):
            return None  # in the place of a file: not opened
        with os.scandir(path) as entries:
            inside = [entry for entry in entries if not entry.is_file(follow_symlinks=False)]
    except (OSError, ValueError):  # not there, or not for us: the read itself says so
        return None
    links = (_special(entry.path) for entry in inside if not entry.is_dir(follow_symlinks=False))
    folders = (_special(f"{entry.path}/") for entry in inside if entry.is_dir(follow_symlinks=False))
    return next((found for found in itertools.chain(links, folders) if found is not None), None)


@contextlib.contextmanager
def named_errors(what: str, *, damage: bool, **details: Any) -> Iterator[None]:
    """Turn what TensorStore raises into raystate's errors.

    Args:
        what: the sentence's beginning, such as "reading array 'w' of item 'state' of step 1200".
        damage: whether data that was read and is wrong, or is not there, is a
            CorruptCheckpointError. Its `absent` tells that the data may be missing: a caller that
            can ask storage should look. Otherwise everything is a StorageError.
        **details: the error's facts.
    """
    try:
        yield
    except RaystateError:
        raise
    except TimeoutError as error:
        counts.add(FAILURES)
        raise StorageError(f"{what}: no answer from storage before the deadline", **details) from error
    except Exception as error:  # TensorStore has no class of its own: a ValueError whose text begins with the status code
        text = _its_words(error, is_gcs="gs://" in f"{what} {error}")
        refused = set(_REFUSED.findall(str(error))) - _OF_A_NAME
        # INVALID_ARGUMENT is a ValueError without its name.
        damaged = text.startswith(_DAMAGE) or isinstance(error, KeyError) or not _STATUS.match(text)
        if damage and damaged and not refused and not isinstance(error, OSError | MemoryError):
            raise CorruptCheckpointError(f"{what}: {text}", **details, absent=bool(_ABSENT.match(text))) from error
        counts.add(FAILURES)
        raise StorageError(f"{what}: {text}", **details) from error


def _its_words(error: Exception, *, is_gcs: bool) -> str:
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    words = _BYTES.sub("…", _FOR_DEVELOPERS.split(lines[0], maxsplit=1)[0])[:_MOST_OF_A_SENTENCE]
    status = next((int(number) for of, number in _REFUSED.findall(lines[0]) if of == "http_response"), None)
    if status is None:
        return words
    return f"{words}: HTTP {status}" + (f" ({GCS_HINTS[status]})" if is_gcs and status in GCS_HINTS else "")
