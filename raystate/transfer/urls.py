"""URLs that fsspec knows, and its errors as raystate's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from raystate.core.formats.errors import ConfigError, RaystateError
from raystate.storage import OBJECT_SCHEMES, canonical_url, owner_of
from raystate.storage.attempts import storage_error

CHAIN = "::"  # between an archive's URL and that of the file that it is
_ALIASES = {"gcs": "gs", "s3a": "s3", "local": "file"}


def text_of(url: str | os.PathLike[str], field: str) -> str:
    """A URL or path as text.

    Raises:
        ConfigError: it is empty, not text, or has control characters in it.
    """
    try:
        text = cast(object, os.fspath(url))
    except TypeError:
        text = None
    if not isinstance(text, str) or not text.strip() or any(ord(char) < 32 for char in text):
        raise ConfigError(f"{field}: expected a URL or a path, not {url!r}", field=field, got=repr(url))
    return CHAIN.join(_plain_scheme(one) for one in text.split(CHAIN))


def _plain_scheme(url: str) -> str:
    """The same with the name that raystate has for fsspec's scheme, where fsspec has several."""
    scheme, colon, rest = url.partition("://")
    return f"{_ALIASES.get(scheme, scheme)}{colon}{rest}" if colon else url


def local_path(url: str) -> Path | None:
    """The path behind a directory's or file's name or file:// URL; None for any other URL."""
    if CHAIN in url:
        return None
    if url.startswith("file://"):
        url = url.removeprefix("file://").removeprefix("localhost")
    elif "://" in url:
        return None
    return Path(os.path.abspath(os.path.expanduser(url)))


def split(url: str) -> tuple[str, str]:
    """(URL of the folder, name in it), also of a URL into an archive."""
    first, chain, rest = url.partition(CHAIN)
    path = local_path(url)
    if path is not None:
        return str(path.parent), path.name
    scheme, _, inner = first.partition("://")
    folder, _, name = inner.rstrip("/").rpartition("/")
    return f"{scheme}://{folder}{chain}{rest}", name


def open_files(url: str, *, field: str) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the path in it.

    Raises:
        ConfigError: no such scheme, or the package for it is not installed.
        StorageError: it can't be reached.
    """
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:  # "Protocol not known", "Install s3fs to access S3"
        raise ConfigError(f"{field}: {url!r} can't be opened: {error}", field=field, got=url) from error
    except FileNotFoundError as error:
        raise ConfigError(f"{field}: there is nothing at {url}", field=field, got=url) from error
    except Exception as error:
        raise storage_error("open", url, error) from error


@contextlib.contextmanager
def storage_errors(operation: str, path: str) -> Iterator[None]:
    """Turn all errors of a file system, which has classes of its own, into a StorageError that
    names the operation and the path."""
    try:
        yield
    except RaystateError:
        raise
    except Exception as error:
        raise storage_error(operation, path, error) from error


def names_in(fs: Any, folder: str, url: str) -> list[str] | None:
    """The names of what lies in a folder, sorted; None if there is no such folder.

    Args:
        fs, folder: from `open_files`.
        url: for errors.

    Raises:
        StorageError: it can't be listed.
    """
    with storage_errors("list", url):
        try:
            return sorted(name.rstrip("/").rpartition("/")[2] for name in fs.ls(folder, detail=False))
        except (FileNotFoundError, NotADirectoryError):
            return None


def missing(url: str, field: str) -> ConfigError:
    """The error for a path at which nothing is."""
    return ConfigError(f"{field}: there is nothing at {url}", field=field, got=url)


def refuse_owned(folder_url: str) -> None:
    """Check that nothing is exported into a run or into a checkpoint: their readers would find it
    there.

    Args:
        folder_url: of the folder that gets the files; may be in an archive. Nothing needs to be there.

    Raises:
        ConfigError: it is somebody's; says whose. StorageError: it can't be asked about.
    """
    if CHAIN in folder_url:
        folder_url = split(folder_url.partition(CHAIN)[2])[0]
    path = local_path(folder_url)
    if path is not None:
        url = f"file://{os.path.realpath(path)}"
    elif folder_url.partition("://")[0] in OBJECT_SCHEMES:
        url = canonical_url(folder_url)
    else:
        return  # neither runs nor checkpoints of ours are written there
    if owner := owner_of(url):
        raise ConfigError(f"dst: {owner}: export to another place", field="dst", got=folder_url)


def refuse_existing(url: str, name: str) -> ConfigError:
    """The error for a destination that is taken."""
    return ConfigError(
        f"dst: {url.rstrip('/')}/{name} exists already: remove it first, or export to another place", field="dst", got=name
    )
