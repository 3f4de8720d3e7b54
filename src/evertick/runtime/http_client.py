"""An HTTP/1.1 client with h11, for agents and runners: each request has a deadline and a size limit, and can be canceled.

Follows no redirects: tokens are sent only to the configured address. Repeats nothing by itself.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import h11

from evertick.domain.agent_protocol import read_server_url
from evertick.domain.errors import (
    ApiUnreachable,
    Conflict,
    EvertickError,
    Forbidden,
    InvalidSettings,
    LeaseLost,
    NotFound,
    ReportRefused,
    ResultLost,
    Unauthenticated,
    UserError,
)

_PART_BYTES = 64 * 1024
_UPLOAD_PART_BYTES = 256 * 1024
# Shorter than the API keeps an idle connection (30 s), so that a request seldom meets one that is being closed.
_REUSE_SECONDS = 20.0
_MOST_IDLE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpResponse:
    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """`content` is streamed; `size` is its length in bytes."""

    method: str
    path: str
    token: str = field(repr=False)
    content: AsyncIterator[bytes] | bytes = field(default=b"", repr=False)
    size: int = 0
    kind: str = "application/json"


@dataclass(slots=True, eq=False)
class _Line:
    """An open connection, between two requests."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    http: h11.Connection
    used_at: float

    @property
    def is_usable(self) -> bool:
        is_open = not self.reader.at_eof() and not self.writer.is_closing()
        return is_open and time.monotonic() - self.used_at < _REUSE_SECONDS


class HttpEndpoint:
    """A server's address, from its URL. Raises InvalidSettings for an invalid one.

    `reuses_connections`: a connection serves one request after the other. Otherwise each request has its own.
    """

    def __init__(self, url: str, *, ca_file: Path | None = None, reuses_connections: bool = False) -> None:
        parts = read_server_url(url)
        self._host, self._netloc, self._path = parts.hostname, parts.netloc, parts.path.rstrip("/")
        self._tls = _tls_context(ca_file) if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._reuses, self._idle, self._busy = reuses_connections, list[_Line](), set[_Line]()
        self.is_plain = self._tls is None and self._host not in ("localhost", "127.0.0.1", "::1")

    async def ask(self, request: HttpRequest, *, seconds: float, most_bytes: int) -> HttpResponse:
        """Send the request. Raises OSError or TimeoutError without a complete response; the server may still have processed it."""
        async with asyncio.timeout(seconds):
            line = await self._open()
            self._busy.add(line)
            try:
                answer = await self._exchange(request, line, most_bytes)
                self._keep(line)
                return answer
            except h11.RemoteProtocolError as error:
                raise OSError(f"the response is not HTTP: {error}") from None
            except h11.LocalProtocolError as error:
                # The file changed while it was sent: not a network error, and a retry would not help.
                raise EvertickError(f"the request cannot be sent: {error}") from None
            finally:
                self._busy.discard(line)
                if line not in self._idle:
                    line.writer.close()

    def abort(self) -> None:
        """Cut every connection that waits for an answer."""
        for line in self._busy:
            line.writer.transport.abort()

    def close(self) -> None:
        for line in self._idle:
            line.writer.close()
        self._idle.clear()

    async def _open(self) -> _Line:
        while self._idle:
            if (line := self._idle.pop()).is_usable:
                return line
            line.writer.close()
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        return _Line(reader, writer, h11.Connection(h11.CLIENT), time.monotonic())

    def _keep(self, line: _Line) -> None:
        if self._reuses and line.http.our_state is line.http.their_state is h11.DONE and len(self._idle) < _MOST_IDLE:
            line.http.start_next_cycle()
            line.used_at = time.monotonic()
            self._idle.append(line)

    async def _exchange(self, request: HttpRequest, line: _Line, most_bytes: int) -> HttpResponse:
        http, writer, content = line.http, line.writer, request.content
        size = len(content) if isinstance(content, bytes) else request.size
        headers = [("Host", self._netloc), ("Authorization", f"Bearer {request.token}")]
        headers += [] if self._reuses else [("Connection", "close")]
        headers += [("Accept", "application/json"), ("Content-Type", request.kind), ("Content-Length", str(size))]
        head = h11.Request(method=request.method, target=f"{self._path}{request.path}", headers=headers)
        # In one write: the body of a small request would otherwise wait for the acknowledgment of its head.
        first = http.send(head) or b""
        if isinstance(content, bytes):
            writer.write(first + (http.send(h11.Data(data=content)) or b"" if content else b""))
        else:
            writer.write(first)
            async for part in content:
                writer.write(http.send(h11.Data(data=part)) or b"")
                await writer.drain()
        writer.write(http.send(h11.EndOfMessage()) or b"")
        await writer.drain()
        return await _read(http, line.reader, most_bytes)


