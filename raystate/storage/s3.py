"""Amazon S3 and stores that speak its protocol: MinIO, Ceph, R2 and others, if they know conditional requests.

Through s3fs (`pip install 'raystate[s3]'`). S3 has had `If-None-Match: *` on PutObject since 2024; a store that ignores it is refused
by the self-test. Credentials, region and endpoint are what every AWS client takes: `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, a
profile or the machine's role, `AWS_REGION`, `AWS_ENDPOINT_URL_S3` or `AWS_ENDPOINT_URL`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

from raystate.core.formats.errors import ConfigError, StorageError
from raystate.storage.attempts import describe, storage_error
from raystate.storage.base import Listing, ObjectChangedError, ObjectExistsError, ObjectMissingError
from raystate.storage.objects import BucketStorage

Result = TypeVar("Result")

# 409: another conditional request for the same name is under way. The others: the store is busy or has hiccups.
_PASSING = frozenset({408, 409, 429, 500, 502, 503, 504})
_HINTS = {
    401: "the credentials are not valid (any more)",
    403: "this account may not do that: it needs s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket on the bucket",
    404: "there is no such bucket",
    501: "this store does not know conditional requests",
}


class S3Storage(BucketStorage):
    """Objects in a bucket, below a prefix.

    An object's generation is its ETag, which is made of its bytes alone, and the second of its creation. `delete` goes by the ETag.

    Args:
        url: canonical, "s3://bucket/prefix".
        timeout_s: see `open_storage`.
    """

    def read(self, name: str) -> bytes:
        try:
            return super().read(name)
        except StorageError as error:
            if error.__cause__ is not None and _answer(error.__cause__)[0] == 416:
                return b""  # an object without bytes has no range to be read
            raise

    def list(self, prefix: str = "", recursive: bool = True) -> Listing:
        found = super().list(prefix, recursive)
        if not found and not prefix:  # s3fs gives the same for an empty bucket and for none
            try:
                self._call("list", "", functools.partial(self._fs.call_s3, "head_bucket", Bucket=self._bucket_name))
            except ObjectMissingError as error:
                raise storage_error("list", self.url, error, text=f"404 {_HINTS[404]}") from error
        return found

    def delete(self, name: str, generation: str | None = None) -> bool:
        condition = {} if generation is None else {"IfMatch": _etag(generation)}
        try:
            # S3 says nothing of an object that was absent; and a store that ignores the condition is left with this look.
            self._check_generation(name, generation)
            self._call("delete", name, functools.partial(
                self._fs.call_s3, "delete_object", Bucket=self._bucket_name, Key=self._key(name), **condition
            ))  # fmt: skip
        except ObjectMissingError:
            return False
        except ObjectExistsError as error:  # S3 answers "precondition failed" to both
            raise ObjectChangedError(
                f"delete {self.url}/{name} refused: it is another object now", operation="delete", path=name, expected=generation
            ) from error
        return True

    def kvstore(self, prefix: str) -> dict[str, Any]:
        spec: dict[str, Any] = {"driver": "s3", "bucket": self._bucket_name, "path": self._folder(prefix)}
        endpoint = _endpoint()
        if endpoint:  # TensorStore does not look for it; where it is Amazon's own, TensorStore finds the bucket's region
            region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
            spec |= {"endpoint": endpoint, "aws_region": region}
        return spec

    # ------------------------------------------------------------ inside

    def _version(self, raw: dict[str, Any]) -> str:
        # A listing may be more exact than a look at one object.
        return f"{raw['ETag']} {int(raw['LastModified'].timestamp())}"

    def _is_of(self, got: str, generation: str) -> bool:
        return _etag(got) == _etag(generation)

    @property
    def _fs(self) -> Any:
        return _file_system(_endpoint())

    def _call(self, operation: str, name: str, call: Callable[[], Result]) -> Result:
        def told() -> Result:
            try:
                return call()
            except Exception as error:
                status, code, text = _answer(error)
                if status == 412:
                    raise ObjectExistsError(
                        f"{operation} {self.url}/{name} failed: it exists", operation=operation, path=name
                    ) from error
                if status in _PASSING:
                    raise ConnectionError(f"{status} {text}") from error
                if status is None or (status == 404 and code != "NoSuchBucket"):
                    raise
                hint = _HINTS.get(status)
                said = f"{status} {text} ({hint})" if hint else f"{status} {text}"
                raise storage_error(operation, f"{self.url}/{name}", error, text=said) from error

        return super()._call(operation, name, told)


def _etag(generation: str) -> str:
    return generation.rpartition(" ")[0]


@functools.lru_cache(maxsize=4)
def _file_system(endpoint: str | None) -> Any:
    """One for the whole process and endpoint: it holds the credentials and the connections."""
    import fsspec  # pyright: ignore[reportMissingTypeStubs]

    try:
        # A cached listing would show a step that is gone, or hide one.
        return fsspec.filesystem("s3", use_listings_cache=False, endpoint_url=endpoint)  # pyright: ignore[reportUnknownMemberType]
    except ImportError as error:
        raise ConfigError(
            f"storage: s3:// needs s3fs: pip install 'raystate[s3]' ({error})", field="storage", expected="s3fs", got=str(error)
        ) from error


def _endpoint() -> str | None:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None


def _answer(error: BaseException) -> tuple[int | None, str, str]:
    """(HTTP status, S3's code, its sentence) of what s3fs raised; (None, "", …) if no answer came. s3fs turns botocore's errors into
    OSErrors and keeps them as the cause."""
    for one in (error, error.__cause__, error.__context__):
        response = cast("dict[str, Any] | None", getattr(one, "response", None))
        if isinstance(response, dict) and "Error" in response:
            said = response["Error"]
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return status, str(said.get("Code", "")), str(said.get("Message") or said.get("Code") or "")
    return None, "", describe(error)
