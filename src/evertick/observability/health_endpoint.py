"""The health endpoint: a minimal HTTP server for health and metrics, in its own thread and event loop.

It answers however busy the service's loop is. GET and HEAD of known paths only, one request per connection, with limits
on size, time and connections. Must never take the service down: a port that is taken is a warning.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

from evertick.config import Settings
from evertick.observability.logging import Log
from evertick.processes.identity import pid_started, this_process

MOST_REQUEST_BYTES = 8 * 1024


MOST_CONNECTIONS = 64


REQUEST_SECONDS = 5.0


ANSWER_SECONDS = 10.0


LINGER_SECONDS = 1.0


BIND_SECONDS = 5.0


_ANY_PORT = 0


_METHODS = ("GET", "HEAD")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointResponse:
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = "text/plain; charset=utf-8"
    body: bytes = b""


Route = Callable[[], Awaitable[EndpointResponse]]


class HealthServer:
    """`routes` maps paths to functions that are called in this server's own loop."""

    def __init__(self, routes: Mapping[str, Route], *, host: str, port: int, log: Log) -> None:
        self._routes, self._host, self._port, self._log = dict(routes), host, port, log
        self._open: dict[asyncio.StreamWriter, None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Event | None = None
        self._bound: Future[str] = Future()
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)

    def start(self) -> str | None:
        """The URL at which it answers, or None if it cannot listen: the service works without it."""
        try:
            self._thread.start()
            return self._bound.result(timeout=BIND_SECONDS)
        except (OSError, RuntimeError, TimeoutError, ValueError) as error:
            self._log.warning("port_unavailable", host=self._host, port=self._port, error=error)
            return None

    def stop(self) -> None:
        """Safe to call twice, and if it never started."""
        if self._loop is not None and self._over is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._over.set)
                self._thread.join(timeout=LINGER_SECONDS)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except (OSError, ValueError) as error:
            if not self._bound.done():
                self._bound.set_exception(error)

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        server = await self._bind()
        host, port = server.sockets[0].getsockname()[:2]
        self._bound.set_result(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
        async with server:
            await self._over.wait()
            for writer in list(self._open):
                writer.transport.abort()

    async def _bind(self) -> asyncio.Server:
        try:
            return await self._listen(self._port)
        except OSError as error:
            # A reserved or used port is worth another try; a foreign host is not.
            if error.errno not in (errno.EADDRINUSE, errno.EACCES) or self._port == _ANY_PORT:
                raise
            server = await self._listen(_ANY_PORT)
            got = server.sockets[0].getsockname()[1]
            self._log.warning("port_unavailable", wanted=self._port, port=got)
            return server

    async def _listen(self, port: int) -> asyncio.Server:
        return await asyncio.start_server(
            self._on_connection, self._host, port, limit=MOST_REQUEST_BYTES, backlog=MOST_CONNECTIONS
        )

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= MOST_CONNECTIONS:
            # Close the oldest connection: a client that opens connections and sends nothing must not block the others.
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        self._open[writer] = None
        try:
            await self._converse(reader, writer)
        except (OSError, TimeoutError, asyncio.CancelledError):
            pass  # the client is gone or does not read; or the port closes, which is the only source of a cancel
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        method = "GET"
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                method, path = _request_line(await reader.readuntil(b"\r\n\r\n"))
        except asyncio.IncompleteReadError:
            return
        except (asyncio.LimitOverrunError, TimeoutError, ValueError) as error:
            answer = _plain(_REFUSALS.get(type(error), HTTPStatus.BAD_REQUEST))
        else:
            answer = await self._answer(method, path)
        async with asyncio.timeout(ANSWER_SECONDS):
            writer.write(_on_the_wire(answer, has_body=method != "HEAD"))
            await writer.drain()
            writer.write_eof()
            # Unread input would make the kernel reset the connection, and with it the response.
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER_SECONDS):
                    while await reader.read(MOST_REQUEST_BYTES):
                        pass
            writer.close()
            await writer.wait_closed()

    async def _answer(self, method: str, path: str) -> EndpointResponse:
        if method not in _METHODS:
            return _plain(HTTPStatus.METHOD_NOT_ALLOWED)
        route = self._routes.get(path)
        if route is None:
            known = ", ".join(sorted(self._routes))
            return EndpointResponse(status=HTTPStatus.NOT_FOUND, body=f"Not found. Try one of {known}\n".encode())
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await route()
        except Exception as error:
            self._log.error("health_answer_failed", path=path, error=error)
            return _plain(HTTPStatus.INTERNAL_SERVER_ERROR)


_REFUSALS = {
    asyncio.LimitOverrunError: HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    TimeoutError: HTTPStatus.REQUEST_TIMEOUT,
}


