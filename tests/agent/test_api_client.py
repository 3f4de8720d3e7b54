"""What an agent makes of answers that are not the API's (V5)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from evertick.agent.api_client import AgentClient
from evertick.domain.errors import ApiUnreachable, EvertickError
from tests.system.hosting import Said


@asynccontextmanager
async def stranger(body: bytes, *, head: bytes = b"200 OK", asked: list[bytes] | None = None) -> AsyncIterator[str]:
    """A server that answers everything with that: a proxy's own page, or another program at the address. `asked`: what it was."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        if asked is not None:
            asked.append(request.partition(b"\r\n")[0])
        writer.write(b"HTTP/1.1 %s\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (head, len(body), body))
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
        line = AgentClient(url, "start-token", log=Said().log)
        line._token = "attempt-token"
        with pytest.raises(ApiUnreachable, match="not an Evertick API of this release"):
            await line.heartbeat(0.0)
        with pytest.raises(ApiUnreachable, match="not an Evertick API of this release"):
            await line.start()


async def test_an_address_below_a_path_is_asked_there_and_one_that_moved_is_told_and_not_followed() -> None:
    asked: list[bytes] = []
    moved = b"308 Permanent Redirect\r\nLocation: https://evertick.example.com/api"
    async with stranger(b"", head=moved, asked=asked) as url:
        line = AgentClient(f"{url}/evertick/", "start-token", log=Said().log)
        with pytest.raises(ApiUnreachable, match=r"308, redirecting to https://evertick\.example\.com/api: configure"):
            await line.start()
    assert asked == [b"POST /evertick/api/agent/v1/start HTTP/1.1"]


async def test_a_file_that_shrank_on_its_way_is_no_line_that_broke(tmp_path: Path) -> None:
    (tmp_path / "result").write_text("short")
    async with stranger(b"") as url:
        line = AgentClient(url, "start-token", log=Said().log)
        with pytest.raises(EvertickError, match="the request cannot be sent") as error:
            await line.put("/results/x", tmp_path / "result", 100)
    assert not isinstance(error.value, ApiUnreachable)
