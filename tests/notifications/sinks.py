"""Sinks for tests: a web server that remembers what it was told, and a mail server."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from aiosmtpd.controller import Controller
from aiosmtpd.handlers import Message as MessageHandler
from aiosmtpd.smtp import AuthResult, LoginPassword


@dataclass(slots=True)
class Told:
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(slots=True)
class Hook:
    """`status` is what it answers, by path; None: it never does."""

    url: str = ""
    told: list[Told] = field(default_factory=list)
    status: dict[str, int | None] = field(default_factory=dict)
    answer: bytes = b"thanks"
    released: threading.Event = field(default_factory=threading.Event)

    def ids(self, path: str = "/") -> list[str]:
        return [each.headers["evertick-delivery"] for each in self.told if each.path == path]


@contextmanager
def web_sink() -> Iterator[Hook]:
    hook = Hook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            hook.told.append(Told(self.path, {key.lower(): value for key, value in self.headers.items()}, body))
            status = hook.status.get(self.path, 200)
            if status is None:
                hook.released.wait(60)
                return
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", "http://127.0.0.1:1/")
            if status == 429:
                self.send_header("Retry-After", "77")
            self.end_headers()
            self.wfile.write(hook.answer)

        def log_message(self, *_: object) -> None: ...

    class Server(ThreadingHTTPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        hook.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield hook
        finally:
            hook.released.set()
            server.shutdown()
            thread.join()


class Inbox(MessageHandler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Message] = []

    def handle_message(self, message: Message) -> None:
        self.messages.append(message)


class _AnyPort(Controller):
    def _trigger_server(self) -> None:
        """It tries its own port to see whether it listens: the one that it got, not the one that it asked for."""
        self.port = self.server.sockets[0].getsockname()[1]
        super()._trigger_server()


@contextmanager
def mail_sink(*, tls: ssl.SSLContext | None = None, password: str | None = None) -> Iterator[tuple[Inbox, int]]:
    """With TLS it wants STARTTLS first; with a password it wants that."""
    inbox = Inbox()

    def check(_: object, __: object, ___: object, ____: object, given: object) -> AuthResult:
        is_right = isinstance(given, LoginPassword) and given.password.decode() == password
        return AuthResult(success=is_right, handled=False)

    controller = _AnyPort(
        inbox,
        hostname="127.0.0.1",
        port=0,
        tls_context=tls,
        require_starttls=tls is not None,
        authenticator=check if password else None,
        auth_required=password is not None,
    )
    controller.start()
    try:
        yield inbox, controller.port
    finally:
        controller.stop()
