"""JSON documents that carry a checksum, so that damage in storage is noticed."""

from __future__ import annotations

import json
import re
import zlib
from typing import Any

from raystate.core.formats.codec import plain

_SEAL = re.compile(rb',"crc32":"([0-9a-f]{8})"\}\Z')


def seal(document: dict[str, Any]) -> bytes:
    """The document as JSON, keys sorted, with a last field `crc32`: of all bytes before it, as 8 hexadecimal digits (zlib's)."""
    body = json.dumps(document, sort_keys=True, separators=(",", ":"), default=plain).encode()[:-1]
    return body + b',"crc32":"%08x"}' % zlib.crc32(body)


def unseal(data: bytes) -> dict[str, Any]:
    """The document in what `seal` gave. Raises ValueError if it is anything else."""
    found = _SEAL.search(data)
    if found is None:
        raise ValueError("it does not end with its checksum")
    body = data[: found.start()]
    if zlib.crc32(body) != int(found[1], 16):
        raise ValueError(f"its checksum is {zlib.crc32(body):08x} instead of {found[1].decode()}")
    return json.loads(body + b"}")
