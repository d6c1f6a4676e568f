"""Google Cloud Storage: every request conditional where that matters, every wait bounded.

Through google-cloud-storage, on which gcsfs is built, too. gcsfs itself fixes its number of tries
when it is imported, forgets the status of most errors, and has no conditional delete. Here an
operation has one deadline, and its error says what the server said.
"""

from __future__ import annotations

import base64
import functools
import io
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from raystate.core.formats.errors import GCS_HINTS, StorageError
from raystate.machine.counts import FAILURES, RETRIES, counts
from raystate.machine.memory import MOST_READ_BYTES
from raystate.storage.attempts import storage_error
from raystate.storage.base import Listing, ObjectChangedError, ObjectExistsError, ObjectInfo, ObjectMissingError
from raystate.storage.objects import BucketStorage
from raystate.waits import ASKED_AGAIN_S, CONNECT_S

Result = TypeVar("Result")

_LOG_IN = "`gcloud auth application-default login` makes some; GOOGLE_APPLICATION_CREDENTIALS names a file with others"
_BATCH = 100  # what GCS takes in one batch request

_LISTED = "items(name,size,generation,crc32c,md5Hash),prefixes,nextPageToken"


class GcsStorage(BucketStorage):
    """Objects in a bucket, below a prefix.

    Args:
        url: canonical, "gs://bucket/prefix".
        timeout_s: for one operation, all its tries together. A stalled connection is given up after 15 s and tried again.
    """

    def create(self, name: str, data: bytes) -> None:
        self._ask("create", name, lambda how: self._blob(name).upload_from_string(
            data, content_type="application/octet-stream", if_generation_match=0, **how
        ))  # fmt: skip

    def read(self, name: str) -> bytes:
        def download(how: dict[str, Any]) -> bytes:
            from google.api_core.retry import if_exception_type
            from google.cloud.storage.exceptions import DataCorruption  # pyright: ignore[reportMissingTypeStubs]
            from requests.exceptions import ChunkedEncodingError

            end_s = time.monotonic() + self._timeout_s

            def once() -> bytes:
                with _Bounded(self._too_large(name)) as into:
                    retry = how["retry"].with_timeout(end_s - time.monotonic())
                    self._blob(name).download_to_file(into, timeout=how["timeout"], retry=retry)
                    return into.getvalue()

            # The library asks again neither for bytes that came changed, nor for an error's text that broke off.
            return how["retry"].with_predicate(if_exception_type(DataCorruption, ChunkedEncodingError))(once)()

        return self._ask("read", name, download)

    def stat(self, name: str) -> ObjectInfo:
        def looked_at(how: dict[str, Any]) -> ObjectInfo:
            blob = self._blob(name)
            blob.reload(**how)
            return _info(name, blob)

        return self._ask("stat", name, looked_at)

    def list(self, prefix: str = "", recursive: bool = True) -> Listing:
        folder = self._folder(prefix)
        offset = len(self._prefix) + 1 if self._prefix else 0

        def listed(how: dict[str, Any]) -> Listing:
            found = self._bucket.client.list_blobs(
                self._bucket, prefix=folder, delimiter=None if recursive else "/", fields=_LISTED, **how
            )
            # A folder's placeholder, as the console makes them, is no object of ours.
            infos: Listing = [_info(blob.name[offset:], blob) for blob in found if not blob.name.endswith("/")]
            infos += [ObjectInfo(name=name[offset:], size=0) for name in found.prefixes]
            return sorted(infos, key=lambda info: info.name)

        return self._ask("list", prefix, listed)

    def delete(self, name: str, generation: str | None = None) -> bool:
        condition = None if generation is None else int(generation)
        try:
            self._ask("delete", name, lambda how: self._blob(name).delete(if_generation_match=condition, **how))
        except ObjectMissingError:
            return False
        except ObjectExistsError as error:  # GCS answers "precondition failed" to both
            raise ObjectChangedError(
                f"delete {self.url}/{name} refused: it is another object now", operation="delete", path=name, expected=generation
            ) from error
        return True

    def delete_all(self, infos: Sequence[ObjectInfo]) -> None:
        left: list[ObjectInfo] = []
        for start in range(0, len(infos), _BATCH):
            part = infos[start : start + _BATCH]
            try:
                self._ask("delete", part[0].name, functools.partial(self._delete_batch, part))
            except StorageError:
                left += part  # the batch is over, and something in it went wrong: one by one tells what
        super().delete_all(left)

    def copy(self, source: str, target: str) -> None:
        try:
            self._ask("copy", source, lambda how: self._bucket.copy_blob(
                self._blob(source), self._bucket, self._key(target), if_generation_match=0, **how
            ))  # fmt: skip
        except ObjectExistsError:
            pass

    def kvstore(self, prefix: str) -> dict[str, Any]:
        if "TENSORSTORE_GCS_HTTP_URL" in os.environ:  # a local server wants no credentials, and TensorStore complains of none
            os.environ.setdefault("GOOGLE_AUTH_TOKEN_FOR_TESTING", "none")
        return {"driver": "gcs", "bucket": self._bucket_name, "path": self._folder(prefix)}

    # ------------------------------------------------------------ inside

    @property
    def _bucket(self) -> Any:
        return _client(os.environ.get("STORAGE_EMULATOR_HOST")).bucket(self._bucket_name)

    def _blob(self, name: str) -> Any:
        return self._bucket.blob(self._key(name))

    def _delete_batch(self, infos: Sequence[ObjectInfo], how: dict[str, Any]) -> None:
        with self._bucket.client.batch():
            for info in infos:
                self._blob(info.name).delete(if_generation_match=int(info.generation), timeout=how["timeout"], retry=None)

    def _ask(self, operation: str, name: str, call: Callable[[dict[str, Any]], Result]) -> Result:
        """Run `call(how)` with how = the library's own `timeout` and `retry`, and give its errors our names."""
        from google.api_core import exceptions
        from google.cloud.storage.retry import DEFAULT_RETRY  # pyright: ignore[reportMissingTypeStubs]

        path = f"{self.url}/{name}"
        timeout_s = self._timeout_s
        retry = DEFAULT_RETRY.with_timeout(timeout_s).with_delay(initial=0.2, maximum=5.0, multiplier=2.0)
        counts.request(operation)
        try:
            timeouts = min(CONNECT_S, timeout_s), min(ASKED_AGAIN_S, timeout_s)
            result = call({"timeout": timeouts, "retry": _Counted(retry, operation)})
            counts.worked(operation)
            return result
        except exceptions.NotFound as error:
            if operation in ("list", "create") or "bucket does not exist" in str(cast(Any, error).message):
                counts.add(FAILURES)
                counts.failed(operation, _describe(error))
                raise storage_error(operation, path, error, text=_describe(error)) from error
            raise ObjectMissingError(
                f"{operation} {path} failed: there is no such object", operation=operation, path=name
            ) from error
        except exceptions.PreconditionFailed as error:
            if operation in ("read", "stat", "list"):  # they set no condition
                raise storage_error(operation, path, error, text=_describe(error)) from error
            raise ObjectExistsError(f"{operation} {path} failed: it exists", operation=operation, path=name) from error
        except StorageError:
            raise
        except Exception as error:
            # The library's RetryError says only that time is up.
            ended = cast("BaseException | None", cast(Any, error).cause) if isinstance(error, exceptions.RetryError) else None
            cause = ended or error
            counts.add(FAILURES)
            counts.failed(operation, _describe(cause))
            waited = f" (tried for {timeout_s:.0f} s)" if ended is not None else ""
            raise storage_error(operation, path, cause, text=_describe(cause) + waited) from error


