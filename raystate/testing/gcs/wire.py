"""Bytes to a client, and connections that end as faults want them to."""

from __future__ import annotations

import socket
import struct

from aiohttp import web

from raystate.testing.gcs.answers import GcsAnswer

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset, and throw away what wasn't sent


def send(answer: GcsAnswer, *, corrupt: bool = False) -> web.Response:
    """Answer. `corrupt`: the body's first byte is another one."""
    body = bytes([answer.body[0] ^ 1]) + answer.body[1:] if corrupt and answer.body else answer.body
    return web.Response(status=answer.status, headers=answer.headers, body=body)


async def send_half(request: web.Request, answer: GcsAnswer) -> web.StreamResponse:
    """Promise everything, send half of it, end the connection in good order: bytes are missing, and nothing else tells."""
    response = web.StreamResponse(status=answer.status, headers=answer.headers)
    response.content_length = len(answer.body)
    await response.prepare(request)
    await response.write(answer.body[: len(answer.body) // 2])
    if request.transport is not None:
        request.transport.close()  # sends what is on its way first
    return response


def reset(request: web.Request) -> web.Response:
    """Cut the connection as a broken network does."""
    if (transport := request.transport) is not None:
        if (connection := transport.get_extra_info("socket")) is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        transport.abort()
    return web.Response()  # goes nowhere; aiohttp wants one
