"""Clients that hold connections, send slowly or read slowly. A real server, bare sockets."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress

import pytest
import structlog
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from evertick.api.app import make_app
from evertick.api.context import ApiContext
from evertick.api.server import serve
from evertick.config import Settings
from evertick.runtime.listen_socket import bound

HELD = 2000
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
SIGN_IN = b"POST /auth/token HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 36\r\n\r\n"
SIGN_IN += b'{"username": "nemo", "password": "x"}'[:36]
LONGEST_SECONDS = 30.0

Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def serving(
    database: str, settings: Settings, app: Callable[[ApiContext], FastAPI] = make_app
) -> AsyncIterator[tuple[str, int]]:
    at = bound("127.0.0.1", 0)
    stop = asyncio.Event()
    task = asyncio.create_task(serve(app, settings, database, structlog.get_logger(), at, stop))
    try:
        async with asyncio.timeout(LONGEST_SECONDS):
            yield at.getsockname()
    finally:
        stop.set()
        await task


def endless(_: ApiContext) -> FastAPI:
    """An application whose one response never ends by itself."""
    app = FastAPI()

    async def body() -> AsyncIterator[bytes]:
        while True:
            yield bytes(65536)
            await asyncio.sleep(0)

    app.add_api_route("/endless", lambda: StreamingResponse(body()))
    return app


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 3 * HELD), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def status_of(place: tuple[str, int], request: bytes) -> int:
    reader, writer = await asyncio.open_connection(*place)
    writer.write(request)
    line = await reader.readline()
    writer.close()
    return int(line.split()[1])


async def is_closed(place: tuple[str, int], *sent: bytes) -> bool:
    """Whether the server hangs up after this, however long it takes."""
    reader, writer = await asyncio.open_connection(*place)
    for each in sent:
        writer.write(each)
    with suppress(ConnectionError):
        await reader.read()
    writer.close()
    return True


@pytest.mark.requirement("H4")
@pytest.mark.usefixtures("many_descriptors")
async def test_sign_in_and_health_answer_while_2000_idle_connections_are_held(database: str) -> None:
    async with serving(database, Settings(api_rate_limit=0)) as place:
        assert await status_of(place, HEALTH) == 200
        held = []
        for _ in range(HELD):
            each = socket.socket()
            each.setblocking(False)
            held.append(each)
            await asyncio.get_running_loop().sock_connect(each, place)
        for _ in range(5):
            assert await status_of(place, HEALTH) == 200
            assert await status_of(place, SIGN_IN) in (400, 401, 422)
        for each in held:
            each.close()


async def test_a_request_in_progress_never_gives_way_to_another(database: str) -> None:
    settings = Settings(api_rate_limit=0, api_connections_per_address=2)
    async with serving(database, settings) as place:
        body = b"POST /auth/token HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{"
        busy = [await asyncio.open_connection(*place) for _ in range(2)]
        for _, writer in busy:
            writer.write(HEALTH + body)
        for reader, _ in busy:
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        assert await is_closed(place)
        for reader, writer in busy:
            await reader.readuntil(b"alive\n")
            writer.write(b"}")
            assert (await reader.readline()).startswith(b"HTTP/1.1 4")
            writer.close()


@pytest.mark.parametrize(
    "sent",
    [
        (),
        (b"GET /healthz HTTP/1.1\r\nHost:",),
        (b"POST /auth/token HTTP/1.1\r\nContent-Length: 9\r\n\r\n{",),
        (b"\r\n",),
    ],
    ids=["nothing", "half a head", "half a body", "empty lines"],
)
@pytest.mark.requirement("H4")
async def test_a_client_that_stops_sending_is_disconnected(database: str, sent: tuple[bytes, ...]) -> None:
    async with serving(database, Settings(api_slow_seconds=0.1)) as place:
        assert await is_closed(place, *sent)


async def test_an_idle_connection_is_closed(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evertick.api.http_connection.IDLE_SECONDS", 0.1)
    async with serving(database, Settings()) as place:
        assert await is_closed(place, HEALTH, b"\r\n")


async def test_a_client_that_stops_reading_is_disconnected(database: str) -> None:
    async with serving(database, Settings(api_slow_seconds=0.1), endless) as place:
        reader, writer = await asyncio.open_connection(*place, limit=1)
        writer.write(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await reader.read(1) == b"H"
        with pytest.raises(ConnectionError):
            while True:  # nothing is read, and the server answers a request after it has hung up with a reset
                writer.write(b"\r\n")
                await writer.drain()
                await asyncio.sleep(0)