class _Counted:
    """One of the library's retries, which counts what it does again, and notes why."""

    def __init__(self, retry: Any, operation: str):
        self._retry = retry
        self._operation = operation

    def __call__(self, call: Callable[..., Result]) -> Callable[..., Result]:
        return self._retry(call, on_error=self._again)

    def with_timeout(self, timeout_s: float) -> _Counted:
        return _Counted(self._retry.with_timeout(timeout_s), self._operation)

    def with_predicate(self, predicate: Callable[[Exception], bool]) -> _Counted:
        return _Counted(self._retry.with_predicate(predicate), self._operation)

    def _again(self, error: Exception) -> None:
        counts.add(RETRIES)
        counts.failed(self._operation, _describe(error))


class _Bounded(io.BytesIO):
    """Takes what is downloaded, and raises `error` where that is more than may be read: the rest does not come."""

    def __init__(self, error: StorageError):
        super().__init__()
        self._error = error

    def write(self, data: Any, /) -> int:
        if self.tell() + len(data) > MOST_READ_BYTES:
            raise self._error
        return super().write(data)


@functools.lru_cache(maxsize=4)
def _client(emulator: str | None) -> Any:
    """One client for the whole process: it holds the credentials and the connections."""
    del emulator  # the library reads the variable itself
    from google.cloud import storage  # pyright: ignore[reportMissingTypeStubs]

    for name, module in sys.modules.copy().items():  # each upload would draw from the script's own generator
        if name.startswith("google.") and vars(module).get("random") is random:
            vars(module)["random"] = random.Random()
    return storage.Client(project=None)  # buckets exist already: no project is needed


def _info(name: str, blob: Any) -> ObjectInfo:
    crc32c = int.from_bytes(base64.b64decode(blob.crc32c), "big") if blob.crc32c else None
    digest = f"md5:{blob.md5_hash}" if blob.md5_hash else ""
    generation = str(cast(object, blob.generation))
    size = int(blob.size or 0)  # some servers leave out a zero
    return ObjectInfo(name=name, size=size, generation=generation, crc32c=crc32c, digest=digest)


def _describe(error: BaseException) -> str:
    """One line: what GCS or the library said, and what to do where that is known."""
    from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError

    response = getattr(error, "response", None)  # of an upload or download whose last try failed
    code = getattr(response, "status_code", getattr(error, "code", None))
    if isinstance(code, int) and code >= 400:
        text = f"{int(code)} {_message(_body(response) or getattr(error, 'message', '') or str(error))}"
        hint = GCS_HINTS.get(int(code))
    else:
        text = f"{type(error).__name__}: {error}"
        hint = GCS_HINTS[401] if isinstance(error, GoogleAuthError) else None
        if isinstance(error, DefaultCredentialsError) and "not found" in str(error):
            text, hint = "this machine has no credentials of Google Cloud", _LOG_IN
    text = " ".join(text.split())[:500]
    return f"{text} ({hint})" if hint else text


def _body(response: Any) -> str:
    try:
        return getattr(response, "text", "")
    except RuntimeError:  # of a download, that has been taken in bit by bit
        return ""


def _message(text: str) -> str:
    """The sentence in an answer's JSON."""
    start = text.find("{")
    try:
        return str(json.loads(text[start:])["error"]["message"]) if start >= 0 else text
    except (ValueError, KeyError, TypeError):
        return text
