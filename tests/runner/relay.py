"""A relay in front of API processes: it can lose answers, cut everybody off, delay, and change the API for each connection."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from tests.waiting import elapse

_PART_BYTES = 256 * 1024


class Relay:
    """`loses` counts, by a part of the request's first line, how many answers are lost: the request arrives, and its
    connection breaks instead of the answer. `delay_seconds` is for each direction."""

    def __init__(self, *upstreams: int) -> None:
        self._upstreams = itertools.cycle(upstreams)
        self.loses: dict[bytes, int] = {}
        self.is_cut = False
        self.delay_seconds = 0.0
        self.connections = 0
        self.port = 0
        self._writers = set[asyncio.StreamWriter]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """From now on nothing passes, and no connection is accepted for long."""
        self.is_cut = True
        for writer in list(self._writers):
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self.is_cut:
            writer.transport.abort()
            return
        try:
            upstream, back = await asyncio.open_connection("127.0.0.1", next(self._upstreams))
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        is_lost = asyncio.Event()
        ways = [
            asyncio.create_task(self._up(reader, back, is_lost)),
            asyncio.create_task(self._down(upstream, writer, is_lost)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            for each in (writer, back):
                each.transport.abort()
            self._writers -= {writer, back}

    async def _up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_lost: asyncio.Event) -> None:
        with suppress(OSError):
            while part := await reader.read(_PART_BYTES):
                for match, left in self.loses.items():
                    if left > 0 and match in part.partition(b"\r\n")[0]:
                        self.loses[match] = left - 1
                        is_lost.set()
                await elapse(self.delay_seconds)
                writer.write(part)
                await writer.drain()

    async def _down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_lost: asyncio.Event) -> None:
        with suppress(OSError):
            while part := await reader.read(_PART_BYTES):
                if is_lost.is_set():
                    return
                await elapse(self.delay_seconds)
                writer.write(part)
                await writer.drain()


@asynccontextmanager
async def relay(*upstreams: int) -> AsyncIterator[Relay]:
    made = Relay(*upstreams)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        made.cut()
        server.close()
