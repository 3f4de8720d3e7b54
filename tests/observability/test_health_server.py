"""The small HTTP server of the services: known paths only, bounded in every way, never in the way of the service."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from evertick.observability import health_endpoint
from evertick.observability.health_endpoint import (
    MOST_CONNECTIONS,
    MOST_REQUEST_BYTES,
    EndpointResponse,
    HealthServer,
    Route,
    get,
)
from tests.system.hosting import Said
from tests.waiting import eventually


async def hello() -> EndpointResponse:
    return EndpointResponse(body=b"hello\n")


async def broken() -> EndpointResponse:
    raise ZeroDivisionError


class Port:
    """One open port and how to talk to it without any manners."""

    def __init__(self, routes: Mapping[str, Route], port: int = 0, host: str = "127.0.0.1") -> None:
        self.said = Said()
        self._port = HealthServer(routes, host=host, port=port, log=self.said.log)
        self.url = self._port.start()

    @property
    def number(self) -> int:
        assert self.url is not None
        return int(self.url.rpartition(":")[2])

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.number)

    async def send(self, request: bytes, *, then_close: bool = False) -> bytes:
        """Everything that comes back until the other side closes."""
        reader, writer = await self.connect()
        writer.write(request)
        if then_close:
            writer.write_eof()
        async with asyncio.timeout(20):
            answer = await reader.read()
        writer.close()
        return answer

    def stop(self) -> None:
        self._port.stop()


@contextmanager
def opened(**options: Any) -> Iterator[Port]:
    port = Port({"/hello": hello, "/broken": broken}, **options)
    try:
        yield port
    finally:
        port.stop()


@pytest.fixture
def port() -> Iterator[Port]:
    with opened() as found:
        yield found


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


async def test_a_known_path_is_answered_with_its_length_and_the_connection_is_closed(port: Port) -> None:
    answer = await port.send(b"GET /hello?x=1 HTTP/1.1\r\nHost: here\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Length: 6" in head and b"Connection: close" in head
    assert body == b"hello\n"


async def test_head_gives_the_same_head_and_no_body(port: Port) -> None:
    with_body = await port.send(b"GET /hello HTTP/1.1\r\n\r\n")
    answer = await port.send(b"HEAD /hello HTTP/1.1\r\n\r\n")
    assert answer == with_body.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "expected"),
    [
        (b"GET /nothing HTTP/1.1\r\n\r\n", 404),
        (b"GET /../../etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"POST /hello HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", 405),
        (b"DELETE /hello HTTP/1.1\r\n\r\n", 405),
        (b"\x00\xff\xfe garbage\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),
        (b"hello?\r\n\r\n", 400),
        (b"GET /hello\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
    ],
)
async def test_whatever_else_is_refused_with_a_status_that_says_so(
    port: Port, request_bytes: bytes, expected: int
) -> None:
    assert status(await port.send(request_bytes)) == expected
    assert (await get(f"{port.url}/hello", seconds=30)).body == b"hello\n"


@pytest.mark.parametrize("filler", [b"X: " + b"a" * MOST_REQUEST_BYTES, b"X: a\r\n" * MOST_REQUEST_BYTES])
async def test_a_head_that_is_too_big_is_refused_and_not_collected(port: Port, filler: bytes) -> None:
    assert status(await port.send(b"GET /hello HTTP/1.1\r\n" + filler)) == 431


async def test_a_request_that_breaks_off_gets_no_answer(port: Port) -> None:
    assert await port.send(b"GET /hello HT", then_close=True) == b""


async def test_a_client_that_never_ends_its_request_is_cut_off(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_endpoint, "REQUEST_SECONDS", 0.1)
    assert status(await port.send(b"GET /hello HTTP/1.1\r\nX: ")) == 408


async def test_those_who_say_nothing_do_not_lock_out_those_who_ask(port: Port) -> None:
    """Slow loris: more silent connections than there are places."""
    silent = [await port.connect() for _ in range(2 * MOST_CONNECTIONS)]
    for _, writer in silent:
        writer.write(b"GET /hello HTTP/1.1\r\nX-Slow: ")
    for _ in range(10):
        assert (await get(f"{port.url}/hello", seconds=30)).status == 200
    # The oldest had to go, and no more than there are places are held.
    async with asyncio.timeout(20):
        gone = await asyncio.gather(*(reader.read() for reader, _ in silent[:MOST_CONNECTIONS]), return_exceptions=True)
    assert all(each == b"" or isinstance(each, ConnectionError) for each in gone)
    for _, writer in silent:
        writer.close()


async def test_an_answer_that_fails_is_a_500_and_the_port_stays_open(port: Port) -> None:
    assert (await get(f"{port.url}/broken", seconds=30)).status == 500
    assert (await get(f"{port.url}/hello", seconds=30)).status == 200
    assert len(port.said.events("health_answer_failed", path="/broken")) == 1


async def test_an_answer_that_never_comes_ends_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_endpoint, "ANSWER_SECONDS", 0.1)

    async def never() -> EndpointResponse:
        await asyncio.Event().wait()
        return EndpointResponse()

    port = Port({"/never": never})
    assert (await get(f"{port.url}/never", seconds=30)).status == 500
    port.stop()


async def test_it_answers_while_the_loop_of_its_service_is_stuck(port: Port) -> None:
    """The test's loop plays the service: it is blocked, not merely waiting, while somebody else asks."""
    answers: list[bytes] = []

    def ask() -> None:
        with socket.create_connection(("127.0.0.1", port.number), timeout=10) as client:
            client.sendall(b"GET /hello HTTP/1.1\r\n\r\n")
            answers.append(client.recv(1000))

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join(timeout=10)
    assert answers and answers[0].startswith(b"HTTP/1.1 200")


def test_a_port_that_is_taken_is_told_and_another_one_is_found() -> None:
    with opened() as first, opened(port=first.number) as second:
        assert second.url is not None and second.number != first.number
        assert second.said.events("port_unavailable", wanted=first.number, port=second.number, level="warning")


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid", "a" * 300])
def test_a_host_that_cannot_be_bound_is_a_warning_and_no_more(host: str) -> None:
    with opened(host=host) as port:
        assert port.url is None
        assert port.said.events("port_unavailable", host=host, level="warning")


async def test_stopping_closes_the_port_at_once_even_with_somebody_on_the_line(port: Port) -> None:
    _, writer = await port.connect()
    writer.write(b"GET ")
    await writer.drain()
    began = time.monotonic()
    port.stop()
    port.stop()
    assert time.monotonic() - began < 5

    async def is_closed() -> bool:
        try:
            await get(f"{port.url}/hello", seconds=30)
        except OSError:
            return True
        return False

    await eventually(is_closed)
    writer.close()


@pytest.mark.parametrize("url", ["https://127.0.0.1:1", "127.0.0.1:1", "ftp://x", "http://"])
async def test_asking_what_is_no_health_port_says_what_it_must_look_like(url: str) -> None:
    with pytest.raises(ValueError, match="must look like http://"):
        await get(url, seconds=1)
