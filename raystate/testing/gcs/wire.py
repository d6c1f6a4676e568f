"""Bytes from and to a client, and connections that end as faults want them to."""

from __future__ import annotations

import socket
import struct

from aiohttp import web

from raystate.testing.gcs.answers import GcsAnswer

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset, and throw away what wasn't sent
_PIECE_BYTES = 1 << 20


async def read_body(request: web.Request) -> bytes:
    """The whole body of a request."""
    if not request.can_read_body:
        return b""
    pieces = [piece async for piece in request.content.iter_any()]
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def send(request: web.Request, answer: GcsAnswer, *, corrupt: bool = False) -> web.StreamResponse:
    """Answer, and close what was streamed. `corrupt`: the body's first byte is another one."""
    if answer.length is None:
        return web.Response(status=answer.status, headers=answer.headers, body=_other(answer.body, corrupt))
    response = web.StreamResponse(status=answer.status, headers=answer.headers)
    response.content_length = answer.length
    try:
        await response.prepare(request)
        if answer.stream is not None:
            async for piece in answer.stream.content.iter_any():
                await response.write(_other(piece, corrupt))
                corrupt = False
    finally:
        close(answer)
    return response


def _other(data: bytes, corrupt: bool) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:] if corrupt and data else data


async def send_half(request: web.Request, answer: GcsAnswer) -> web.StreamResponse:
    """Promise everything, send half of it, end the connection in good order: bytes are missing, and nothing else tells."""
    response = web.StreamResponse(status=answer.status, headers=answer.headers)
    response.content_length = answer.body_bytes
    left = answer.body_bytes // 2
    try:
        await response.prepare(request)
        if answer.stream is None:
            await response.write(answer.body[:left])
        else:
            while left and (piece := await answer.stream.content.read(min(left, _PIECE_BYTES))):
                await response.write(piece)
                left -= len(piece)
    finally:
        close(answer)
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


def close(answer: GcsAnswer) -> None:
    """Let go of a streamed answer. Without effect after its end: its connection is back in the pool by then."""
    if answer.stream is not None:
        answer.stream.close()
