"""The process around the proxy: starts it, says that it is ready, waits for the end, takes it down."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence

from aiohttp import web

from raystate.testing.gcs.faults import FaultRule
from raystate.testing.gcs.proxy import Proxy
from raystate.waits import MOMENT_S

_READ_BYTES = 1 << 20  # read ahead per connection


async def serve(
    *,
    host: str,
    port: int,
    buckets: Sequence[str],
    rules: tuple[FaultRule, ...],
    strict: bool,
    writes_per_object_s: float | None,
    lifeline: bool,
    ready: Callable[[str], None],
) -> None:
    """Serve until SIGINT, SIGTERM or the end of standard input.

    Args:
        host: address to listen on.
        port: 0: a free one.
        buckets: to create first.
        rules: faults from the start.
        strict: whether preconditions count.
        writes_per_object_s: see `Counts.too_soon`.
        lifeline: end when standard input ends, as it does when the process that holds it dies.
        ready: called with the server's URL once it answers.

    Raises:
        GcsError: a bucket can't be created.
        OSError: the port is taken.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if lifeline:
        loop.add_reader(sys.stdin.fileno(), _on_lifeline, loop, stop)

    proxy = Proxy(strict=strict, writes_per_object_s=writes_per_object_s, rules=rules)
    for bucket in buckets:
        proxy.objects.create_bucket({"name": bucket})
    app = web.Application(client_max_size=0)
    app.router.add_route("*", "/{path:.*}", proxy.handle)
    # A client that goes away cancels what waits for it alone. Bodies stay as they were sent.
    runner = web.AppRunner(
        app, access_log=None, handler_cancellation=True, auto_decompress=False, read_bufsize=_READ_BYTES,
        shutdown_timeout=MOMENT_S,
    )  # fmt: skip
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, backlog=1024).start()
        ready(f"http://{host}:{runner.addresses[0][1]}")
        await stop.wait()
    finally:
        await runner.cleanup()


def _on_lifeline(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        loop.remove_reader(sys.stdin.fileno())
        stop.set()
