"""The one spelling of a storage URL, the identity that is fenced, and the backend behind it."""

from __future__ import annotations

import hashlib
import os
import re
import reprlib
from collections.abc import Callable
from typing import cast

from raystate.core.formats.errors import ConfigError
from raystate.storage.base import Storage

StorageUrl = str | os.PathLike[str]

OBJECT_SCHEMES = ("gs", "s3", "memory")
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.\-]*):/(/?)(.*)$", re.DOTALL)
_RAY_SESSION = re.compile(r"/session_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_\d+_\d+/")
_BUCKET = re.compile(r"^[a-z0-9][a-z0-9._\-]{1,220}[a-z0-9]$")


def canonical_url(url: StorageUrl) -> str:
    """The canonical string of a storage: two spellings of one place give one string, and it is its own canonical form.

    Args:
        url: "gs://bucket/prefix", "s3://bucket/prefix", "memory://name" (tests), "file:///absolute/path" (taken literally, no percent
            escapes), a directory, or a PathLike. "~" is expanded and symbolic links are resolved; a directory need not exist yet.

    Returns:
        "gs://bucket/prefix", "s3://…" or "file:///real/absolute/path", without a trailing slash.

    Raises:
        ConfigError: field "storage": empty, not text, another scheme, a directory with a backslash in its name, or a spelling that
            cannot be meant.
    """
    try:
        text = cast(object, os.fspath(url))
    except TypeError:
        if isinstance(inner := getattr(url, "storage", None), str):
            raise ConfigError(
                f"storage: expected a URL, a directory or a PathLike, not a {type(url).__name__}; did you mean its storage, {inner!r}?",
                field="storage",
            ) from None
        tree_first = "; the path comes before the tree: save(path, tree)" if isinstance(url, dict | list | tuple) else ""
        # Shortened: who gives the tree in the place of the path would get all of its arrays.
        text = f"storage: {reprlib.repr(url)} is not usable: expected a URL, a directory or a PathLike{tree_first}"
        raise ConfigError(text, field="storage", got=reprlib.repr(url)) from None
    if not isinstance(text, str):
        raise _bad(url, "expected text, not bytes")
    if not text.strip():
        raise _bad(url, "it is empty")
    if text != text.strip() or any(ord(char) < 32 or ord(char) == 127 for char in text):
        raise _bad(url, "it has spaces around it or control characters in it")

    found = _SCHEME.match(text)
    if found is None:
        return _directory(url, text)
    scheme, second_slash, rest = found[1].lower(), found[2], found[3]
    if not second_slash:
        slashes = ":///" if scheme == "file" else "://"
        raise _bad(url, f"did you mean {scheme}{slashes}{rest}? pathlib.Path drops a slash of a URL, pass it as text")
    if scheme == "file":
        if rest.startswith("localhost/"):
            rest = rest[len("localhost") :]
        if not rest.startswith("/"):
            raise _bad(url, "a file:// URL needs an absolute path, as in file:///data/run")
        return _directory(url, rest)
    if scheme not in OBJECT_SCHEMES:
        raise _bad(
            url, f"unsupported scheme {scheme}://; use gs://bucket/…, s3://bucket/…, file:///… or a directory", scheme=scheme
        )
    return _objects(url, scheme, rest)


def refuse_passing(canonical: str, given: object) -> None:
    """Refuse a folder of a Ray session, where a run would be lost without a word.

    `ray job submit --working-dir` unpacks a job's files there, each version of them into another
    folder, and Ray Train gives a worker its working directory there. Ray removes both.

    Args:
        canonical: the storage.
        given: as the user has spelled it.

    Raises:
        ConfigError: field "storage"; names the way out.
    """
    if canonical.startswith("file://") and (found := _RAY_SESSION.search(canonical)):
        session = canonical[len("file://") : found.end() - 1]
        raise _bad(
            given,
            f"it would lie below {session}, where Ray keeps what it throws away, such as the unpacked files of a job: "
            "the next job would begin at step 0. Give an absolute path that all nodes see, or a bucket (gs://…, s3://…)",
            path=canonical,
        )


def run_hash(url: StorageUrl, run: str) -> str:
    """16 hex characters that name the actors and arenas of a run: a hash of (canonical URL, run)."""
    return hashlib.sha256(f"{canonical_url(url)}\0{run}".encode()).hexdigest()[:16]


def open_storage(url: StorageUrl, *, timeout_s: float = 60.0) -> Storage:
    """The storage behind a URL. Neither reads nor writes anything yet, so a reader may open what it must not touch.

    Args:
        url: see `canonical_url`.
        timeout_s: for how long one operation is retried while its errors look passing.

    Raises:
        ConfigError: see `canonical_url`.
    """
    canonical = canonical_url(url)
    return storage_kind(canonical)(canonical, timeout_s=timeout_s)


def storage_kind(canonical: str) -> Callable[..., Storage]:
    """What opens storages with such URLs. Its module is loaded here, with the client library that it needs."""
    if canonical.startswith("file://"):
        from raystate.storage.directory import DirectoryStorage

        return DirectoryStorage
    if canonical.startswith("gs://"):
        from raystate.storage.gcs import GcsStorage

        return GcsStorage
    if canonical.startswith("s3://"):
        from raystate.storage.s3 import S3Storage

        return S3Storage
    from raystate.storage.objects import ObjectStorage

    return ObjectStorage


def _directory(url: object, text: str) -> str:
    path = os.path.expanduser(text) if text.startswith("~") else text
    if path.startswith("~"):
        raise _bad(url, "no such home directory; write ./~name for a directory of that name")
    real = os.path.realpath(path)
    if real == "/":
        raise _bad(url, "it is the root of the file system")
    if "\\" in real:  # TensorStore takes it for a "/": the arrays of a step would lie in another folder than its other files
        raise _bad(url, "it has a backslash in it, which TensorStore takes for '/': rename the folder")
    return f"file://{real}"


def _objects(url: object, scheme: str, rest: str) -> str:
    bucket, *parts = rest.rstrip("/").split("/")
    if scheme in ("gs", "s3") and not _BUCKET.match(bucket):
        raise _bad(url, f"{bucket!r} is not a bucket name")
    if not bucket or any(part in ("", ".", "..") for part in parts):
        raise _bad(url, "it has an empty, '.' or '..' component")
    return f"{scheme}://{'/'.join((bucket, *parts))}"


def _bad(url: object, why: str, **details: object) -> ConfigError:
    return ConfigError(f"storage: {url!r} is not usable: {why}", field="storage", got=repr(url), **details)
