"""What comes over the line before it is a request: heads of any size, odd bytes, several at once. A real server, bare sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

import pytest

from evertick.api.http_connection import MOST_HEAD_BYTES, WholeAnswer
from tests.api.test_airflow import address as served

address = served
LONGEST_SECONDS = 20.0
PIECE = b"a" * 8192
# More than the sockets between two processes hold: whoever goes on reading is found out.
TOO_MANY_PIECES = 4096

Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def line_to(address: str) -> AsyncIterator[Line]:
    parts = urlsplit(address)
    async with asyncio.timeout(LONGEST_SECONDS):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            yield reader, writer
        finally:
            writer.close()


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = next(line for line in head.split("\r\n") if line.startswith("content-length:"))
    return int(head.split()[1]), await reader.readexactly(int(length.split(":")[1]))


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Long: ", PIECE),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\n", b"x-another: one\r\n" * 500),
        (b"GET /", PIECE),
        (b"POST /auth/token HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX-Late: ", PIECE),
        (b"POST /auth/token HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2;", PIECE),
    ],
    ids=["a header", "headers", "a path", "a trailer", "a chunk's extension"],
)
@pytest.mark.requirement("H4")
async def test_what_has_no_end_is_cut_off(address: str, start: bytes, piece: bytes) -> None:
    async with line_to(address) as (reader, writer):
        writer.write(start)
        sent = 0
        with suppress(ConnectionError):
            while sent < TOO_MANY_PIECES:
                writer.write(piece)
                await writer.drain()
                sent += 1
        assert sent < TOO_MANY_PIECES, "the server took all of it"
        with suppress(ConnectionError):
            said = await reader.read()
            assert not said or said.startswith(b"HTTP/1.1 400 ")


async def test_whoever_hangs_up_in_the_middle_of_a_body_is_nobodys_fault(
    address: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async with line_to(address) as (reader, writer):
        writer.write(b"POST /auth/token HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        await writer.drain()
    async with line_to(address) as (reader, writer):
        # Answered after the other one: what the server has to say of that one, it has said.
        writer.write(b"POST /auth/token HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        assert (await answer(reader))[0] in {400, 401, 415, 422}
    assert "ClientDisconnect" not in "".join(capfd.readouterr())


async def test_a_large_head_passes_one_time_after_another(address: str) -> None:
    large = b"GET /healthz HTTP/1.1\r\nHost: x\r\nCookie: a=" + b"a" * (MOST_HEAD_BYTES - 1000) + b"\r\n\r\n"
    async with line_to(address) as (reader, writer):
        for _ in range(3):
            writer.write(large)
            assert await answer(reader) == (200, b"alive\n")


async def test_several_requests_at_once_are_answered_in_turn(address: str) -> None:
    async with line_to(address) as (reader, writer):
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /nothing HTTP/1.1\r\nHost: x\r\n\r\n" * 20)
        for _ in range(20):
            assert (await answer(reader))[0] == 200
            assert (await answer(reader))[0] == 404


@pytest.mark.parametrize(
    "request_line",
    [
        b"GET /\xc3\xa4 HTTP/1.1",
        b"GET /\x00 HTTP/1.1",
        b"GET",
        b"\x16\x03\x01\x02\x00",
        b"GET / HTTP/9.9",
        b"G\xc3\x84T / HTTP/1.1",
    ],
)
async def test_what_is_no_http_is_refused(address: str, request_line: bytes) -> None:
    async with line_to(address) as (reader, writer):
        writer.write(request_line + b"\r\nHost: x\r\n\r\n")
        said = await reader.read()
        assert said.startswith(b"HTTP/1.1 400 "), said
        assert b"Traceback" not in said


@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: 2\r\nTransfer-Encoding: chunked",
        b"Content-Length: 2\r\nContent-Length: 3",
        b"Transfer-Encoding: chunked, identity",
        b"Content-Length: +2",
        b"Content-Length : 2",
    ],
)
async def test_a_body_whose_length_two_servers_could_read_differently_is_refused(address: str, headers: bytes) -> None:
    async with line_to(address) as (reader, writer):
        writer.write(
            b"POST /auth/token HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n\r\n0\r\n\r\nGET /healthz HTTP/1.1\r\n\r\n"
        )
        said = await reader.read()
        assert said.startswith(b"HTTP/1.1 400 "), said
        assert b"alive" not in said


class Sent:
    """A transport that only notes what is sent."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.pieces.append(data)

    def close(self) -> None:
        self.pieces.append(b"closed")

    def is_closing(self) -> bool:
        return False


HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"
STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ([HEAD, b"whole"], [HEAD + b"whole"]),
        ([HEAD, b"wh", b"ole"], [HEAD + b"wh", b"ole"]),
        # A body may look like a head.
        ([HEAD, b"", HEAD], [HEAD, HEAD]),
        ([STREAM, b"piece"], [STREAM, b"piece"]),
        ([STREAM, HEAD], [STREAM, HEAD]),
        # Whoever fails after the head closes the line: what was begun is seen as such.
        ([HEAD, None], [HEAD, b"closed"]),
        ([HEAD, b"whole", None], [HEAD + b"whole", b"closed"]),
    ],
)
def test_an_answer_leaves_in_one_piece_and_a_stream_at_once(written: list[bytes | None], sent: list[bytes]) -> None:
    below = Sent()
    answering = WholeAnswer(below)  # type: ignore[arg-type]
    for data in written:
        if data is None:
            answering.close()
        else:
            answering.write(data)
    assert below.pieces == sent and not answering.is_closing()


@pytest.mark.parametrize("asked", [b"GET", b"HEAD"])
async def test_several_questions_at_once_are_answered_one_after_the_other(address: str, asked: bytes) -> None:
    async with line_to(address) as (reader, writer):
        writer.write(3 * (asked + b" /healthz HTTP/1.1\r\nHost: x\r\n\r\n"))
        for _ in range(3):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.partition("content-length: ")[2].split("\r\n")[0])
            assert head.startswith("http/1.1 200 ") and length > 0
            if asked == b"GET":
                await reader.readexactly(length)
