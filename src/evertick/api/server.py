"""The API's HTTP server: Uvicorn with limits on headers, trailers and chunk extensions, and single-write responses.

The parser buffers headers of any size until they are complete: headers without an end would fill the memory.
Header and body of a response leave in one write: separate writes cost another system call, packet and read.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from evertick.api.context import ApiContext
from evertick.api.service import IDLE_SECONDS, STOP_SECONDS
from evertick.config import Settings
from evertick.db.connect import Purpose
from evertick.observability.logging import Log
from evertick.runner.housekeeping import clean_results
from evertick.runtime.connections import ReconnectingConnection

MOST_HEAD_BYTES = 64 * 1024


class WholeAnswer:
    """The transport of one response: holds back a header with a content length until the body begins. Streams have none."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head: bytes | None = None
        self._has_begun = False

    def write(self, data: bytes) -> None:
        is_first, self._has_begun = not self._has_begun, True
        if self._head is not None:
            data, self._head = self._head + data, None
        elif is_first and b"\r\ncontent-length: " in data:
            self._head = data
            return
        self._transport.write(data)

    def close(self) -> None:
        if self._head is not None:
            self.write(b"")
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class BoundedHttp(HttpToolsProtocol):
    """Closes a connection that sends headers, trailers or chunk extensions above the size limit."""

    _bytes_since = 0

    def data_received(self, data: bytes) -> None:
        self._bytes_since += len(data)
        super().data_received(data)
        if self._bytes_since > MOST_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"Request headers too large: the limit is {MOST_HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        self._bytes_since = 0
        super().on_headers_complete()
        if self.scope["method"] == "GET":
            self.cycle.transport = WholeAnswer(self.transport)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        self._bytes_since = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._bytes_since = 0
        super().on_message_complete()


class _Server(uvicorn.Server):
    """A server without signal handlers: the service installs its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    make_app: Callable[[ApiContext], FastAPI],
    settings: Settings,
    url: str,
    log: Log,
    at: socket.socket,
    stop: asyncio.Event,
) -> None:
    """Serve until `stop` is set."""
    desk = ApiContext(settings, url, log)
    config = uvicorn.Config(
        make_app(desk),
        loop="asyncio",
        http=BoundedHttp,
        ws="none",
        lifespan="off",
        log_config=None,
        # No access log: paths may contain a one-time secret.
        access_log=False,
        server_header=False,
        proxy_headers=bool(settings.api_trusted_proxies),
        forwarded_allow_ips=list(settings.api_trusted_proxies),
        limit_concurrency=settings.api_connections,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=STOP_SECONDS,
    )
    server = _Server(config)

    async def end() -> None:
        await stop.wait()
        # Close the streams before the server waits for open requests: streams do not end on their own.
        desk.hub.close()
        desk.stop_watch.close()
        server.should_exit = True

    async with asyncio.TaskGroup() as group:
        pools = [desk.readers, desk.writers, desk.agents]
        # Large results of agents are stored on the API's machine.
        cleaning = clean_results(settings, link=ReconnectingConnection(url, Purpose.API_READ), log=log, is_own=True)
        works = (end(), desk.hub.run(), desk.remembered.run(), cleaning, *(pool.tend() for pool in pools))
        beside = [group.create_task(each) for each in works]
        await server.serve(sockets=[at])
        for each in beside:
            each.cancel()
