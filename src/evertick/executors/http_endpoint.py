"""A small HTTP client for the APIs of container engines and clusters: a unix socket, or TCP with or without TLS.

Each request has its own connection, a deadline and a size limit. Follows no redirect, and retries nothing.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import h11

from evertick.domain.errors import ExecutorUnavailable, InvalidSettings

_PART_BYTES = 64 * 1024
_MOST_BYTES = 16 * 1024 * 1024
_LONGEST_MESSAGE = 1000
# Scheme, and whether it has TLS.
_SCHEMES = {"unix": None, "http": False, "tcp": False, "https": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    body: bytes

    @property
    def is_good(self) -> bool:
        return 200 <= self.status < 300

    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError:
            raise ExecutorUnavailable(f"its answer is not JSON: {self.body[:200]!r}") from None

    @property
    def message(self) -> str:
        """What the server says about an error."""
        text = self.body.decode("utf-8", "replace")
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if isinstance(found, dict):
            text = str(found.get("message") or found.get("msg") or found.get("detail") or text)
        text = " ".join(text.split())[:_LONGEST_MESSAGE]
        return text or f"it answered {self.status}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. `query`: values that are not texts are sent as JSON."""

    method: str
    path: str
    query: Mapping[str, object] = field(default_factory=dict)
    body: bytes = field(default=b"", repr=False)
    kind: str = "application/json"

    @property
    def target(self) -> str:
        texts = {name: each if isinstance(each, str) else json.dumps(each) for name, each in self.query.items()}
        return quote(self.path) + (f"?{urlencode(texts)}" if texts else "")


class HttpEndpoint:
    """A server's address from its URL. Raises InvalidSettings, which names the setting, for an invalid one."""

    def __init__(self, url: str, *, setting: str, tls: ssl.SSLContext | None = None, token: str | None = None) -> None:
        parts = urlsplit(url)
        is_unix = parts.scheme == "unix"
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in _SCHEMES or port == -1 or not (parts.path if is_unix else parts.hostname):
            raise InvalidSettings(f"{setting}={url!r} is not an address: write one such as unix:///run/engine.sock.")
        if parts.username or parts.password:
            raise InvalidSettings(f"{setting} must not contain a user or password.")
        self.url, self._socket = url, parts.path if is_unix else None
        self._tls = tls or (ssl.create_default_context() if _SCHEMES[parts.scheme] else None)
        self._host, self._port = parts.hostname or "localhost", port or (443 if self._tls else 80)
        self._prefix = "" if is_unix else parts.path.rstrip("/")
        self._headers = [("Host", parts.netloc or "localhost"), ("Connection", "close")]
        if token is not None:
            self._headers.append(("Authorization", f"Bearer {token}"))
        self.is_exposed = not is_unix and self._tls is None and self._host not in ("localhost", "127.0.0.1", "::1")

    async def ask(self, ask: Ask, *, seconds: float) -> Answer:
        """Raises ExecutorUnavailable without a complete answer; the server may have done it nevertheless."""
        try:
            async with asyncio.timeout(seconds), self._opened(ask) as (status, parts):
                content = bytearray()
                async for part in parts:
                    content += part
                    if len(content) > _MOST_BYTES:
                        raise ExecutorUnavailable(f"its answer to {ask.path} is larger than {_MOST_BYTES} bytes")
                return Answer(status=status, body=bytes(content))
        except TimeoutError:
            raise ExecutorUnavailable(f"{self.url} did not answer within {seconds:g} s") from None

    async def lines(self, ask: Ask, *, seconds: float) -> AsyncIterator[bytes]:
        """The lines of an answer that goes on, until the server ends it or no byte arrived for so long."""
        async with self._opened(ask, idle_seconds=seconds) as (status, parts):
            if status != 200:
                raise ExecutorUnavailable(f"{ask.path} answered {status}")
            rest = b""
            async for part in parts:
                *whole, rest = (rest + part).split(b"\n")
                for line in whole:
                    yield line

    @asynccontextmanager
    async def _opened(
        self, ask: Ask, idle_seconds: float | None = None
    ) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        try:
            if self._socket is not None:
                reader, writer = await asyncio.open_unix_connection(self._socket)
            else:
                reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        except OSError as error:
            raise ExecutorUnavailable(f"{self.url} cannot be reached: {error.strerror or error}") from None
        line = h11.Connection(h11.CLIENT)
        headers = [*self._headers, ("Content-Type", ask.kind), ("Content-Length", str(len(ask.body)))]
        try:
            writer.write(line.send(h11.Request(method=ask.method, target=ask.target, headers=headers)) or b"")
            if ask.body:
                writer.write(line.send(h11.Data(data=ask.body)) or b"")
            writer.write(line.send(h11.EndOfMessage()) or b"")
            await writer.drain()
            events = _events(line, reader, idle_seconds)
            head = await anext(events)
            assert isinstance(head, h11.Response)
            yield head.status_code, (bytes(each.data) async for each in events if isinstance(each, h11.Data))
        except TimeoutError:
            raise
        except (OSError, h11.RemoteProtocolError, StopAsyncIteration) as error:
            raise ExecutorUnavailable(f"{self.url} broke the connection: {error or 'no answer'}") from None
        finally:
            writer.close()


async def _events(
    line: h11.Connection, reader: asyncio.StreamReader, idle_seconds: float | None
) -> AsyncIterator[h11.Event]:
    """Response, then data; ends with the message."""
    while True:
        match line.next_event():
            case h11.NEED_DATA:
                async with asyncio.timeout(idle_seconds):
                    line.receive_data(await reader.read(_PART_BYTES))
            case h11.InformationalResponse():
                pass
            case h11.EndOfMessage() | h11.ConnectionClosed():
                return
            case h11.Event() as event:
                yield event
            case _:
                raise OSError("the answer is not complete")
