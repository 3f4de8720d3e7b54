"""A server that speaks PostgreSQL's protocol and is not PostgreSQL: it tells its parameters and its `version()`, and rejects every
other statement."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager


def _message(kind: bytes, *parts: bytes) -> bytes:
    body = b"".join(parts)
    return kind + struct.pack("!i", len(body) + 4) + body


def _text(*parts: str) -> bytes:
    return b"".join(part.encode() + b"\0" for part in parts)


_READY = _message(b"Z", b"I")


def _answer(statement: bytes, version: str) -> bytes:
    # The client library itself asks this one while it connects.
    is_recovery = statement.lower().startswith(b"select") and b"pg_is_in_recovery" in statement and len(statement) < 60
    if b"version()" not in statement and not is_recovery:
        wrong = _text("SERROR", "VERROR", "C42883", "Munknown function: pg_control_system()") + b"\0"
        return _message(b"E", wrong) + _READY
    value = b"f" if is_recovery else version.encode()
    column = _text("version") + struct.pack("!ihihih", 0, 0, 25, -1, -1, 0)
    row = struct.pack("!hi", 1, len(value)) + value
    parts = [_message(b"T", struct.pack("!h", 1), column), _message(b"D", row), _message(b"C", _text("SELECT 1"))]
    # A simple query has no answer to a parse and a bind.
    begun = b"" if is_recovery else _message(b"1") + _message(b"2")
    return begun + b"".join(parts) + _READY


@asynccontextmanager
async def other_server(version: str, parameters: Mapping[str, str]) -> AsyncIterator[str]:
    """Its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                (size,) = struct.unpack("!i", await reader.readexactly(4))
                body = await reader.readexactly(size - 4)
                if struct.unpack("!i", body[:4])[0] == 196608:
                    break
                writer.write(b"N")  # neither TLS nor GSS
            told = [_message(b"S", _text(name, value)) for name, value in parameters.items()]
            writer.write(_message(b"R", struct.pack("!i", 0)) + b"".join(told))
            writer.write(_message(b"K", struct.pack("!ii", 1, 1)) + _READY)
            statement = b""
            while True:
                kind = await reader.readexactly(1)
                (size,) = struct.unpack("!i", await reader.readexactly(4))
                body = await reader.readexactly(size - 4)
                if kind in (b"P", b"Q"):
                    statement = body
                if kind in (b"S", b"Q"):
                    writer.write(_answer(statement, version))
                elif kind == b"X":
                    break
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"postgresql://me@127.0.0.1:{port}/d"
