"""What an agent makes of answers that are not the API's (V5)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from evertick.domain.errors import Unanswered
from evertick.services.agent_line import AgentLine
from tests.services.hosting import Said


@asynccontextmanager
async def stranger(body: bytes) -> AsyncIterator[str]:
    """A server that answers everything with that: a proxy's own page, or another program at the address."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}"


@pytest.mark.parametrize(
    "body",
    [b"", b"ok", b"null", b"[]", b'"ok"', b'{"status": "ok"}', b'{"token": "a", "renewal": "b", "word": "continue"}'],
)
async def test_a_heartbeat_that_somebody_else_answers_is_one_that_nobody_did(body: bytes) -> None:
    async with stranger(body) as url:
        line = AgentLine(url, "start-token", log=Said().log)
        line._token = "attempt-token"
        with pytest.raises(Unanswered, match="no API of this release"):
            await line.heartbeat(0.0)
        with pytest.raises(Unanswered, match="no API of this release"):
            await line.start()