def _tls_context(ca_file: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise InvalidSettings(f"The file with certificate authorities, {ca_file}, cannot be used: {error}.") from None


async def _read(http: h11.Connection, reader: asyncio.StreamReader, most_bytes: int) -> HttpResponse:
    status, headers, parts, total = 0, {}, [], 0
    while True:
        match http.next_event():
            case h11.NEED_DATA:
                read = await reader.read(_PART_BYTES)
                if not read and not status:
                    raise OSError("the connection broke before a response arrived")
                http.receive_data(read)
            case h11.Response() as response:
                status = response.status_code
                headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in response.headers}
            case h11.Data() as part:
                total += len(part.data)
                if total > most_bytes:
                    raise OSError(f"the response is larger than {most_bytes} bytes")
                parts.append(bytes(part.data))
            case h11.EndOfMessage():
                return HttpResponse(status=status, headers=headers, body=b"".join(parts))
            case h11.InformationalResponse():
                pass
            case _:
                raise OSError("the connection broke before the response was complete")


async def parts_of(file: Path, *, at: int = 0) -> AsyncIterator[bytes]:
    """The content of a file, from that position on."""
    with await asyncio.to_thread(file.open, "rb") as opened:
        opened.seek(at)
        while part := await asyncio.to_thread(opened.read, _UPLOAD_PART_BYTES):
            yield part


_KINDS: dict[str, type[EvertickError]] = {
    "conflict": Conflict,
    "lease_lost": LeaseLost,
    "refused": Unauthenticated,
    "forbidden": Forbidden,
    "result_lost": ResultLost,
    "report_refused": ReportRefused,
}


def problem_of(answer: HttpResponse) -> EvertickError:
    """The error for a response that is not a success. Only an Evertick problem document is trusted: proxies send 4xx of
    their own."""
    code, detail = "", f"the API answered {answer.status}"
    if 300 <= answer.status < 400:
        # Redirects are not followed: the token goes only to the configured address.
        moved = answer.headers.get("location", "another address")
        detail = f"{detail}, redirecting to {moved}: configure that address for agents and runners"
    with suppress(ValueError, KeyError, TypeError):
        told = json.loads(answer.body)
        code, detail = str(told["code"]), str(told["detail"])
    if code in _KINDS:
        return _KINDS[code](detail)
    if answer.status in (400, 404, 413, 422) and code:
        return (NotFound if answer.status == 404 else UserError)(detail)
    return ApiUnreachable(detail, problem=code)


def read_token(given: str | None, file: Path | None, *, what: str, needs: str) -> str:
    """A token from a setting, or from the named file. Raises InvalidSettings, which never quotes the token."""
    token = given or ""
    if file is not None:
        try:
            token = file.read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "the file is not text"
            raise InvalidSettings(f"the token file {file} cannot be read: {why}.") from None
    if not token.strip():
        raise InvalidSettings(needs)
    if not token.strip().isascii() or len(token.split()) > 1 or not token.strip().isprintable():
        raise InvalidSettings(f"{what} is malformed: it must be a single word.")
    return token.strip()