def _request_line(head: bytes) -> tuple[str, str]:
    """The method, and the path without its query. ValueError if this is not an HTTP/1 request."""
    method, target, version = head.split(b"\r\n", 1)[0].decode("ascii").split(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(version)
    return method, target.partition("?")[0]


def _plain(status: HTTPStatus) -> EndpointResponse:
    return EndpointResponse(status=status, body=f"{status.value} {status.phrase}\n".encode())


def _on_the_wire(answer: EndpointResponse, *, has_body: bool) -> bytes:
    head = [
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
        f"Content-Type: {answer.content_type}",
        f"Content-Length: {len(answer.body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
    ]
    if answer.status is HTTPStatus.METHOD_NOT_ALLOWED:
        head.append(f"Allow: {', '.join(_METHODS)}")
    return "\r\n".join([*head, "", ""]).encode("ascii") + (answer.body if has_body else b"")


# Fixed numbers, for people and Prometheus; if one is taken, the next free port is used.
DEFAULT_PORTS = {"up": 8790, "scheduler": 8791, "runner": 8792, "publisher": 8793, "api": 8794}


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointFile:
    """Where one process of this machine answers. `machine` distinguishes containers that share a home."""

    machine: str
    service: str
    pid: int
    pid_started: float
    url: str


class HealthEndpoint:
    """Open from `start` to `stop`. `url` is None while it is closed."""

    def __init__(self, service: str, routes: dict[str, Route], *, settings: Settings, log: Log) -> None:
        self._service, self._settings = service, settings
        port = DEFAULT_PORTS[service] if settings.health_port is None else settings.health_port
        self._port = HealthServer(routes, host=settings.health_host, port=port, log=log)
        self._note: Path | None = None
        self.url: str | None = None

    def start(self) -> None:
        if self._settings.health:
            self.url = self._port.start()

    def leave_note(self) -> None:
        """Write the endpoint file once the home exists and is locked by this process, and remove those of killed ones."""
        if self.url is not None:
            self._note = leave_note(self._settings.home, self._service, self.url)
            living_notes(self._settings.home)

    def stop(self) -> None:
        if self._note is not None:
            with suppress(OSError):
                self._note.unlink()
        self._port.stop()
        self.url = None


def leave_note(home: Path, service: str, url: str, kind: str = "health") -> Path | None:
    """Write an endpoint file of this process, in the folder of its kind."""
    path = home / kind / f"{service}-{os.getpid()}.json"
    with suppress(OSError):
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.parent.mkdir(exist_ok=True, mode=0o700)
        pid, began = os.getpid(), pid_started(os.getpid())
        note = EndpointFile(machine=_machine(), service=service, pid=pid, pid_started=began, url=url)
        half = path.with_suffix(".new")
        half.write_text(json.dumps(asdict(note)), encoding="utf-8")
        half.replace(path)
        return path
    return None


def living_notes(home: Path, kind: str = "health") -> list[EndpointFile]:
    """The live processes of this home. The file of a killed process is stale, and is removed."""
    found = []
    for path in sorted((home / kind).glob("*.json")):
        with suppress(OSError, ValueError, TypeError):
            note = EndpointFile(**json.loads(path.read_text(encoding="utf-8")))
            if note.machine != _machine():
                continue
            if pid_started(note.pid) == note.pid_started:
                found.append(note)
                continue
        with suppress(OSError):
            path.unlink()
    return found


def _machine() -> str:
    place = this_process()
    return f"{place.host} {place.boot_id} {place.pid_namespace}"


MOST_ANSWER_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Got:
    status: int
    body: bytes

    def document(self) -> dict[str, object]:
        """The JSON object in the response. Raises ValueError if there is none."""
        found = json.loads(self.body)
        if not isinstance(found, dict):
            raise ValueError("the response is not a JSON object")
        return found


async def get(url: str, *, seconds: float) -> Got:
    """Raises OSError or TimeoutError without a response in time, ValueError if the response is not that of a health port."""
    place = urlsplit(url)
    if place.scheme != "http" or not place.hostname:
        raise ValueError(f"{url!r} is not the address of a health port. It must look like http://127.0.0.1:8790")
    target = f"{place.path or '/'}?{place.query}" if place.query else place.path or "/"
    request = f"GET {target} HTTP/1.1\r\nHost: {place.netloc}\r\nConnection: close\r\n\r\n"
    async with asyncio.timeout(seconds):
        reader, writer = await asyncio.open_connection(place.hostname, place.port or 80)
        try:
            writer.write(request.encode("ascii"))
            return _parsed(await _read_all(reader))
        finally:
            writer.close()


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    parts, total = [], 0
    while part := await reader.read(64 * 1024):
        parts.append(part)
        total += len(part)
        if total > MOST_ANSWER_BYTES:
            raise ValueError(f"the response is larger than {MOST_ANSWER_BYTES} bytes")
    return b"".join(parts)


def _parsed(answer: bytes) -> Got:
    head, found, body = answer.partition(b"\r\n\r\n")
    words = head.split(b"\r\n", 1)[0].split(b" ")
    if not found or not words[0].startswith(b"HTTP/1.") or len(words) < 2:
        raise ValueError("the response is not HTTP")
    return Got(status=int(words[1]), body=body)
